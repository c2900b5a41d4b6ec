"""Benchmark 3, second part: overhead of statistics.

Compares the compiled updates with weight_stats="per_param" and "none", and with
activation_stats=".*" and without, in blocks of the steps between two rows, so
that each block computes the statistics once. Measures the loop as in
loop_overhead.py too, with all options of the update on.
"""

from typing import Any

from benchmarks import loop_overhead, measure, program


def main() -> None:
  """Prints the ratios of a tiny and a larger model."""
  args = measure.arguments(__doc__)
  for name, config in loop_overhead.configs(args.quick, 8).items():
    _steps(name, config, args.quick, args.repeats)
  for name, config in loop_overhead.configs(args.quick, 8).items():
    name = f"loop / resident step, everything on: {name}"
    if args.quick:
      measure.skip(3, name, "not in --quick")
      continue
    config.weight_stats = "per_param"
    config.microbatches = 2
    config.ema_decay = 0.999
    config.grad_clip_norm = 1.0
    config.nonfinite = "skip"
    config.hooks = {
      "nan": dict(type="stop_on_nan"),
      "early": dict(type="early_stopping", metric="loss", patience=1000),
      "best": dict(type="checkpoint_best", metric="loss"),
    }
    ratios = program.loop_ratios(config, config.log_steps, args.repeats)
    measure.report(3, name, ratios, target="<= 1.02")


def _steps(name: str, config: Any, quick: bool, repeats: int) -> None:
  activations = "none, activation_stats .*"
  details = ("per_param",) if quick else ("global", "per_param", activations)
  if quick:  # Halves the time to compile.
    config.optimizer = dict(name="sgd")
  programs = {}
  for detail in ("none", *details):
    config.weight_stats = detail.partition(",")[0]
    config.activation_stats = ".*" if detail == activations else ""
    programs[detail] = program.build(config)
  config.activation_stats = ""
  secs = measure.interleave(
    {
      detail: lambda built=built: built.run(config.log_steps)
      for detail, built in programs.items()
    },
    repeats,
  )
  for detail in details:
    measure.report(
      3,
      f"step, weight_stats {detail} / none, a row in {config.log_steps} steps: "
      f"{name}",
      measure.ratios(secs[detail], secs["none"]),
      target="<= 1.02",
    )


if __name__ == "__main__":
  main()
