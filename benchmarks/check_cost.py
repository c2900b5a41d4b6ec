"""Benchmark 17: cost of the hooks `replay` and `replicas`, in steps.

The hooks of the program check a step of the program's update: `replay` computes
it twice and compares the results, `replicas` compares the devices' copies. The
figures are CPU time of a check, less that of a plain step, over that of a plain
step. On one device, `replicas` has nothing to compare but computes all sums.
"""

import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from benchmarks import loop_overhead, measure, program
from bigtrain.hooks import replay, replicas


class _Context:
  """What the hooks need of a run."""

  path = "config.hooks.check"
  state: Any = None

  def check_every(self, steps: int) -> int:
    return steps

  def check_policy(self, policy: str) -> str:
    return policy

  def reject_state(self, message: str, policy: str) -> NoReturn:
    raise RuntimeError(message)


def main() -> None:
  """Prints the costs for a tiny model and a larger one."""
  args = measure.arguments(__doc__)
  for name, config in loop_overhead.configs(args.quick).items():
    _measure(name, config, 2 if args.quick else 20, args.repeats)


def _measure(name: str, config: Any, steps: int, repeats: int) -> None:
  built = program.build(config)
  context: Any = _Context()
  twice = replay.Hook(1, context=context)
  same = replicas.Hook(1, context=context)

  def check_replay() -> None:
    built.state, built.running = twice.around_update(
      1, built.update, built.state, built.running, *built.others
    )
    jax.block_until_ready((built.state, built.running))

  def check_replicas() -> None:
    context.state = built.state
    same.after_step(1)

  secs = measure.interleave(
    {
      "steps": lambda: _cpu_secs(lambda: built.run(steps)) / steps,
      "replay": lambda: _cpu_secs(check_replay),
      "replicas": lambda: _cpu_secs(check_replicas),
    },
    repeats,
  )
  one = secs["steps"]
  costs = [twice / step - 1 for twice, step in zip(secs["replay"], one)]
  measure.report(17, f"replay: {name}", costs, unit="steps", target="<= 2")
  costs = measure.ratios(secs["replicas"], one)
  measure.report(17, f"replicas: {name}", costs, unit="steps", target="<= 2")


def _cpu_secs(call: Callable[[], Any]) -> float:
  began = time.process_time()
  call()
  return time.process_time() - began


if __name__ == "__main__":
  main()
