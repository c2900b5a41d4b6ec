"""The table of a sweep: states and results, in sweep.json and sweep.csv."""

import csv
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import check_choice
from bigtrain.files import paths
from bigtrain.reports import console, log_entries, run_files
from bigtrain.tools import ranking, runs
from bigtrain.tools.sweep.variants import Variant

FILE_NAME = "sweep.json"

WAITING, QUEUED, RUNNING = "waiting", "queued", "running"
FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"


@dataclasses.dataclass
class Entry:
  """A variant and its state."""

  variant: Variant
  workdir: str
  state: str = WAITING  # One of the constants above.
  reason: str = ""  # Last line in the log of a run that has failed.
  secs: float | None = None  # Duration of its newest start.
  job: str = ""  # Number of its Slurm job.


class _Best(NamedTuple):
  """The values by which the table compares the entries."""

  metric: str
  mode: str
  values: list[ranking.Best | None]  # The best of each entry.
  steps: list[int]  # Newest step of each entry; 0 if it has logged none.

  @property
  def order(self) -> list[int]:
    """Indices of the entries, the best one first."""
    return ranking.order(self.values, self.mode)


class Results:
  """The entries of a sweep, as files and as a table.

  Variants that an earlier call has run with the same config keep their state.

  Args:
    metric, mode: how to compare the entries; None for the defaults of
      ranking.py.
  """

  def __init__(
    self,
    folder: str,
    variants: Sequence[Variant],
    metric: str | None,
    mode: str | None,
  ):
    self._folder = folder
    self._metric = metric
    self._mode = mode
    earlier = run_files.read_json(os.path.join(folder, FILE_NAME)) or {}
    by_digest = {one["digest"]: one for one in earlier.get("variants", [])}
    self.entries = []
    for variant in variants:
      entry = Entry(variant, os.path.join(folder, variant.name))
      before = by_digest.get(variant.digest, {})
      if before.get("name") == variant.name:
        entry.job = before["job"]
        entry.secs = before["secs"]
        # The workdir of a finished run may have been removed.
        is_gone = not log_entries.read(entry.workdir)
        if not (before["state"] == FINISHED and is_gone):
          entry.state = before["state"]
          entry.reason = before["reason"]
      if not entry.job:
        if runs.state(entry.workdir, {}) == "running":
          entry.state = RUNNING
        elif entry.state == RUNNING:  # The sweep was killed.
          entry.state = INTERRUPTED
      self.entries.append(entry)

  def _logs(self) -> list[list[log_entries.Entry]]:
    return [log_entries.read(entry.workdir) for entry in self.entries]

  def _best(self) -> _Best:
    logs = self._logs()
    metric = self._metric or ranking.default_metric(_names(logs))
    mode = self._mode or ranking.mode_of(metric)
    return _Best(
      metric,
      mode,
      values=[ranking.best(log, metric, mode) for log in logs],
      steps=[log[-1]["step"] if log else 0 for log in logs],
    )

  def check_metric(self) -> None:
    ranking.choose(_names(self._logs()), self._metric, self._mode)

  def write(self) -> None:
    """Writes sweep.json, from which a later call continues, and sweep.csv."""
    best = self._best()
    paths.make_folder(self._folder)
    content: dict[str, Any] = {
      "metric": best.metric,
      "mode": best.mode,
      "best": self._name_of_best(best),
      "variants": [
        {
          "name": entry.variant.name,
          "changes": entry.variant.changes,
          "state": entry.state,
          "step": step,
          "value": value.value if value else None,
          "value_step": value.step if value else None,
          "secs": entry.secs,
          "reason": entry.reason,
          "job": entry.job,
          "digest": entry.variant.digest,
        }
        for entry, value, step in zip(self.entries, best.values, best.steps)
      ],
    }
    run_files.write_json(os.path.join(self._folder, FILE_NAME), content)
    keys = self._keys()
    with paths.replacing(os.path.join(self._folder, "sweep.csv")) as file:
      writer = csv.writer(file)
      columns = ["state", "step", best.metric, "at_step", "secs", "reason"]
      writer.writerow(["name", *keys, *columns])
      for i in best.order:
        entry, value = self.entries[i], best.values[i]
        writer.writerow(
          [
            entry.variant.name,
            *_texts(entry, keys),
            entry.state,
            best.steps[i],
            value.value if value else "",
            value.step if value else "",
            "" if entry.secs is None else f"{entry.secs:.1f}",
            entry.reason,
          ]
        )

  def _name_of_best(self, best: _Best) -> str | None:
    first = best.order[0]
    return self.entries[first].variant.name if best.values[first] else None

  def _keys(self) -> list[str]:
    """All keys that variants change, in their order."""
    changes = [entry.variant.changes for entry in self.entries]
    return list(dict.fromkeys(key for change in changes for key in change))

  def result(self, entry: Entry) -> str:
    """Returns "METRIC VALUE" of an entry; "" without a value."""
    best = self._best()
    value = best.values[self.entries.index(entry)]
    return f"{best.metric} {console.number(value.value)}" if value else ""

  def table(self) -> str:
    best = self._best()
    keys = self._keys()
    title = f"{best.metric} ({best.mode})"
    lines = [["", *keys, "state", "step", title, "reason"]]
    best_name = self._name_of_best(best)
    for i in best.order:
      entry, value = self.entries[i], best.values[i]
      lines.append(
        [
          "*" if entry.variant.name == best_name else "",
          *_texts(entry, keys),
          entry.state,
          str(best.steps[i] or ""),
          f"{console.number(value.value)} @ {value.step}" if value else "",
          entry.reason,
        ]
      )
    if not any(line[-1] for line in lines[1:]):  # Nothing has failed.
      lines = [line[:-1] for line in lines]
    return runs.aligned(lines)


def _names(logs: Sequence[list[log_entries.Entry]]) -> set[str]:
  """Names of all metrics."""
  return {name for log in logs for entry in log for name in entry}


def check_evaluation(metric: str | None, config: dict[str, Any]) -> None:
  """Refuses a metric of an evaluation that the config does not have."""
  evaluation, slash, _ = (metric or "").partition("/")
  evals = config.get("evals") or {}
  if slash:
    problem = "the config has no evaluation"
    check_choice(f"--metric={metric}", evaluation, evals, problem)


def _texts(entry: Entry, keys: Sequence[str]) -> list[str]:
  """The values of keys as text; "" for those that a variant lacks."""
  values = [entry.variant.changes.get(key, "") for key in keys]
  return [
    x if isinstance(x, str) else json.dumps(x, default=repr) for x in values
  ]
