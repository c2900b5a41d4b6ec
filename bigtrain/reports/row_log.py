"""The rows of a run on their way to the writers and the hooks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from bigtrain.reports import chrono, record, writers
from bigtrain.runtime import hooks, programs
from bigtrain.step import tally


class RowLog:
  """Takes what the loop has to say of a step, and passes it on.

  Args:
    workdir: folder of the run.
    writer: gets every row.
    run_hooks: get every row, and may stop the run.
    clock: adds times and rates to rows of training.
    compiled: what run.json and the first row say of programs.
    check: called with each fetched tally; raises what is wrong with it.
    facts: more for run.json and the first row.

  Attributes:
    newest: the newest value of every metric.
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
    self._due: tuple[int, tally.Tally] | None = None
    self._noted: set[str] = set()
    self.newest: dict[str, Any] = {}

  def take_over(self, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows that processes before this one have written."""
    for row in rows:
      self.newest.update(row)

  def queue_row(self, step: int, sums: tally.Tally) -> None:
    """There is to be a row of `step`; `flush_row` writes it."""
    self._due = step, sums

  def flush_row(self) -> None:
    """Writes the row that is due, waiting for its step if need be."""
    if self._due:
      step, sums = self._due
      self._due, sums = None, jax.device_get(sums)
      self._check(sums)
      first = self.note("update", **self._facts)
      times = self._clock.row(step)
      self.write({"step": step, **tally.row(sums), **times, **first})

  def write(self, row: dict[str, Any]) -> None:
    """Gives a row to the writers and to the hooks."""
    self.newest.update(row)
    self._writer.write(row)
    self.show(row)

  def show(self, row: Mapping[str, Any]) -> None:
    """Gives a row to the hooks, until one of them has stopped the run."""
    if not self._hooks.stopped:
      self._hooks.after_step(row["step"], row)

  def note(self, program: str, **facts: float) -> dict[str, float]:
    """Writes to run.json, once, what is known of a compiled program.

    Returns:
      What a row says of that; {} if it was said before.
    """
    if program in self._noted:
      return {}
    self._noted.add(program)
    known = self._compiled.facts(program)
    record.update(self._workdir, programs={program: known}, **facts)
    sizes = {k: v for k, v in known.items() if k.endswith("_bytes")}
    return {f"{program}_{name}": v for name, v in sizes.items()} | facts
