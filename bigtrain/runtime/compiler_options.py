"""Options of XLA that the program sets on each platform.

An option is in OURS only if the platform's compiler makes better programs with
it; the comment beside it says by how much. docs/benchmarks.md lists these
figures, and `make bench ARGS=compilers` measures them again.
config.compiler_options overrides and adds options; the value None removes one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, did_you_mean

# By version of jax, whose XLA has these names; 0.11 was not tried. A loop over
# layers starts the transfers of a layer in the round before, or ends them in
# the next. With it, 92% of llama_8b's bytes are sent during products, and 69%
# without.
_PIPELINED_COLLECTIVES: dict[tuple[int, ...], dict[str, Any]] = {
  (0, 10): {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
  },
  (0, 12): {
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
  },
}

OURS: dict[str, dict[str, Any]] = {
  "cpu": {},
  "gpu": _PIPELINED_COLLECTIVES.get(jax.__version_info__[:2], {}),
  "tpu": {
    # Under fsdp, XLA replaces a gather of weights and the product that uses
    # them by a loop of small products, between which it passes on parts of the
    # weights. With small weights the loop costs more than it hides. This turns
    # it off: a step of SigLIP-B/16 on 16 v5e takes 153 ms, and 575 with it.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
  },
}


def read(config: settings.Config, mesh: Mesh) -> dict[str, Any]:
  """OURS for the mesh's platform, changed by config.compiler_options."""
  device = mesh.devices.flat[0]
  ours = OURS.get(device.platform, {})
  given = config.kwargs("compiler_options")
  chosen = {k: v for k, v in {**ours, **given}.items() if v is not None}
  for name in given:
    if name not in chosen:
      continue
    complaint = _complaint(mesh, {name: chosen[name]})
    if complaint:
      hint = did_you_mean(name, ours) if name not in ours else ""
      raise ConfigError(
        f"config.compiler_options.{name}={chosen[name]!r}: the compiler for "
        f"{device.device_kind} refuses it: {complaint}{hint}"
      )
  return chosen


def _complaint(mesh: Mesh, options: Mapping[str, Any]) -> str:
  """The compiler's error about options, or ""; it compiles a small program."""
  whole = NamedSharding(mesh, PartitionSpec())
  one = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
  lowered = jax.jit(lambda x: x + 1).lower(one)
  try:
    lowered.compile(compiler_options=dict(options))
  except (jax.errors.JaxRuntimeError, TypeError, ValueError) as e:
    return f"{' '.join(str(e).split())}."
  return ""
