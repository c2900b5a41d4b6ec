"""Benchmark 11: overhead of the guard against non-finite steps.

Three compiled updates of the same config take turns: config.nonfinite="stop",
"skip", and an update without the guard, which always takes the new state.
Batches are small, because the guard works on the state.
"""

import contextlib
from typing import Any
from unittest import mock

from benchmarks import measure, program, synthetic
from bigtrain.step import guard

_POLICIES = ("stop", "skip")


def main() -> None:
  """Prints ratios of time and memory for each model and policy."""
  args = measure.arguments(__doc__)
  for name, config in _configs(args.quick).items():
    programs = {"none": _build(config, "none")}
    for policy in _POLICIES[: 1 if args.quick else None]:
      programs[policy] = _build(config, policy)
    _compare(name, programs, 2 if args.quick else 20, args.repeats)


def _configs(quick: bool) -> dict[str, Any]:
  if quick:
    config = synthetic.get_config("mu/16,size=16,batch_size=8")
    config.update(optimizer=dict(name="sgd"), weight_stats="none")
    return {"mu/16": config}
  large = synthetic.get_config("S/16,size=64,batch_size=2")
  # With clipping, the update waits for the global norm anyway.
  unclipped = synthetic.get_config("S/16,size=64,batch_size=2")
  del unclipped.grad_clip_norm
  for config in (large, unclipped):
    # Norms are computed before the state changes, in the same branch. Without
    # the guard they would need a copy, which would favour the guard.
    config.weight_stats = "none"
  return {
    "ViT-S/16, 2 images of 64 x 64": large,
    "the same without clipping": unclipped,
  }


def _build(config: Any, policy: str) -> program.Program:
  with contextlib.ExitStack() as patches:
    if policy == "none":
      patches.enter_context(mock.patch.object(guard.Guard, "run", _take_new))
    else:
      config.nonfinite = policy
    return program.build(config)


def _take_new(
  self: Any,
  verdict: Any,
  state: Any,
  advance: Any,
  *,
  log_norms: Any,
  no_norms: Any,
) -> Any:
  """Replaces Guard.run: takes every step."""
  del self, verdict, state, no_norms
  return advance(log_norms is not False)


def _compare(
  name: str, programs: dict[str, program.Program], steps: int, repeats: int
) -> None:
  secs = measure.interleave(
    {
      policy: lambda built=built: built.run(steps)
      for policy, built in programs.items()
    },
    repeats,
  )
  temporary = {
    policy: built.update.memory_analysis().temp_size_in_bytes
    for policy, built in programs.items()
  }
  for policy in [policy for policy in programs if policy != "none"]:
    measure.report(
      11,
      f"step, nonfinite={policy} / no guard: {name}",
      measure.ratios(secs[policy], secs["none"]),
      target="<= 1.02",
    )
    measure.report(
      11,
      f"temporary memory, nonfinite={policy} / no guard: {name}",
      [temporary[policy] / temporary["none"]],
    )


if __name__ == "__main__":
  main()
