"""The device mesh: replica x fsdp x sequence x tensor.

  replica    copies of the training state
  fsdp       parts of the training state; a layer's are gathered for its use
  sequence   parts of each example along its length
  tensor     parts of each layer: heads, hidden widths, vocabularies

The batch is split over `replica` and `fsdp`. The devices of a `tensor` group
send the most, so they are neighbours; then come `sequence` and `fsdp`.
slices.py places the axes on several slices of TPUs or servers with GPUs.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bigtrain.settings import Config, ConfigError, check_kwargs
from bigtrain.sharding import absent
from bigtrain.sharding import slices as slices_lib

BATCH_AXES = ("replica", "fsdp")
AXES = (*BATCH_AXES, "sequence", "tensor")


def make_mesh(
  replica: int = 1,
  fsdp: int = -1,
  sequence: int = 1,
  tensor: int = 1,
  *,
  slices: int | None = None,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh of all devices with the axes `AXES`.

  Args:
    replica: number of copies of the sharded state. One of the sizes may be -1,
      for the devices that the others leave.
    slices: number of slices of TPUs or of servers with GPUs, which is checked;
      by default as many as the devices report.
    devices: all devices of the job unless given.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices, or there is
      another number of slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  given = dict(zip(AXES, (replica, fsdp, sequence, tensor)))
  sizes = fitted(given, len(devices))
  groups = slices_lib.grouped(devices, slices)
  mesh = Mesh(slices_lib.arranged(groups, tuple(sizes.values())), AXES)
  slices_lib.warn_of_slow_axes(mesh.devices, AXES, groups)
  return mesh


def fitted(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
  """Returns the sizes of the axes with -1 replaced.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  for axis, size in sizes.items():
    if not isinstance(size, int) or (size < 1 and size != -1):
      raise ConfigError(
        f"config.mesh.{axis}: expected a positive whole number or -1, got "
        f"{size!r}."
      )
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise ConfigError(
      f"config.mesh: only one of {' and '.join(open_axes)} can be -1."
    )
  known = math.prod(size for size in sizes.values() if size != -1)
  filled = {
    axis: max(1, num_devices // known) if size == -1 else size
    for axis, size in sizes.items()
  }
  total = math.prod(filled.values())
  if total != num_devices:
    shown = _in_words(filled)
    raise ConfigError(
      f"config.mesh: {shown} = {total}, but there are {num_devices} devices"
      f"{_nearest(sizes, num_devices)}."
    )
  return filled


def _in_words(sizes: dict[str, int]) -> str:
  """The sizes in a line: replica and fsdp, and others that split something."""
  return " x ".join(
    f"{axis}={size}"
    for axis, size in sizes.items()
    if axis in BATCH_AXES or size > 1
  )


def in_words(mesh: Mesh) -> str:
  """Describes the sizes of a mesh, such as "replica=2 x fsdp=4"."""
  return _in_words(dict(mesh.shape))


def _nearest(sizes: dict[str, int], num_devices: int) -> str:
  """For the message: the nearest sizes of one axis that fit the devices."""
  exact = -1 not in sizes.values()
  fits = []
  for axis, size in sizes.items():
    if size == -1 or (size == 1 and axis not in BATCH_AXES):
      continue
    others = math.prod(
      n for name, n in sizes.items() if name != axis and n != -1
    )
    if num_devices % others:
      continue
    room = num_devices // others
    works = [n for n in range(1, room + 1) if room % n == 0]
    works = [room] if exact else works
    near = sorted((abs(n - size), n) for n in works)
    fits += [(distance, f"{axis}={n}") for distance, n in near[:2]]
  if not fits:
    return ""
  words = [word for _, word in sorted(fits)[:2]]
  return f"; the nearest that work: {' or '.join(words)}"


def from_config(config: Config) -> Mesh:
  """The mesh that config.mesh describes; see `make_mesh`.

  If config.compile_only names absent devices, such as "v5p:2x2x2" or
  "h100:8x8", the mesh consists of them and not of this machine's.

  Raises:
    ConfigError: the sizes do not fit the devices.
  """
  options = config.kwargs("mesh")
  check_kwargs(make_mesh, options, f"{config.path}.mesh", given=("devices",))
  topology = config.get("compile_only", False)
  if isinstance(topology, str):
    options["devices"] = absent.devices(topology)
  return make_mesh(**options)
