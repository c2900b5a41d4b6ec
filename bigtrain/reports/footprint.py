"""What an update takes on each device."""

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
  """Facts about an update, for run.json and tools.plan.

  Args:
    compiled: the program, if it was compiled ahead of time.
    update_fn: (state, tally, batch) -> (state, tally), the same, not compiled.
    state_spec: ShapeDtypeStructs with shardings, as are the other two.
    tally_spec: see there.
    batch_spec: see there.
    run: how long it is.

  Returns:
    {} if it was not compiled; else
    parameters, sharded_parameters: how many, and how many of them are split
      over `fsdp`;
    parameter_bytes: of all of them;
    state_bytes, batch_bytes: on each device, {"params": ..., "opt": ..., ...};
    executed_flops: of a step, all devices, with what the backward pass
      computes again;
    tokens_per_example, total_steps: as the run has them.
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
    "executed_flops": flops.forward_flops(
      update_fn, state_spec, tally_spec, batch_spec
    ),
    "tokens_per_example": run.units.tokens_per_example,
    "total_steps": run.total,
  }


def _bytes_per_device(spec: Any) -> int:
  shardings = jax.tree.map(lambda x: x.sharding, spec)
  return sharding.bytes_per_device(spec, shardings)
