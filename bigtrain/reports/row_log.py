"""Collects the rows of a run and passes them to the writers and the hooks."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from bigtrain.reports import chrono, record, writers
from bigtrain.runtime import hooks, programs
from bigtrain.step import tally


class RowLog:
  """Makes rows from the tallies of steps and the results of evaluations.

  Args:
    workdir: folder of the run.
    writer: receives every row.
    run_hooks: receive every row and may stop the run.
    clock: adds times and rates to training rows.
    compiled: source of the program facts for run.json and the first row.
    check: called with each fetched tally; raises if the tally is bad.
    facts: further facts for run.json and the first row.

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
    self._queued: tuple[int, tally.Tally] | None = None
    self._noted: set[str] = set()
    # Rows of earlier processes of this run.
    self._rows = {row["step"]: row for row in writers.read_rows(workdir)}
    self.newest: dict[str, Any] = {}
    for row in self._rows.values():
      self.newest.update(row)

  def replay(self, step: int, owns: Callable[[str], bool]) -> bool:
    """Shows the hooks an evaluation's results that are already on disk.

    Args:
      step: step of the results.
      owns: whether a metric's name belongs to the evaluation.

    Returns:
      Whether there were such results.
    """
    results = {k: v for k, v in self._rows.get(step, {}).items() if owns(k)}
    if results:
      self.show({"step": step, **results})
    return bool(results)

  def queue_row(self, step: int, sums: tally.Tally) -> None:
    """Queues the row of `step`; `flush_row` writes it."""
    self._queued = step, sums

  def flush_row(self) -> None:
    """Writes the queued row, if there is one; waits for its step."""
    if self._queued:
      step, sums = self._queued
      self._queued, sums = None, jax.device_get(sums)
      self._check(sums)
      first = self.note("update", **self._facts)
      times = self._clock.row(step)
      self.write({"step": step, **tally.row(sums), **times, **first})

  def write(self, row: dict[str, Any]) -> None:
    """Passes a row to the writers and the hooks."""
    self.newest.update(row)
    self._writer.write(row)
    self.show(row)

  def write_results(
    self, name: str, step: int, results: Mapping[str, float]
  ) -> None:
    """Writes the results of the evaluation `name` at `step`."""
    self.note(name)
    self.write({"step": step, **{f"{name}/{k}": v for k, v in results.items()}})

  def show(self, row: Mapping[str, Any]) -> None:
    """Passes a row to the hooks, unless one of them has stopped the run."""
    if not self._hooks.stopped:
      self._hooks.after_step(row["step"], row)

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
