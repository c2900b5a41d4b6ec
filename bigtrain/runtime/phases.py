"""Tells watchdog, console, time accounts and profiles what the loop does."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from bigtrain.cluster import process
from bigtrain.cluster.watchdog import Watchdog
from bigtrain.reports import flops
from bigtrain.reports.chrono import Chrono
from bigtrain.reports.console import Console
from bigtrain.runtime.run import Run

# Watchdog phase: (console status, time account).
_PHASES = {
  "compile": ("compiling", "compile"),
  "evaluation": ("evaluating", "eval"),
  "save": ("saving", "save"),
  "rollout": ("writing answers", "data_wait"),
}


class Phases:
  """Enters phases: `with phase("save", step)`. Between them the run trains."""

  def __init__(self, watchdog: Watchdog, console: Console, clock: Chrono):
    self._watchdog = watchdog
    self.console = console
    self.clock = clock
    # Phase, step and status inside a `with` block.
    self._current: tuple[str, int, str] | None = None

  @contextlib.contextmanager
  def __call__(self, name: str, step: int, detail: str = "") -> Iterator[None]:
    """Enters a phase for a `with` block, and then returns to the one before.

    Wait for dispatched steps before the block; otherwise their time would count
    as the phase's.
    """
    if name not in _PHASES:
      raise ValueError(f"phase {name!r}: expected one of {', '.join(_PHASES)}")
    status, account = _PHASES[name]
    outer = self._current
    self._current = name, step, f"{status} {detail}".rstrip()
    self._report(*self._current)
    try:
      label = f"{name} {detail}".rstrip()
      annotation = jax.profiler.TraceAnnotation(label, step=step)
      with self.clock.account(account), annotation:
        yield
    except Exception as e:
      e.add_note(f"while {self._current[2]}")  # For tracebacks, and messages.
      raise
    finally:
      self._current = outer
      self._report(*(outer or ("step", step, "training")))

  def step(self, step: int) -> None:
    """Begins a step of training."""
    self._report("step", step, "training")

  def batch(
    self, step: int, writes: bool
  ) -> contextlib.AbstractContextManager[None]:
    """Enters the wait for a step's batch, a phase if answers are written."""
    if writes:
      return self("rollout", step)
    return self.clock.account("data_wait")

  def evaluation_progress(self, num_done: int, num_batches: int) -> None:
    """Reports a finished batch; raises Preempted if a signal ends the run."""
    self._watchdog.beat()
    self.console.evaluation_progress(num_done, num_batches)
    if process.preempted():
      step = self._current[1] if self._current else 0
      raise process.Preempted(f"evaluating step {step}, which is saved")

  def _report(self, phase: str, step: int, status: str) -> None:
    self._watchdog.enter(phase, step)
    self.console.status(status)


def from_run(
  run: Run,
  watchdog: Watchdog,
  about_input: Mapping[str, Any],
  flops_per_step: float,
) -> Phases:
  """The phases of a run, with a console and a clock of its own.

  Args:
    about_input: arguments of `Chrono` that describe the input.
    flops_per_step: model FLOPs of a step, over all devices.
  """
  clock = Chrono(
    **run.lengths.about(),
    **about_input,
    flops_per_step=flops_per_step,
    peak_flops_per_device=flops.read_peak_flops(
      run.config, run.mesh.devices.flat[0]
    ),
    num_devices=run.mesh.size,
  )
  console = Console(run.lengths.total, process_index=jax.process_index())
  return Phases(watchdog, console, clock)
