"""The log of a run's metrics: from the device to the writers and the hooks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from bigtrain.reports import chrono, log_entries, media, record, writers
from bigtrain.runtime.hooks import Hooks
from bigtrain.runtime.programs import Programs
from bigtrain.step import running_metrics, spikes
from bigtrain.step.running_metrics import RunningMetrics


@dataclasses.dataclass
class MetricsLog:
  """Makes rows of metrics.jsonl from log steps and from evaluations.

  `check` raises if the metrics of a log step are bad; `facts` are about the
  update, for the first row and run.json.
  """

  workdir: str
  writer: writers.Writers
  hooks: Hooks
  clock: chrono.Chrono
  programs: Programs
  check: Callable[[RunningMetrics], None]
  facts: Mapping[str, float]

  def __post_init__(self) -> None:
    self._queued: tuple[int, RunningMetrics, dict[str, Any]] | None = None
    self._noted: set[str] = set()
    self._rows = {row["step"]: row for row in log_entries.read(self.workdir)}
    self.newest: dict[str, Any] = {}  # Newest value of every metric.
    for row in self._rows.values():
      self.newest.update(row)

  def replay(self, step: int, owns: Callable[[str], bool]) -> bool:
    """Shows the hooks an evaluation's results on disk, if there are any."""
    results = {k: v for k, v in self._rows.get(step, {}).items() if owns(k)}
    if results:
      self.hooks.after_row({"step": step, **results})
    return bool(results)

  def queue(self, step: int, sums: RunningMetrics) -> None:
    self._queued = step, sums, self.hooks.take_scalars()

  def flush(self) -> None:
    if not self._queued:
      return
    step, *arrays = self._queued
    self._queued, (sums, scalars) = None, jax.device_get(arrays)
    self.check(sums)
    facts, times = self._note("update", **self.facts), self.clock.figures(step)
    values = running_metrics.row(sums)
    num_spikes = values.get("spike_steps", 0)
    if num_spikes > self.newest.get("spike_steps", 0):
      spike = spikes.describe(sums["spikes"])
      logging.warning("spike %d of this run: %s.", num_spikes, spike)
    self._write({"step": step, **values, **times, **facts, **scalars})

  def write_results(
    self, name: str, step: int, results: Mapping[str, Any]
  ) -> None:
    self._note(name)
    row = {f"{name}/{k}": v for k, v in results.items()}
    self._write({"step": step, **row})

  def _write(self, row: dict[str, Any]) -> None:
    row, shown = media.split(row)
    self.newest.update(row)
    self.writer.write(row, shown)
    self.hooks.after_row(row)

  def _note(self, program: str, **facts: float) -> dict[str, float]:
    """Writes what a program costs to run.json; returns it for a row, once."""
    if program in self._noted:
      return {}
    self._noted.add(program)
    costs = self.programs.facts(program)
    record.update(self.workdir, programs={program: costs}, **facts)
    sizes = {k: v for k, v in costs.items() if k.endswith("_bytes")}
    return {f"{program}_{name}": v for name, v in sizes.items()} | facts
