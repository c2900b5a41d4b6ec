"""Computes steps of a run again on this machine, and compares them.

  python -m bigtrain.tools.replay runs/digits --step=600
  python -m bigtrain.tools.replay runs/digits --step=600 --config.mesh.fsdp=1

It trains from the newest checkpoint before the step, or from scratch, in a
temporary folder. Then it compares the rows in between and the checksums of the
arrays with the run's rows and its checkpoint of the step, if any, and prints
the first difference. On the same kind and number of devices, all bits are equal
if both machines compute right. The run is only read.

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
from bigtrain.reports import log_entries, record
from bigtrain.tools import arguments, exits

# Parts of a config that do not change the steps, and cost time or write files.
_LEFT_OUT = re.compile(
  r"evals|hooks|tensorboard|wandb|mlflow|trackio|loggers|watchdog|"
  r"save_at_start|eval_at_start|"
  r"(ckpt|keep_ckpt|local_ckpt|stop_at)_(steps|epochs|examples|tokens|percent)|"
  r"local_ckpt_dir"
)
# Metrics that depend on the machine's speed and memory.
_OF_MACHINE = re.compile(
  r".*_(secs|bytes|hours|per_sec|per_sec_per_device|per_step)|.*/secs|"
  r"account/.*|data_wait_fraction|mfu|restarts"
)


def replay(
  workdir: str, step: int, changes: Sequence[str] = ()
) -> tuple[str, str]:
  """Computes a step again; returns (first difference or "", what is equal)."""
  import bigtrain.main  # Takes seconds.

  workdir = paths.absolute(workdir)
  config = record.read_config(workdir)
  written = {row["step"]: row for row in log_entries.read(workdir)}
  saved = folders.find_all(workdir) if folders.steps(workdir) else {}
  earlier = max((s for s in saved if s < step), default=0)
  if not (step in saved or any(earlier < s <= step for s in written)):
    known = ", ".join(map(str, sorted({*saved, *written})[-20:]))
    raise ConfigError(
      f"--step={step}: the run has neither a checkpoint nor a row to compare "
      f"with; its newest steps with one: {known or 'none'}."
    )
  config = {k: v for k, v in config.items() if not _LEFT_OUT.fullmatch(k)}
  config |= dict(tensorboard=False, stop_at_steps=step)
  if earlier:
    config["resume"] = dict(path=workdir, step=earlier)
    config.pop("model_init", None)
  for change in changes:
    loading.override(config, change)
  with tempfile.TemporaryDirectory(prefix="bigtrain-replay-") as folder:
    bigtrain.main.train(config, folder)
    own = {row["step"]: row for row in log_entries.read(folder)}
    both = sorted(s for s in own if earlier < s <= step and s in written)
    for number in both:
      if what := _first_metric(number, own[number], written[number]):
        return what, ""
    steps = ", ".join(map(str, both))
    equal = f"No metric differs in the rows (step {steps})" if both else ""
    if step not in saved:
      return "", f"{equal}; step {step} has no checkpoint."
    equal = f"{equal}, and no" if equal else "No"
    equal += f" bit in the checkpoint of step {step}."
    return _first_array(step, workdir, folder), equal


def _first_metric(
  step: int, own: Mapping[str, Any], written: Mapping[str, Any]
) -> str:
  for name, value in own.items():
    is_compared = name in written and not _OF_MACHINE.fullmatch(name)
    if is_compared and value != written[name]:
      return (
        f"step {step}: {name}: the run wrote {written[name]!r}, this machine "
        f"computes {value!r}"
      )
  return ""


def _first_array(step: int, workdir: str, folder: str) -> str:
  theirs, ours = (
    folders.read_manifest(folders.find(path, step)).arrays
    for path in (workdir, folder)
  )
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
  parser = arguments.Parser("replay", __doc__, changes_config=True)
  args, changes = parser.parse(argv)
  difference, equal = replay(args.workdir, args.step, changes)
  print(difference or equal)
  return process.EXIT_ERROR if difference else process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
