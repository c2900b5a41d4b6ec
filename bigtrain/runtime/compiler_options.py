"""Options of XLA that the program sets on each platform.

An option is in OURS only if the platform's compiler then makes better programs;
the comment beside it has the figure. docs/benchmarks.md lists these figures and
`make bench ARGS=compilers` measures them again. config.compiler_options
overrides and adds options; the value None removes one of ours.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, did_you_mean

# jax 0.12 has other names; 0.11 was not tried.
_PIPELINED: dict[tuple[int, ...], tuple[str, Any]] = {
  (0, 10): ("xla_gpu_enable_pipelined_", True),
  (0, 12): ("xla_gpu_pipeline_", "COLLECTIVE_PIPELINING_MODE_ON"),
}

OURS: dict[str, dict[str, Any]] = {
  "cpu": {},
  # A loop starts the transfers of a layer in the round before, or ends them in
  # the next: 92% of llama_8b's bytes pass beside products in place of 69%.
  "gpu": {
    name + kind: value
    for version, (name, value) in _PIPELINED.items()
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
    if jax.__version_info__[:2] == version
  },
  "tpu": {
    # Under fsdp XLA replaces a gather of weights and the product that uses them
    # by a loop of small products, between which it passes on parts of the
    # weights. With small weights the loop costs more than it hides: SigLIP-B/16
    # on 16 v5e takes 153 ms in place of 575.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
  },
}


def read(config: settings.Config, mesh: Mesh) -> dict[str, Any]:
  """OURS for the mesh's platform, changed by config.compiler_options."""
  device = mesh.devices.flat[0]
  ours = OURS.get(device.platform, {})
  given = config.kwargs("compiler_options")
  chosen = {k: v for k, v in {**ours, **given}.items() if v is not None}
  for name in (n for n in given if n in chosen):
    if complaint := _complaint(mesh, {name: chosen[name]}):
      hint = did_you_mean(name, ours) if name not in ours else ""
      raise ConfigError(
        f"config.compiler_options.{name}={chosen[name]!r}: the compiler for "
        f"{device.device_kind} refuses it: {complaint}{hint}"
      )
  return chosen


def _complaint(mesh: Mesh, options: Mapping[str, Any]) -> str:
  whole = NamedSharding(mesh, PartitionSpec())
  one = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
  lowered = jax.jit(lambda x: x + 1).lower(one)
  try:
    lowered.compile(compiler_options=dict(options))
  except (jax.errors.JaxRuntimeError, TypeError, ValueError) as e:
    return f"{' '.join(str(e).split())}."
  return ""
