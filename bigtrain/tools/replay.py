"""Computes steps of a run again on this machine, and compares them.

  python -m bigtrain.tools.replay runs/digits --step=600
  python -m bigtrain.tools.replay runs/digits --step=600 --config.mesh.fsdp=1

It trains from the newest checkpoint before the step, or from scratch, in a
temporary folder. Then it compares the metrics of the steps in between with
those that the run has logged and, if the run has a checkpoint of the step, the
checksums of all arrays, and prints the first difference. On the same kind and
number of devices, all bits are equal if both machines compute correctly. The
run's own files are not changed.

Exit codes: 0 if nothing differs; 1 if something does, or the run cannot be
read; 2 for a mistake in the arguments or the config.
"""

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.checkpoints import folders
from bigtrain.cluster import process
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.reports import log_entries, run_files
from bigtrain.tools import arguments, exits

# Keys of a config that do not change the steps, but take time or write files.
_LEFT_OUT = re.compile(
  r"evals|hooks|tensorboard|wandb|mlflow|trackio|loggers|watchdog|"
  r"save_at_start|eval_at_start|"
  r"(ckpt|keep_ckpt|local_ckpt|stop_at)_(steps|epochs|examples|tokens|percent)|"
  r"local_ckpt_dir"
)
# Metrics that depend on the speed and memory of the machine.
_MACHINE_METRICS = re.compile(
  r".*_(secs|bytes|hours|per_sec|per_sec_per_device|per_step)|.*/secs|"
  r"account/.*|data_wait_fraction|mfu|restarts"
)


def replay(
  workdir: str, step: int, changes: Sequence[str] = ()
) -> tuple[str, str]:
  """Computes a step again; returns (first difference or "", what is equal)."""
  import bigtrain.main  # This takes seconds, which --help does without.

  workdir = paths.absolute(workdir)
  config = run_files.read_config(workdir)
  logged = {entry["step"]: entry for entry in log_entries.read(workdir)}
  saved = folders.find_all(workdir) if folders.steps(workdir) else {}
  start = max((s for s in saved if s < step), default=0)
  if step not in saved and not any(start < s <= step for s in logged):
    known = ", ".join(map(str, sorted({*saved, *logged})[-20:]))
    raise ConfigError(
      f"--step={step}: the run has neither a checkpoint nor a log entry to "
      f"compare with; its newest steps with one: {known or 'none'}."
    )
  config = {k: v for k, v in config.items() if not _LEFT_OUT.fullmatch(k)}
  config |= dict(tensorboard=False, stop_at_steps=step)
  if start:
    config["resume"] = dict(path=workdir, step=start)
    config.pop("model_init", None)
  for change in changes:
    loading.override(config, change)
  with tempfile.TemporaryDirectory(prefix="bigtrain-replay-") as folder:
    bigtrain.main.train(config, folder)
    replayed = {entry["step"]: entry for entry in log_entries.read(folder)}
    in_both = sorted(s for s in replayed if start < s <= step and s in logged)
    for number in in_both:
      difference = _metric_difference(number, replayed[number], logged[number])
      if difference:
        return difference, ""
    equal = ""
    if in_both:
      steps = ", ".join(map(str, in_both))
      equal = f"No metric differs in the log entries (step {steps})"
    if step not in saved:
      return "", f"{equal}; step {step} has no checkpoint."
    equal = f"{equal}, and no" if equal else "No"
    equal += f" bit in the checkpoint of step {step}."
    return _array_difference(step, workdir, folder), equal


def _metric_difference(
  step: int, replayed: Mapping[str, Any], logged: Mapping[str, Any]
) -> str:
  """Describes the first metric that differs; "" if none does."""
  for name, value in replayed.items():
    if name not in logged or _MACHINE_METRICS.fullmatch(name):
      continue
    if value != logged[name]:
      return (
        f"step {step}: {name}: the run wrote {logged[name]!r}, this machine "
        f"computes {value!r}"
      )
  return ""


def _array_difference(step: int, workdir: str, folder: str) -> str:
  """Describes the first array of the checkpoints that differs, or ""."""
  theirs = folders.read_manifest(folders.find(workdir, step)).arrays
  ours = folders.read_manifest(folders.find(folder, step)).arrays
  differing = [
    name
    for name, array in theirs.items()
    if array.checksum and array.checksum != ours[name].checksum
  ]
  if not differing:
    return ""
  return (
    f"step {step}: array {differing[0]!r} of its checkpoint (the first of "
    f"{len(differing)} of {len(theirs)}) has other bits on this machine"
  )


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  parser = arguments.JaxParser("replay", __doc__, changes_config=True)
  parser.add_argument("workdir", metavar="RUN", help="folder of the run")
  parser.add_argument(
    "--step", type=int, required=True, help="last step to compute again"
  )
  args, changes = parser.parse(argv)
  difference, equal = replay(args.workdir, args.step, changes)
  print(difference or equal)
  return process.EXIT_ERROR if difference else process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
