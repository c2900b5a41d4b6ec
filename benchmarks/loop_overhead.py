"""Benchmark 3: what the loop costs beside its steps.

The whole loop, with input, rows, TensorBoard and all, over the same compiled
update on a batch that stays on the device; without evaluations and
checkpoints, which are accounts of their own.
"""

from benchmarks import measure, program, synthetic
from configs import digits

_TARGET = "<= 1.02"


def main() -> None:
  """Prints the ratio for a tiny and for a larger model."""
  args = measure.arguments(__doc__)
  config = digits.get_config("runlocal" if args.quick else None)
  config.evals = {}
  config.ckpt_steps = config.total_steps = 1_000_000
  config.compile_cache = False
  steps = config.log_steps
  ratios = program.loop_ratios(config, steps, args.repeats)
  name = f"loop / resident step, digits, batch {config.input.batch_size}"
  measure.report(3, name, ratios, target=_TARGET)
  if args.quick:
    return
  # Images of 64 pixels keep the block of steps within seconds.
  config = synthetic.get_config("S/16,size=64,batch_size=4")
  ratios = program.loop_ratios(config, steps, args.repeats)
  name = "loop / resident step, ViT-S/16, 4 images of 64 x 64"
  measure.report(3, name, ratios, target=_TARGET)


if __name__ == "__main__":
  main()
