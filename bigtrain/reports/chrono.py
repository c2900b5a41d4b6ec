"""Where a run's time goes: accounts, throughput, MFU, time left.

Every second of a run belongs to one account:

  start      before the loop begins (data, model, restoring)
  compile    compilation, and the first step with its one-time work
  step       steps, measured by their completion on the device
  data_wait  the loop waited for a batch
  eval       evaluations
  save       the loop waited for a checkpoint
  lost       steps after the last checkpoint, which a restart had to repeat
  down       from the last sign of life to a restart; without devices, so it is
             not in `device_hours`
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from bigtrain.reports import flops

ACCOUNTS = tuple("start compile step data_wait eval save lost down".split())
_ROWS_FOR_ETA = 20  # The whole run's mean would include a slow beginning.


def memory_bytes() -> dict[str, int]:
  try:
    with open("/proc/self/statm") as f:
      rss = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except FileNotFoundError:  # Not Linux: only the peak is available.
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rss *= 1 if sys.platform == "darwin" else 1024
  stats = [d.memory_stats() or {} for d in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  peak = {"device_peak_bytes": max(peaks)} if peaks else {}
  return {"host_rss_bytes": rss, **peak}


@dataclasses.dataclass
class Chrono:
  """Time accounts of a run; `state` and `restore` carry them over restarts."""

  batch_size: int
  total_steps: int
  last_step: int | None = None  # Of this run, if earlier.
  examples_per_epoch: int | None = None
  tokens_per_example: int | None = None
  # Figures of each source of a mixture, after a number of steps.
  sources_at: Callable[[int], Mapping[str, float]] | None = None
  flops_per_step: float | None = None  # Model FLOPs, over all devices.
  peak_flops_per_device: float | None = None  # FLOP/s.
  num_devices: int = 1
  clock: Callable[[], float] = time.monotonic
  wall: Callable[[], float] = time.time  # Measures across restarts.
  memory: Callable[[], dict[str, int]] = memory_bytes

  def __post_init__(self) -> None:
    self._born, self._born_wall = self.clock(), self.wall()
    self._mark = self._born  # All time before this is in the accounts.
    self._base = "start"  # Account for time outside of all spans.
    self._accounts = dict.fromkeys(ACCOUNTS, 0.0)
    self._spans: list[tuple[str, float, float]] = []  # Since the mark.
    self._open: list[str] = []  # Nested `account` contexts.
    self._open_since = 0.0
    self._step = 0  # Of the last row, or the warm-up's end.
    self._recent: list[tuple[int, float]] = []  # Steps and seconds of rows.
    self._completions: dict[int, concurrent.futures.Future[float]] = {}
    self._first_row = True
    self._compile_before = 0.0  # In earlier processes of this run.
    self._stall_secs = self._write_secs = 0.0
    self._device_secs_before = 0.0
    self._restarts = 0

  def start(self, step: int) -> None:
    self._book(self.clock())
    self._base, self._step = "compile", step

  def warm(self, step: int) -> None:
    """Marks the completion of the first step; time before it is `compile`."""
    self._book(self.clock())
    self._base, self._step = "step", step

  @contextlib.contextmanager
  def account(self, name: str) -> Iterator[None]:
    """Puts the time inside the context, but not in an inner one, into `name`.

    Wait for the last step before: otherwise its time counts as the context's.
    """
    self._end_span()
    self._open.append(name)
    try:
      yield
    finally:
      self._end_span()
      self._open.pop()

  def _end_span(self) -> None:
    now = self.clock()
    if self._open and now > self._open_since:
      self._spans.append((self._open[-1], self._open_since, now))
    self._open_since = now

  def ckpt_written(self, secs: float | None) -> None:
    self._write_secs += secs or 0.0

  def completes(self, step: int, wait: Callable[[], Any]) -> None:
    """Notes in a thread when `wait` returns, as the end of the step's `row`."""
    completion: concurrent.futures.Future[float] = concurrent.futures.Future()
    self._completions[step] = completion

    def note() -> None:
      try:
        wait()
        completion.set_result(self.clock())
      except Exception as e:
        completion.set_exception(e)

    name = f"completion of step {step}"
    threading.Thread(target=note, name=name, daemon=True).start()

  def row(self, step: int, now: float | None = None) -> dict[str, float]:
    """Figures since the previous row, with the names of docs/config.md.

    They end at the step's completion, as `completes` noted, else now.
    """
    if now is None:
      completion = self._completions.pop(step, None)
      now = completion.result() if completion else self.clock()
    is_warm = self._base == "step"
    spent = self._book(now)
    self._base = "step"
    steps = step - self._step if is_warm else 0
    self._step = step
    examples = step * self.batch_size
    row: dict[str, float] = {
      "examples_seen": examples,
      "progress": step / self.total_steps if self.total_steps else 1.0,
    }
    if self.tokens_per_example:
      row["tokens_seen"] = examples * self.tokens_per_example
    if self.examples_per_epoch:
      row["epoch"] = examples / self.examples_per_epoch
    if self.sources_at:
      row |= self.sources_at(step)
    busy = spent["step"] + spent["data_wait"]
    if steps > 0 and busy > 0:
      self._recent = [*self._recent, (steps, busy)][-_ROWS_FOR_ETA:]
      row |= self._rates(busy / steps)
      row["data_wait_fraction"] = spent["data_wait"] / busy
    if self._recent:
      row["eta_secs"] = self._eta(step)
    if self._first_row:
      row["compile_secs"] = self._accounts["compile"] - self._compile_before
      self._first_row = False
    return row | self.memory() | self._totals(now)

  def summary(self) -> dict[str, float]:
    self._book(self.clock())
    return self._totals(self._mark)

  def accounts(self) -> dict[str, float]:
    spent = self._split(self.clock())[0]
    return {name: self._accounts[name] + spent[name] for name in ACCOUNTS}

  def state(self) -> dict[str, Any]:
    return {
      "accounts": self.accounts(),
      "device_secs": self._device_secs(self.clock()),
      "num_devices": self.num_devices,
      "restarts": self._restarts,
      "wall_secs": self.wall(),
    }

  def restore(
    self, state: Mapping[str, Any] | None, last_alive: float | None = None
  ) -> None:
    """Continues the accounts of `state`; time up to `last_alive` was `lost`."""
    if state is None:
      return
    saved = min(state["wall_secs"], self._born_wall)
    alive = saved if last_alive is None else last_alive
    alive = min(max(alive, saved), self._born_wall)
    for name, secs in state["accounts"].items():
      self._accounts[name] = self._accounts.get(name, 0.0) + secs
    self._accounts["lost"] += alive - saved
    self._accounts["down"] += self._born_wall - alive
    self._compile_before = state["accounts"]["compile"]
    self._device_secs_before = (
      state["device_secs"] + (alive - saved) * state["num_devices"]
    )
    self._restarts = state["restarts"] + 1

  def _rates(self, step_secs: float) -> dict[str, float]:
    n, peak = self.num_devices, self.peak_flops_per_device
    per_sec = {"examples_per_sec": self.batch_size / step_secs}
    if self.tokens_per_example:
      tokens = self.batch_size * self.tokens_per_example
      per_sec["tokens_per_sec"] = tokens / step_secs
    rates = {"step_secs": step_secs, **per_sec}
    if n > 1:
      rates |= {f"{k}_per_device": rate / n for k, rate in per_sec.items()}
    if self.flops_per_step and peak:
      rates["mfu"] = flops.mfu(self.flops_per_step, step_secs, n, peak)
    return rates

  def _eta(self, step: int) -> float:
    """Seconds left, pauses included at their rate so far."""
    steps = sum(n for n, _ in self._recent)
    step_secs = sum(secs for _, secs in self._recent) / steps
    busy = self._accounts["step"] + self._accounts["data_wait"]
    pauses = self._accounts["eval"] + self._accounts["save"]
    last = self.total_steps if self.last_step is None else self.last_step
    return max(0, last - step) * step_secs * (1 + pauses / busy)

  def _totals(self, now: float) -> dict[str, float]:
    row = {
      "ckpt_stall_secs": self._stall_secs,
      "ckpt_write_secs": self._write_secs,
      "restarts": self._restarts,
      **{f"account/{name}_secs": v for name, v in self._accounts.items()},
    }
    self._stall_secs = self._write_secs = 0.0
    hours = {"device_hours": self._device_secs(now) / 3600}
    return hours | {name: value for name, value in row.items() if value}

  def _device_secs(self, now: float) -> float:
    return self._device_secs_before + (now - self._born) * self.num_devices

  def _book(self, now: float) -> dict[str, float]:
    """Adds the time up to `now` to the accounts; returns what it added."""
    now = max(now, self._mark)
    spent, self._spans = self._split(now)
    for name, secs in spent.items():
      self._accounts[name] += secs
    self._stall_secs += spent["save"]
    self._open_since = max(self._open_since, now)
    self._mark = now
    return spent

  def _split(
    self, now: float
  ) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Seconds by account from the mark to `now`, and later spans."""
    spent = dict.fromkeys(ACCOUNTS, 0.0)
    later = []
    spans = list(self._spans)
    if self._open and now > self._open_since:
      spans.append((self._open[-1], self._open_since, now))
    for name, begin, end in spans:
      spent[name] += max(0.0, min(end, now) - max(begin, self._mark))
      if end > now:
        later.append((name, max(begin, now), end))
    # Spans measured by different clocks may overlap by a rounding error.
    spent[self._base] += max(0.0, now - self._mark - sum(spent.values()))
    return spent, later
