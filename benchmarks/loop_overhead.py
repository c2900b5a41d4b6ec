"""Benchmark 3: what the loop costs beside its steps.

The whole loop, with input, rows, TensorBoard and all, over the same compiled
update on a batch that stays on the device; without evaluations and
checkpoints, which are accounts of their own.
"""

from typing import Any

from benchmarks import measure, program, synthetic
from configs import digits


def main() -> None:
  """Prints the ratio for a tiny and for a larger model."""
  args = measure.arguments(__doc__)
  for name, config in _configs(args.quick).items():
    ratios = program.loop_ratios(config, config.log_steps, args.repeats)
    name = f"loop / resident step: {name}"
    measure.report(3, name, ratios, target="<= 1.02")


def _configs(quick: bool) -> dict[str, Any]:
  if quick:
    config = synthetic.get_config("mu/16,size=16,batch_size=8")
    config.log_steps = 5
    return {"mu/16": config}
  small = digits.get_config()
  small.evals = {}
  small.total_steps = small.ckpt_steps = 1_000_000
  # Images of 64 pixels keep a block of 50 steps to a few seconds.
  large = synthetic.get_config("S/16,size=64,batch_size=2")
  return {"digits, batch 128": small, "ViT-S/16, 2 images of 64 x 64": large}


if __name__ == "__main__":
  main()
