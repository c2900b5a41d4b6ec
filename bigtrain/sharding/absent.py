"""Absent devices: descriptions of TPUs and GPUs to compile programs for.

XLA's compilers for TPUs (package libtpu) and for NVIDIA's GPUs (jax's CUDA
plugin) run on any machine and need no device. tools.plan compiles for absent
devices to estimate memory and time.
"""

import contextlib
import contextvars
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError

# {name of a GPU: file with its description for XLA}.
GPUS = {p.stem: p for p in pathlib.Path(__file__).parent.glob("*.txtpb")}
_GPU = re.compile(r"(\w+):(\d+)x(\d+)$")

# Every TPU host has at least this number of chips. A smaller topology is a part
# of a host.
_MIN_CHIPS_PER_HOST = 4

# Environment in which libtpu neither searches for TPUs nor locks them, so that
# several processes can compile together.
NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

current_topology: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  "topology of absent devices", default=None
)


@contextlib.contextmanager
def absent_devices(topology: str | None) -> Iterator[None]:
  """Makes `sharding.from_config` use absent devices inside a `with` block.

  Args:
    topology: a TPU slice, such as "v5p:2x2x2", or servers x GPUs of a server,
      such as "h100:8x8"; None for this machine's devices.
  """
  token = current_topology.set(topology)
  try:
    yield
  finally:
    current_topology.reset(token)


def devices(topology: str) -> Sequence[Any]:
  """The absent devices of a topology."""
  match = _GPU.match(topology)
  if match and match[1] in GPUS:
    return _gpus(topology, match)
  return _tpus(topology)


def _gpus(topology: str, match: re.Match[str]) -> Sequence[Any]:
  from jax.experimental import topologies

  name, servers, gpus_per_server = match.groups()
  description = GPUS[name].read_text()
  if not _has_cuda_plugin():
    raise ConfigError(
      f"absent devices {topology!r}: needs jax's CUDA plugin, as "
      "`make install EXTRAS=cuda` or `pip install 'bigtrain[cuda]'` install it."
    )
  try:
    devices = topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      target_config=description,
      # Slices x hosts x devices: jax numbers servers of real GPUs as slices.
      topology=f"{servers}x1x{gpus_per_server}",
    ).devices
  except Exception as e:  # The plugin may raise anything.
    raise ConfigError(
      f"absent devices {topology!r}: the CUDA plugin refuses them "
      f"({' '.join(str(e).split())})."
    ) from e
  tell_cudnn(description)
  return devices


def _has_cuda_plugin() -> bool:
  plugins = importlib.util.find_spec("jax_plugins")
  folders = (plugins and plugins.submodule_search_locations) or []
  return any(any(pathlib.Path(f).glob("xla_cuda*")) for f in folders)


def tell_cudnn(description: str) -> None:
  """Makes jax's checks of the cuDNN version use an absent GPU's description.

  jax has no public setting for this: it asks the GPU of this machine.
  """
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  def numbers(field: str) -> list[int]:
    match = re.search(field + r" \{([^}]*)\}", description)
    assert match, field
    named = dict(re.findall(r"(\w+): (\d+)", match[1]))
    return [int(named.get(n, 0)) for n in ("major", "minor", "patch")]

  major, minor, patch = numbers("dnn_version_info")
  capability = numbers("cuda_compute_capability")[:2]

  def check_cudnn_version() -> int:
    return major * 10_000 + minor * 100 + patch

  def check_compute_capability(least: str) -> bool:
    return capability >= [int(n) for n in least.split(".")]

  def is_cuda_compute_capability_equal(other: str) -> bool:
    return capability == [int(n) for n in other.split(".")]

  cudnn.check_cudnn_version = check_cudnn_version
  cudnn.check_compute_capability = check_compute_capability
  cudnn.is_cuda_compute_capability_equal = is_cuda_compute_capability_equal


def _wraps(sizes: Sequence[int]) -> tuple[bool, ...]:
  """For each dimension of a TPU slice, whether its ends are linked.

  They are in three-dimensional slices that consist of cubes of 4 x 4 x 4 chips
  (v4, v5p, Ironwood), and in dimensions of 16 chips of two-dimensional slices
  (v5e, v6e). Without such links XLA replaces a gather over 64 chips by an
  all-reduce.
  """
  if len(sizes) == 3:
    return (all(size % 4 == 0 for size in sizes),) * 3
  return (*(size == 16 for size in sizes), False, False, False)[:3]


def _tpus(topology: str) -> Sequence[Any]:
  from jax.experimental import topologies

  for name, value in NO_TPU.items():
    os.environ.setdefault(name, value)
  sizes = [int(n) for n in re.findall(r"\d+", topology.partition(":")[2])]
  options: dict[str, Any] = {"wrap": _wraps(sizes)}
  # By default libtpu expects whole hosts. For a part of one, the part is
  # declared to be a host.
  if np.prod(sizes) < _MIN_CHIPS_PER_HOST:
    options["chips_per_host_bounds"] = [*sizes, 1, 1][:3]
  try:
    return topologies.get_topology_desc(
      platform="tpu", topology_name=topology, **options
    ).devices
  except Exception as e:  # The plugin may raise anything.
    gpus = ", ".join(f"'{name}:8x8'" for name in sorted(GPUS))
    raise ConfigError(
      f"absent devices {topology!r}: needs the package libtpu and a topology "
      f"such as 'v5p:2x2x2', or GPUs such as {gpus} "
      f"({' '.join(str(e).split())})."
    ) from e
