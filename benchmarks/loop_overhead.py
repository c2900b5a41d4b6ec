"""Benchmark 3: overhead of the training loop.

The time of the whole loop, with input, rows and TensorBoard, divided by the
time of the same compiled update on a resident batch. Evaluations and
checkpoints are off: they have their own time accounts.
"""

from typing import Any

from benchmarks import measure, program, synthetic
from configs import digits


def main() -> None:
  """Prints the ratio for a tiny and a larger model."""
  args = measure.arguments(__doc__)
  for name, config in configs(args.quick).items():
    ratios = program.loop_ratios(config, config.log_steps, args.repeats)
    name = f"loop / resident step: {name}"
    measure.report(3, name, ratios, target="<= 1.02")


def configs(quick: bool, batch_size: int = 2) -> dict[str, Any]:
  """Returns {name: config} of a tiny and a larger model, without evaluations.

  Args:
    quick: whether to return only a tiny model, with a row every 5 steps.
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


if __name__ == "__main__":
  main()
