"""Passes a run's metrics from the device to the writers and the hooks.

The loop calls `queue` in a log step, and `flush` after it has dispatched the
next step, so that the device does not wait for the host. Results of evaluations
are written at once.
"""

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
  """Makes the log entries of log steps and evaluations.

  Attributes:
    check: raises if the metrics of a log step are bad.
    facts: numbers about the update, for the first log entry and run.json.
    newest: newest value of every metric.
  """

  workdir: str
  writer: writers.Writers
  hooks: Hooks
  clock: chrono.Chrono
  programs: Programs
  check: Callable[[RunningMetrics], None]
  facts: Mapping[str, float]

  def __post_init__(self) -> None:
    self._queued: tuple[Any, ...] | None = None
    self._noted: set[str] = set()  # Programs whose costs are written.
    # {step: log entry} of those that are on disk at the start.
    self._entries = {
      entry["step"]: entry for entry in log_entries.read(self.workdir)
    }
    self.newest: dict[str, Any] = {}
    for entry in self._entries.values():
      self.newest.update(entry)

  def replay(self, step: int, owns: Callable[[str], bool]) -> bool:
    """Shows the hooks an evaluation's results that are already on disk.

    Args:
      step: step of the evaluation.
      owns: whether a metric's name is one of the evaluation's.

    Returns: whether there are results.
    """
    entry = self._entries.get(step, {})
    results = {name: value for name, value in entry.items() if owns(name)}
    if results:
      self.hooks.after_row({"step": step, **results})
    return bool(results)

  def queue(
    self,
    step: int,
    sums: RunningMetrics,
    report: Callable[[], dict[str, Any]] = dict,
  ) -> None:
    """Keeps the metrics of a log step until `flush`.

    `report` then returns additional values for the entry.
    """
    self._queued = step, sums, self.hooks.take_scalars(), report

  def flush(self) -> None:
    """Fetches and writes the metrics of the queued log step."""
    if not self._queued:
      return
    step, sums, scalars, report = self._queued
    sums, scalars = jax.device_get((sums, scalars))
    self._queued = None
    self.check(sums)
    facts = self._note("update", **self.facts)
    times = self.clock.figures(step)
    values = running_metrics.log_values(sums)
    num_spikes = values.get("spike_steps", 0)
    if num_spikes > self.newest.get("spike_steps", 0):
      spike = spikes.describe(sums["spikes"])
      logging.warning("spike %d of this run: %s.", num_spikes, spike)
    others = {**report(), **times, **facts, **scalars}
    self._write({"step": step, **values, **others})

  def write_results(
    self, name: str, step: int, results: Mapping[str, Any]
  ) -> None:
    """Writes the results of an evaluation."""
    self._note(name)
    named = {f"{name}/{metric}": value for metric, value in results.items()}
    self._write({"step": step, **named})

  def _write(self, entry: dict[str, Any]) -> None:
    """Passes a log entry on; images and other media only go to the writers."""
    scalars, shown = media.split(entry)
    self.newest.update(scalars)
    self.writer.write(scalars, shown)
    self.hooks.after_row(scalars)

  def _note(self, program: str, **facts: float) -> dict[str, float]:
    """Writes a program's costs to run.json, and returns them, once."""
    if program in self._noted:
      return {}
    self._noted.add(program)
    costs = self.programs.facts(program)
    record.update(self.workdir, programs={program: costs}, **facts)
    sizes = {
      f"{program}_{name}": value
      for name, value in costs.items()
      if name.endswith("_bytes")
    }
    return sizes | facts
