"""Figure 32, second part: losses of three steps on a GPU and on the CPU.

Ten configs, each with its own :runlocal, which need no tensorflow. Both devices
start from the same parameters and batches, in processes of their own that run
side by side. A figure is the relative difference of the third step's losses.
"""

import importlib
import json
import os
import tempfile

from benchmarks import measure

_CONFIGS = (
  "digits",
  "digits_siglip",
  "digits_captions",
  "pydoc_lm",
  "gemma3_1b",
  "gpt_oss_20b",
  "mixtral_8x7b",
  "sft",
  "dpo",
  "t5_small",
)
_STEPS = 3
_TOLERANCE = 0.01


def main() -> None:
  """Prints a figure per config; with --losses, losses alone."""
  args = measure.arguments(__doc__, losses="configs: print their losses")
  if args.losses:
    for name in args.losses.split(","):
      print(json.dumps({"losses": name, "by_step": _losses(name)}), flush=True)
    return
  names = _CONFIGS[:1] if args.quick else _CONFIGS
  command = ("-m", "benchmarks.gpu_losses", f"--losses={','.join(names)}")
  own = measure.environment()
  readers = [
    measure.lines(*command, env=own | {"JAX_PLATFORMS": platform})
    for platform in ("cpu", own.get("JAX_PLATFORMS", ""))
  ]
  # A generator starts its process at its first item.
  for name, on_cpu, on_gpu in zip(names, *map(_read, readers)):
    differences = [abs(a / b - 1) for a, b in zip(on_gpu, on_cpu)]
    measure.report(
      32,
      f"loss of step {_STEPS}, GPU / CPU, relative difference: {name}:runlocal",
      [max(differences[-1], 1e-9)],
      target=f"<= {_TOLERANCE}",
    )


def _read(lines):
  for line in lines:
    if line.startswith('{"losses"'):
      yield json.loads(line)["by_step"]


def _losses(name: str) -> list[float]:
  from bigtrain import main as program

  config = importlib.import_module(f"configs.{name}").get_config("runlocal")
  config.evals = {}
  for key in list(config):
    if key.startswith("total_"):
      del config[key]
  for key in list(config.get("schedule", {})):
    if key.startswith("warmup"):
      del config.schedule[key]
  config.total_steps, config.log_steps = _STEPS, 1
  with tempfile.TemporaryDirectory() as workdir:
    program.train(config, workdir)
    with open(os.path.join(workdir, "metrics.jsonl")) as file:
      entries = [json.loads(line) for line in file]
  return [entry["loss"] for entry in entries if "loss" in entry]


if __name__ == "__main__":
  main()
