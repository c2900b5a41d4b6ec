"""Measures the state and the FLOPs of an update, without compiling it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from bigtrain import lengths, sharding
from bigtrain.reports import flops


def measure(
  update_fn: Callable[..., Any],
  state_spec: Mapping[str, Any],
  running_spec: Any,
  batch_spec: Any,
  hparams_spec: Any,
  teacher_spec: Mapping[str, Any],
  run: lengths.Lengths,
) -> dict[str, Any]:
  """Returns facts about an update, for run.json and tools.plan.

  Args:
    update_fn: (state, tally, batch, fixed) -> (state, tally), the update.
    state_spec: ShapeDtypeStructs of the state, with shardings.
    tally_spec: ShapeDtypeStructs of the tally, with shardings.
    batch_spec: ShapeDtypeStructs of the batch, with shardings.
    fixed_spec: ShapeDtypeStructs of the teacher, if any, and of the hparams,
      with shardings.

  Returns:
    parameters: number of parameters;
    sharded_parameters: number of parameters split over `fsdp`;
    parameter_bytes: bytes of all parameters;
    state_bytes: bytes of each device's memory, {"params": ..., "opt": ...};
    host_state_bytes: bytes of the state in host memory, for each device;
    batch_bytes: bytes per device;
    executed_flops: FLOPs of a step over all devices, recomputation and padding
      included;
    tokens_per_example: tokens per example, or None;
    total_steps: length of the run's schedule.
  """
  params = jax.tree.leaves(state_spec["params"])
  return {
    "parameters": sum(x.size for x in params),
    "sharded_parameters": sum(
      x.size for x in params if not x.sharding.is_fully_replicated
    ),
    "parameter_bytes": sum(x.size * x.dtype.itemsize for x in params),
    "state_bytes": {
      name: _bytes_per_device(part)
      for name, part in {**state_spec, **teacher_spec}.items()
    },
    "host_state_bytes": _bytes_per_device(dict(state_spec), in_host=True),
    "batch_bytes": _bytes_per_device(batch_spec),
    "executed_flops": flops.executed_flops(
      update_fn,
      state_spec,
      running_spec,
      batch_spec,
      hparams_spec,
      teacher_spec,
    ),
    "tokens_per_example": run.units.tokens_per_example,
    "total_steps": run.total,
  }


def _bytes_per_device(spec: Any, in_host: bool = False) -> int:
  shardings = jax.tree.map(lambda x: x.sharding, spec)
  return sharding.bytes_per_device(spec, shardings, in_host=in_host)
