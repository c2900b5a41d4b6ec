"""Figure 32, second part: losses of three steps on a GPU and on the CPU.

Ten configs, each with its own :runlocal, which need no tensorflow. Both devices
start from the same parameters and batches, in processes of their own that run
side by side. A figure is the relative difference of the third step's losses. A
config that fails leaves the others alone.
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
  args = measure.arguments(
    __doc__,
    losses="configs: print their losses",
    part="1/3: the first third of the configs, and so on",
  )
  if args.losses:
    for name in args.losses.split(","):
      try:
        entry = {"losses": name, "by_step": _losses(name)}
      except Exception as e:
        entry = {"losses": name, "why": f"{type(e).__name__}: {e}"[:300]}
      print(json.dumps(entry), flush=True)
    return
  names = measure.part(_CONFIGS, args.part)[: 1 if args.quick else None]
  command = ("-m", "benchmarks.gpu_losses", f"--losses={','.join(names)}")
  own = measure.environment()
  readers = [
    measure.lines(*command, env=own | {"JAX_PLATFORMS": platform})
    for platform in ("cpu", own.get("JAX_PLATFORMS", ""))
  ]
  # A generator starts its process at its first item.
  for name, on_cpu, on_gpu in zip(names, *map(_read, readers)):
    label = f"loss of step {_STEPS}, GPU / CPU, relative difference: "
    label += f"{name}:runlocal"
    whys = {"on the CPU": on_cpu.get("why"), "on the GPU": on_gpu.get("why")}
    reasons = [f"{where}, {why}" for where, why in whys.items() if why]
    if reasons:
      measure.skip(32, label, reasons[0])
      continue
    difference = abs(on_gpu["by_step"][-1] / on_cpu["by_step"][-1] - 1)
    # 0 on the CPU itself, which has no ratio.
    value = max(difference, 1e-9)
    measure.report(32, label, [value], target=f"<= {_TOLERANCE}")


def _read(lines):
  for line in lines:
    if line.startswith('{"losses"'):
      yield json.loads(line)


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
