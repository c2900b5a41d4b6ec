"""Collects the rows of a run and passes them to the writers and the hooks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from absl import logging

from bigtrain.reports import chrono, media, record, writers
from bigtrain.runtime import hooks, programs
from bigtrain.step import spikes, tally


class RowLog:
  """Makes rows from the tallies of steps and the results of evaluations.

  Args:
    check: called with each fetched tally; raises if the tally is bad.

  Attributes:
    newest: newest value of every metric.
  """

  def __init__(
    self,
    workdir: str,
    writer: writers.Writers,
    run_hooks: hooks.Hooks,
    clock: chrono.Chrono,
    compiled: programs.Programs,
    check: Callable[[tally.Tally], None],
    facts: Mapping[str, float],
  ):
    self._workdir = workdir
    self._writer = writer
    self._hooks = run_hooks
    self._clock = clock
    self._compiled = compiled
    self._check = check
    self._facts = dict(facts)
    self._queued: tuple[int, tally.Tally, dict[str, Any]] | None = None
    self._noted: set[str] = set()
    # Rows of earlier processes of this run.
    self._rows = {row["step"]: row for row in writers.read_rows(workdir)}
    self.newest: dict[str, Any] = {}
    for row in self._rows.values():
      self.newest.update(row)

  def replay(self, step: int, owns: Callable[[str], bool]) -> bool:
    """Shows the hooks an evaluation's results that are already on disk.

    Args:
      owns: whether a metric's name belongs to the evaluation.

    Returns:
      Whether there were such results.
    """
    results = {k: v for k, v in self._rows.get(step, {}).items() if owns(k)}
    if results:
      self._hooks.after_row({"step": step, **results})
    return bool(results)

  def queue_row(self, step: int, sums: tally.Tally) -> None:
    """Queues the row of `step`; `flush_row` writes it."""
    self._queued = step, sums, self._hooks.take_scalars()

  def flush_row(self) -> None:
    """Writes the queued row, if any; waits for its step."""
    if self._queued:
      step, *fetched = self._queued
      self._queued, (sums, scalars) = None, jax.device_get(fetched)
      self._check(sums)
      first = self.note("update", **self._facts)
      times = self._clock.row(step)
      values = tally.row(sums)
      num_spikes = values.get("spike_steps", 0)
      if num_spikes > self.newest.get("spike_steps", 0):
        what = spikes.describe(sums["spikes"])
        logging.warning("spike %d of this run: %s.", num_spikes, what)
      self.write({"step": step, **values, **times, **first, **scalars})

  def write(self, row: dict[str, Any]) -> None:
    """Passes a row to the writers and the hooks.

    `newest` and the hooks get the paths of images, texts and histograms.
    """
    row, shown = media.split(row)
    self.newest.update(row)
    self._writer.write(row, shown)
    self._hooks.after_row(row)

  def write_results(
    self, name: str, step: int, results: Mapping[str, Any]
  ) -> None:
    """Writes the results of the evaluation `name` at `step`."""
    self.note(name)
    self.write({"step": step, **{f"{name}/{k}": v for k, v in results.items()}})

  def note(self, program: str, **facts: float) -> dict[str, float]:
    """Writes the facts about a compiled program to run.json, once.

    Returns:
      The facts for a row; {} if the program was noted before.
    """
    if program in self._noted:
      return {}
    self._noted.add(program)
    known = self._compiled.facts(program)
    record.update(self._workdir, programs={program: known}, **facts)
    sizes = {k: v for k, v in known.items() if k.endswith("_bytes")}
    return {f"{program}_{name}": v for name, v in sizes.items()} | facts


def finished(
  workdir: str,
  step: int | None,
  total_steps: int,
  evaluations: Iterable[Any],
) -> dict[str, Any] | None:
  """Returns the newest metrics of a run that has nothing left to do.

  Args:
    step: step at which it has ended; None if it goes on.
    evaluations: its evaluations (evaluation/evaluations.py).

  Returns:
    The newest value of every metric; None if the run goes on, or if results of
    an evaluation are missing.
  """
  if step is None:
    return None
  rows = writers.read_rows(workdir)
  names = {name for row in rows if row["step"] == step for name in row}
  due = [e for e in evaluations if e.due(step, total_steps)]
  if not rows or not all(any(map(e.owns, names)) for e in due):
    return None
  logging.info(
    "Step %d of %d, resumed from step %d of this workdir: nothing is left to "
    "do.",
    *(step, total_steps, step),
  )
  newest = {name: value for row in rows for name, value in row.items()}
  return newest | {"step": step}
