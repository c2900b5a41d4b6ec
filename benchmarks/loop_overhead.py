"""Benchmark 3: overhead of the training loop.

The time of the whole loop, with input, logging and TensorBoard, divided by the
time of the same compiled update on a resident batch. Evaluations and
checkpoints are off, because they have their own time accounts. The tiny model
is also timed with ten hooks that define every method and do nothing.
"""

import copy
from collections.abc import Mapping
from typing import Any

from benchmarks import measure, program, synthetic
from configs import digits


def main() -> None:
  """Prints the ratio for a tiny model, also with hooks, and a larger one."""
  args = measure.arguments(__doc__)
  cases = configs(args.quick)
  tiny = next(iter(cases))
  cases[f"{tiny}, ten idle hooks"] = with_idle_hooks(cases[tiny])
  for name, config in cases.items():
    ratios = program.loop_ratios(config, config.log_steps, args.repeats)
    name = f"loop / resident step: {name}"
    measure.report(3, name, ratios, target="<= 1.02")


def configs(quick: bool, batch_size: int = 2) -> dict[str, Any]:
  """Returns {name: config} of a tiny and a larger model, without evaluations.

  Args:
    quick: whether to return only a tiny model, which logs every 5 steps.
    batch_size: batch size of the larger model.
  """
  if quick:
    config = synthetic.get_config("mu/16,size=16,batch_size=8")
    config.log_steps = 5
    return {"mu/16": config}
  small = digits.get_config()
  small.evals = {}
  small.total_steps = small.ckpt_steps = 1_000_000
  # Images of 64 pixels keep a block of 50 steps to a few seconds.
  large = synthetic.get_config(f"S/16,size=64,batch_size={batch_size}")
  name = f"ViT-S/16, {batch_size} images of 64 x 64"
  return {"digits, batch 128": small, name: large}


class Idle:
  """A hook that does nothing."""

  def __init__(self, context: Any):
    del context

  def before_step(self, step: int) -> None:
    """Does nothing."""

  def after_step(self, step: int) -> None:
    """Does nothing."""

  def after_row(self, step: int, row: Mapping[str, Any]) -> None:
    """Does nothing."""


def with_idle_hooks(config: Any, number: int = 10) -> Any:
  """Returns a copy of a config with hooks that do nothing."""
  config = copy.deepcopy(config)
  idle = {"type": "benchmarks.loop_overhead.Idle"}
  config.hooks = {f"idle_{i}": dict(idle) for i in range(number)}
  return config


if __name__ == "__main__":
  main()
