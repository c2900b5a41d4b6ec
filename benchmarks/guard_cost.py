"""Benchmark 11: what it costs to keep steps that are not finite out.

Three compiled updates of the same config take turns: with config.nonfinite as
"stop", as "skip", and one in which the new state is taken whatever the loss and
the gradients are (the guard in tally.py left out). Small batches: the guard
works on the state, so they show it most.
"""

import contextlib
from typing import Any
from unittest import mock

from benchmarks import measure, program, synthetic
from configs import digits

_POLICIES = ("stop", "skip")


def main() -> None:
  """Prints ratios of time and of memory for each model and policy."""
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
  small = digits.get_config()
  small.evals = {}
  large = synthetic.get_config("S/16,size=64,batch_size=2")
  # Else nothing has to wait for the norm of all gradients but the guard.
  unclipped = synthetic.get_config("S/16,size=64,batch_size=2")
  del unclipped.grad_clip_norm
  for config in (small, large, unclipped):
    # Norms are computed before the state changes, by the same branch: without
    # the guard they would cost a copy, and the guard look better than it is.
    config.weight_stats = "none"
  return {
    "digits, batch 128": small,
    "ViT-S/16, 2 images of 64 x 64": large,
    "the same without clipping": unclipped,
  }


def _build(config: Any, policy: str) -> program.Program:
  with contextlib.ExitStack() as patches:
    if policy == "none":
      patches.enter_context(mock.patch.object(guard.Guard, "select", _take_new))
    else:
      config.nonfinite = policy
    return program.build(config)


def _take_new(self: Any, verdict: Any, state: Any, advance: Any) -> Any:
  """Replaces Guard.select: takes every step."""
  return advance()


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
  used = {
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
      [used[policy] / used["none"]],
    )


if __name__ == "__main__":
  main()
