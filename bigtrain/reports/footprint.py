"""Measures the memory and FLOPs of a compiled update."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from bigtrain import lengths, sharding
from bigtrain.reports import flops


def measure(
  compiled: Any,
  update_fn: Callable[..., Any],
  state_spec: Mapping[str, Any],
  tally_spec: Any,
  batch_spec: Any,
  run: lengths.Lengths,
) -> dict[str, Any]:
  """Returns facts about an update, for run.json and tools.plan.

  Args:
    compiled: the program of the update.
    update_fn: (state, tally, batch) -> (state, tally), the uncompiled update.
    state_spec: ShapeDtypeStructs of the state, with shardings.
    tally_spec: ShapeDtypeStructs of the tally, with shardings.
    batch_spec: ShapeDtypeStructs of the batch, with shardings.
    run: lengths of the run.

  Returns:
    {} if the update was not compiled ahead of time; else
    parameters: number of parameters;
    sharded_parameters: number of parameters split over `fsdp`;
    parameter_bytes: bytes of all parameters;
    state_bytes: bytes per device, {"params": ..., "opt": ..., ...};
    batch_bytes: bytes per device;
    executed_flops: FLOPs of a step over all devices, recomputation and padding
      included;
    tokens_per_example: tokens per example, or None;
    total_steps: length of the run's schedule.
  """
  if not isinstance(compiled, jax.stages.Compiled):
    return {}
  params = jax.tree.leaves(state_spec["params"])
  return {
    "parameters": sum(x.size for x in params),
    "sharded_parameters": sum(
      x.size for x in params if not x.sharding.is_fully_replicated
    ),
    "parameter_bytes": sum(x.size * x.dtype.itemsize for x in params),
    "state_bytes": {
      name: _bytes_per_device(part) for name, part in state_spec.items()
    },
    "batch_bytes": _bytes_per_device(batch_spec),
    "executed_flops": flops.executed_flops(
      update_fn, state_spec, tally_spec, batch_spec
    ),
    "tokens_per_example": run.units.tokens_per_example,
    "total_steps": run.total,
  }


def _bytes_per_device(spec: Any) -> int:
  shardings = jax.tree.map(lambda x: x.sharding, spec)
  return sharding.bytes_per_device(spec, shardings)
