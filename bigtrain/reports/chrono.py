"""Where a run's time goes: time accounts, throughput, MFU, time left.

Every second of a run belongs to one account:

  start      before the loop begins (data, model, restoring)
  compile    compilation, and the first step with its one-time work
  step       steps, measured by their completion on the device
  data_wait  the loop waited for a batch
  eval       evaluations
  save       the loop waited for a checkpoint
  lost       steps after the last checkpoint, which a restart had to repeat
  down       from the last sign of life to a restart; the run had no devices
             then, so this is not in `device_hours`

The loop never waits for the device to measure time. A thread waits for each
logged step and notes when it completed (`completes`); `figures` then assigns
the time up to that moment to the accounts.
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

ACCOUNTS = (
  "start",
  "compile",
  "step",
  "data_wait",
  "eval",
  "save",
  "lost",
  "down",
)
# Number of log entries whose mean step time gives the time left. With more it
# would react slowly; the mean of the whole run would include a slow beginning.
_ENTRIES_FOR_ETA = 20


def memory_bytes() -> dict[str, int]:
  """Resident memory of this process, and the largest peak of its devices."""
  try:
    with open("/proc/self/statm") as f:
      num_pages = int(f.read().split()[1])
    rss_bytes = num_pages * os.sysconf("SC_PAGE_SIZE")
  except FileNotFoundError:  # Not Linux: only the peak is available.
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # In kilobytes, except on macOS.
      rss_bytes *= 1024
  result = {"host_rss_bytes": rss_bytes}
  peaks = []
  for device in jax.local_devices():
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
      peaks.append(stats["peak_bytes_in_use"])
  if peaks:  # CPU devices have no statistics.
    result["device_peak_bytes"] = max(peaks)
  return result


@dataclasses.dataclass
class Chrono:
  """Time accounts of a run; `state` and `restore` carry them over restarts."""

  batch_size: int
  total_steps: int
  last_step: int | None = None  # Where this process ends, if earlier.
  examples_per_epoch: int | None = None
  tokens_per_example: int | None = None
  # Maps a step to the figures of each source of a mixture, such as its epoch.
  sources_at: Callable[[int], Mapping[str, float]] | None = None
  flops_per_step: float | None = None  # Model FLOPs, over all devices.
  peak_flops_per_device: float | None = None  # FLOP/s.
  num_devices: int = 1
  clock: Callable[[], float] = time.monotonic
  wall: Callable[[], float] = time.time  # For times across restarts.
  memory: Callable[[], dict[str, int]] = memory_bytes

  def __post_init__(self) -> None:
    self._born = self.clock()
    self._born_wall = self.wall()
    # The accounts have all time before the mark. Spans since then are kept
    # until the mark passes their end.
    self._accounts = dict.fromkeys(ACCOUNTS, 0.0)
    self._mark = self._born
    self._spans: list[tuple[str, float, float]] = []  # Account, begin, end.
    self._base = "start"  # The account of time outside of all spans.
    # Nested `account` contexts, and since when the innermost one is active.
    self._open: list[str] = []
    self._open_since = 0.0
    # Step of the previous log entry, or of the end of the first step.
    self._step = 0
    # Number of steps, and their seconds, of the newest log entries.
    self._recent: list[tuple[int, float]] = []
    self._completions: dict[int, concurrent.futures.Future[float]] = {}
    self._is_first_entry = True
    # Since the previous log entry.
    self._stall_secs = 0.0
    self._write_secs = 0.0
    # Of earlier processes of this run.
    self._compile_secs_before = 0.0
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
    """Adds the time inside the context, except that of inner ones, to `name`.

    Wait for the last step before entering the context: otherwise the rest of
    that step counts as the context's time.
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
    """Notes, in a thread, when `wait` returns and the step is complete."""
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

  def figures(self, step: int, now: float | None = None) -> dict[str, float]:
    """Figures of a log entry, with the names in docs/config.md.

    They cover the time from the previous entry to the completion of the step,
    as `completes` noted it, or else until now.
    """
    if now is None:
      completion = self._completions.pop(step, None)
      now = completion.result() if completion else self.clock()
    is_warm = self._base == "step"
    spent = self._book(now)
    self._base = "step"
    # Steps of which all the time was measured: the first one compiles.
    num_steps = step - self._step if is_warm else 0
    self._step = step
    num_examples = step * self.batch_size
    figures: dict[str, float] = {
      "examples_seen": num_examples,
      "progress": step / self.total_steps if self.total_steps else 1.0,
    }
    if self.tokens_per_example:
      figures["tokens_seen"] = num_examples * self.tokens_per_example
    if self.examples_per_epoch:
      figures["epoch"] = num_examples / self.examples_per_epoch
    if self.sources_at:
      figures |= self.sources_at(step)
    busy_secs = spent["step"] + spent["data_wait"]
    if num_steps > 0 and busy_secs > 0:
      self._recent = [*self._recent, (num_steps, busy_secs)]
      self._recent = self._recent[-_ENTRIES_FOR_ETA:]
      figures |= self._rates(busy_secs / num_steps)
      figures["data_wait_fraction"] = spent["data_wait"] / busy_secs
    if self._recent:
      figures["eta_secs"] = self._eta_secs(step)
    if self._is_first_entry:
      compile_secs = self._accounts["compile"] - self._compile_secs_before
      figures["compile_secs"] = compile_secs
      self._is_first_entry = False
    return figures | self.memory() | self._totals(now)

  def summary(self) -> dict[str, float]:
    """The totals at the end of a run."""
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
    """Continues the accounts of an earlier process, saved by `state`.

    The time from the save to `last_alive`, the Unix time of that process's last
    sign of life, is `lost`; from then to the start of this process, the run was
    `down`.
    """
    if state is None:
      return
    # Clocks of two hosts may differ.
    saved = min(state["wall_secs"], self._born_wall)
    alive = saved if last_alive is None else last_alive
    alive = min(max(alive, saved), self._born_wall)
    for name, secs in state["accounts"].items():
      self._accounts[name] = self._accounts.get(name, 0.0) + secs
    lost_secs = alive - saved
    self._accounts["lost"] += lost_secs
    self._accounts["down"] += self._born_wall - alive
    self._compile_secs_before = state["accounts"]["compile"]
    self._device_secs_before = (
      state["device_secs"] + lost_secs * state["num_devices"]
    )
    self._restarts = state["restarts"] + 1

  def _rates(self, step_secs: float) -> dict[str, float]:
    per_sec = {"examples_per_sec": self.batch_size / step_secs}
    if self.tokens_per_example:
      num_tokens = self.batch_size * self.tokens_per_example
      per_sec["tokens_per_sec"] = num_tokens / step_secs
    rates = {"step_secs": step_secs, **per_sec}
    if self.num_devices > 1:
      for name, rate in per_sec.items():
        rates[f"{name}_per_device"] = rate / self.num_devices
    if self.flops_per_step and self.peak_flops_per_device:
      rates["mfu"] = flops.mfu(
        self.flops_per_step,
        step_secs,
        self.num_devices,
        self.peak_flops_per_device,
      )
    return rates

  def _eta_secs(self, step: int) -> float:
    """Seconds left, if evaluations and saves keep their share of the time."""
    num_steps = sum(number for number, _ in self._recent)
    step_secs = sum(secs for _, secs in self._recent) / num_steps
    busy_secs = self._accounts["step"] + self._accounts["data_wait"]
    pause_secs = self._accounts["eval"] + self._accounts["save"]
    last = self.total_steps if self.last_step is None else self.last_step
    return max(0, last - step) * step_secs * (1 + pause_secs / busy_secs)

  def _totals(self, now: float) -> dict[str, float]:
    """Figures about the whole run, and checkpoint times since the last call."""
    figures = {
      "ckpt_stall_secs": self._stall_secs,
      "ckpt_write_secs": self._write_secs,
      "restarts": self._restarts,
    }
    for name, secs in self._accounts.items():
      figures[f"account/{name}_secs"] = secs
    self._stall_secs = 0.0
    self._write_secs = 0.0
    hours = {"device_hours": self._device_secs(now) / 3600}
    return hours | {name: value for name, value in figures.items() if value}

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
    """Seconds by account from the mark to `now`, and the spans after it.

    `now` may be in the past: a step can complete before an evaluation that the
    loop has already begun.
    """
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
