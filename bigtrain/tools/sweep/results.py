"""The table of a sweep: states and results, in sweep.json and sweep.csv."""

import csv
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from bigtrain.config.errors import check_choice
from bigtrain.files import paths
from bigtrain.reports import console, log_entries, record
from bigtrain.tools import ranking, runs
from bigtrain.tools.sweep.variants import Variant

FILE_NAME = "sweep.json"

WAITING, QUEUED, RUNNING = "waiting", "queued", "running"
FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"


@dataclasses.dataclass
class Entry:
  """A variant and its state, one of the constants of this module."""

  variant: Variant
  workdir: str
  state: str = WAITING
  reason: str = ""  # Last line of the log of a run that failed.
  secs: float | None = None  # Of its newest start.
  job: str = ""  # Number of its Slurm job.


class Results:
  """The entries of a sweep, as files and as a table.

  Variants keep the state of an earlier call with the same config. `metric` and
  `mode` may be None, see ranking.py.
  """

  def __init__(
    self,
    folder: str,
    variants: Sequence[Variant],
    metric: str | None,
    mode: str | None,
  ):
    self._folder = folder
    self._asked = metric, mode
    earlier = record.read_json(os.path.join(folder, FILE_NAME)) or {}
    by_digest = {row["digest"]: row for row in earlier.get("variants", [])}
    self.entries = []
    for variant in variants:
      entry = Entry(variant, os.path.join(folder, variant.name))
      row = by_digest.get(variant.digest, {})
      if row.get("name") == variant.name:
        entry.job, entry.secs = row["job"], row["secs"]
        has_rows = bool(log_entries.read(entry.workdir))
        if row["state"] != FINISHED or has_rows:
          entry.state, entry.reason = row["state"], row["reason"]
      if not entry.job:
        if runs.state(entry.workdir, {}) == "running":
          entry.state = RUNNING
        elif entry.state == RUNNING:  # The sweep was killed.
          entry.state = INTERRUPTED
      self.entries.append(entry)

  def _best(self) -> tuple[str, str, list[ranking.Best | None], list[int]]:
    """(metric, mode, best value of each entry, newest step of each)."""
    by_entry = [log_entries.read(entry.workdir) for entry in self.entries]
    metric, mode = self._asked
    metric = metric or ranking.default_metric(_names(by_entry))
    mode = mode or ranking.mode_of(metric)
    bests = [ranking.best(of, metric, mode) for of in by_entry]
    return metric, mode, bests, [of[-1]["step"] if of else 0 for of in by_entry]

  def check_metric(self) -> None:
    by_entry = [log_entries.read(entry.workdir) for entry in self.entries]
    ranking.choose(_names(by_entry), *self._asked)

  def write(self) -> None:
    metric, mode, bests, steps = self._best()
    ranked = ranking.order(bests, mode)
    content: dict[str, Any] = {
      "metric": metric,
      "mode": mode,
      "best": self._name_of_best(bests, ranked),
      "variants": [
        {
          "name": entry.variant.name,
          "changes": entry.variant.changes,
          "state": entry.state,
          "step": step,
          "value": best.value if best else None,
          "value_step": best.step if best else None,
          "secs": entry.secs,
          "reason": entry.reason,
          "job": entry.job,
          "digest": entry.variant.digest,
        }
        for entry, best, step in zip(self.entries, bests, steps)
      ],
    }
    paths.make_folder(self._folder)
    record.write_json(os.path.join(self._folder, FILE_NAME), content)
    keys = self._keys()
    with paths.replacing(os.path.join(self._folder, "sweep.csv")) as file:
      writer = csv.writer(file)
      head = ["state", "step", metric, "at_step", "secs", "reason"]
      writer.writerow(["name", *keys, *head])
      for i in ranked:
        entry, best = self.entries[i], bests[i]
        values = (best.value, best.step) if best else ("", "")
        secs = "" if entry.secs is None else f"{entry.secs:.1f}"
        changes = [entry.variant.name, *_texts(entry, keys)]
        writer.writerow(
          [*changes, entry.state, steps[i], *values, secs, entry.reason]
        )

  def _name_of_best(
    self, bests: Sequence[ranking.Best | None], ranked: Sequence[int]
  ) -> str | None:
    first = ranked[0]
    return self.entries[first].variant.name if bests[first] else None

  def _keys(self) -> list[str]:
    changes = [entry.variant.changes for entry in self.entries]
    return list(dict.fromkeys(key for change in changes for key in change))

  def result(self, entry: Entry) -> str:
    """Returns "METRIC VALUE" of an entry; "" without a value."""
    metric, _, bests, _ = self._best()
    best = bests[self.entries.index(entry)]
    return f"{metric} {console.number(best.value)}" if best else ""

  def table(self) -> str:
    metric, mode, bests, steps = self._best()
    keys = self._keys()
    lines = [["", *keys, "state", "step", f"{metric} ({mode})", "reason"]]
    ranked = ranking.order(bests, mode)
    best_name = self._name_of_best(bests, ranked)
    for i in ranked:
      entry, best = self.entries[i], bests[i]
      star = "*" if entry.variant.name == best_name else ""
      step = str(steps[i]) if steps[i] else ""
      value = f"{console.number(best.value)} @ {best.step}" if best else ""
      changes = _texts(entry, keys)
      lines.append([star, *changes, entry.state, step, value, entry.reason])
    if not any(line[-1] for line in lines[1:]):
      lines = [line[:-1] for line in lines]
    return runs.aligned(lines)


def _names(by_entry: Sequence[list[log_entries.Entry]]) -> set[str]:
  return {name for of in by_entry for row in of for name in row}


def check_evaluation(metric: str | None, config: dict[str, Any]) -> None:
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
