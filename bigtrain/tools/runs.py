"""Lists the runs below a folder, one line each.

  python -m bigtrain.tools.runs runs/
  python -m bigtrain.tools.runs runs/ --metric=val/loss --mode=min

A line has the run's state, its step, the best value of a metric, the time since
its last sign of life, its folder and its command. The states are

  running
  finished
  stopped   it ended before its last step, by a signal for instance
  failed    it ended with an error
  lost      its process disappeared without saying why
"""

import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.checkpoints import folders
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.cluster import lease
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.reports import log_entries, run_files
from bigtrain.tools import arguments, exits, ranking

# Files that a run writes to while it is alive.
_SIGNS_OF_LIFE = (log_entries.FILE_NAME, "run.json", lease.FILE)


class Line(NamedTuple):
  """A run's line in the table."""

  state: str
  step: int  # Newest step in its log.
  progress: float  # Fraction of its steps that is done.
  best: str  # Metric, value and step; "" if it has not logged the metric.
  alive: float  # Unix time of its last sign of life, in seconds.
  folder: str
  command: str


def find(folder: str) -> Iterator[str]:
  """Yields the workdirs below a folder."""
  for path, names, files in os.walk(folder):
    names.sort()
    if "run.json" in files and "config.json" in files:
      names.clear()  # A workdir has no other one inside.
      yield path


def describe(
  workdir: str, metric: str | None = None, mode: str | None = None
) -> Line:
  entries = log_entries.read(workdir)
  newest = {name: value for entry in entries for name, value in entry.items()}
  info = run_files.read_json(os.path.join(workdir, "run.json")) or {}
  starts = info.get("starts") or [{}]
  command = shlex.join(starts[-1].get("command", []))
  signs = [os.path.join(workdir, name) for name in _SIGNS_OF_LIFE]
  metric = metric or ranking.default_metric(newest)
  best = ranking.best(entries, metric, mode or ranking.mode_of(metric))
  return Line(
    state=state(workdir, newest, failed="error" in starts[-1]),
    step=newest.get("step", 0),
    progress=float(newest.get("progress", 0.0)),
    best=f"{metric} {best.value:.4g} @ {best.step}" if best else "",
    alive=max(os.path.getmtime(path) for path in signs if os.path.exists(path)),
    folder=workdir,
    command=re.sub(
      r"^\S*bigtrain/main\.py", "python -m bigtrain.main", command
    ),
  )


def state(workdir: str, newest: Mapping[str, Any], failed: bool = False) -> str:
  """The state of a run, see the head of this module.

  Args:
    newest: newest value of each metric.
    failed: whether its newest start has recorded an error.
  """
  holder = lease.read(workdir)
  if holder is not None:
    is_alive = holder.is_alive()
    if (
      is_alive is None
    ):  # It is on another machine, whose processes are hidden.
      is_alive = holder.expires > time.time()
    return "running" if is_alive else "lost"
  if newest.get("progress", 0) >= 1 or _was_stopped(workdir):
    return "finished"
  return "failed" if failed else "stopped"


def _was_stopped(workdir: str) -> bool:
  """Whether a hook has ended the run early, and that counts as success."""
  try:
    newest = folders.newest(workdir)
    if newest is None:
      return False
    manifest = folders.read_manifest(folders.find(workdir, newest))
  except CheckpointError:
    return False
  stopped = manifest.host_state.hooks.get("stopped")
  return bool(stopped and not stopped[1])


def table(lines: Sequence[Line], now: float) -> str:
  cells = [
    (
      line.state,
      f"{line.step} ({line.progress:.0%})",
      line.best,
      _ago(now - line.alive),
      line.folder,
      line.command,
    )
    for line in lines
  ]
  cells.insert(0, ("state", "step", "best", "last sign", "folder", "command"))
  return aligned(cells)


def aligned(lines: Sequence[Sequence[str]]) -> str:
  """A text of lines of cells, in columns."""
  widths = [max(map(len, column)) for column in zip(*lines)]
  texts = []
  for line in lines:
    cells = [cell.ljust(width) for cell, width in zip(line, widths)]
    texts.append("  ".join(cells).rstrip())
  return "\n".join(texts)


def _ago(secs: float) -> str:
  for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
    if secs >= size:
      return f"{secs / size:.0f} {unit} ago"
  return f"{max(secs, 0):.0f} s ago"


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  parser = arguments.Parser("runs", __doc__)
  parser.add_argument("folder", help="folder of runs, or a run")
  ranking.add_arguments(parser)
  args = parser.parse_args(argv)
  folder = paths.absolute(args.folder)
  if not os.path.isdir(folder):
    raise ConfigError(f"{args.folder}: no such folder.")
  workdirs = [os.path.relpath(path) for path in find(folder)]
  if not workdirs:
    raise ConfigError(
      f"{args.folder}: contains no run: no folder with run.json and "
      "config.json."
    )
  if args.metric:  # An unknown one is an error.
    entries = itertools.chain(*map(log_entries.read, workdirs))
    names = {name for entry in entries for name in entry}
    ranking.choose(names, args.metric, args.mode)
  lines = [describe(path, args.metric, args.mode) for path in workdirs]
  print(table(lines, time.time()))
  return 0


if __name__ == "__main__":
  sys.exit(main())
