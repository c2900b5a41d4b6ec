"""Accounts for a run's time: accounts, throughput, MFU, time left.

Every second of a process belongs to one account:

  start      before the loop begins (data, model, restoring)
  compile    compilation, and the first step with its one-time work
  step       steps, measured by their completion on the device
  data_wait  the loop waited for a batch
  eval       evaluations
  save       the loop waited for a checkpoint

A restarted run has two more:

  lost       steps after the last checkpoint, which the run had to repeat
  down       from the last sign of life to the new start; the run holds no
             devices then, so `device_hours` leaves it out

The loop marks the beginning and end of each phase. A thread waits for a step
and notes the time when the device completes it. Only `memory_bytes` uses jax.
"""

import collections
import concurrent.futures
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
# The rate of the last few rows predicts the time left; the mean of the whole
# run would include a slow beginning for hours.
_ROWS_FOR_ETA = 20


class Chrono:
  """Time accounts of a run; `state` and `restore` carry them over restarts.

  The loop calls, in this order (s is the number of updates so far):

    chrono = Chrono(batch_size=..., total_steps=...)
    chrono.restore(saved_state, last_alive=...)       # After a restart.
    with chrono.account("compile"): ...               # If ahead of time.
    chrono.start(s)                                   # The loop begins.
    with chrono.waiting_for_data(): ...               # Each step.
    chrono.warm(s + 1)                                # First step completed.
    chrono.completes(s, array.block_until_ready)      # A row is due.
    row |= chrono.row(s)                              # Metrics are fetched.
    with chrono.account("eval"): ...                  # Wait for the step
    with chrono.account("save"): ...                  # before these two.
    chrono.ckpt_written(secs)                         # A write has ended.
    row |= chrono.summary()                           # The end.
  """

  def __init__(
    self,
    *,
    batch_size: int,
    total_steps: int,
    last_step: int | None = None,
    examples_per_epoch: int | None = None,
    tokens_per_example: int | None = None,
    sources_at: Callable[[int], Mapping[str, float]] | None = None,
    flops_per_step: float | None = None,
    peak_flops_per_device: float | None = None,
    num_devices: int = 1,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    memory: Callable[[], dict[str, int]] | None = None,
  ):
    """Starts the clock.

    Args:
      last_step: last step of this run if earlier (`stop_at_steps`).
      examples_per_epoch: for `epoch`; without it rows have no `epoch`.
      tokens_per_example: for `tokens_*`; without it rows have none of these.
      sources_at: returns the figures of each source of a mixture by the number
        of steps, such as "epoch/web".
      flops_per_step: model FLOPs of a step, forward and backward, over all
        devices (`flops.train_flops`).
      peak_flops_per_device: FLOP/s, of `flops.peak_flops` or the config; rows
        have no `mfu` if this or `flops_per_step` is None.
      clock: returns monotonic seconds.
      wall: returns Unix time in seconds, to measure across restarts.
      memory: returns memory figures by name; `memory_bytes` if None.
    """
    self._batch_size = batch_size
    self._total_steps = total_steps
    self._last_step = total_steps if last_step is None else last_step
    self._examples_per_epoch = examples_per_epoch
    self._tokens_per_example = tokens_per_example
    self._sources_at = sources_at
    self._flops_per_step = flops_per_step
    self._peak = peak_flops_per_device
    self._num_devices = num_devices
    self._clock, self._wall = clock, wall
    self._memory = memory or memory_bytes

    self._born, self._born_wall = clock(), wall()
    self._mark = self._born  # All time before this is in the accounts.
    self._base = "start"  # Account for time outside of all spans.
    self._accounts = dict.fromkeys(ACCOUNTS, 0.0)
    self._spans: list[tuple[str, float, float]] = []  # Since the mark.
    self._open: list[str] = []  # Nested `account` contexts.
    self._open_since = 0.0

    self._step: int | None = None  # Of the last row, or the warm-up's end.
    self._recent: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=_ROWS_FOR_ETA
    )
    self._completions: dict[int, concurrent.futures.Future[float]] = {}
    self._first_row = True
    self._compile_before = 0.0  # In earlier processes of this run.
    self._stall_secs = 0.0
    self._write_secs: float | None = None
    self._device_secs_before = 0.0
    self._restarts = 0

  # Events of the loop.

  def start(self, step: int) -> None:
    """Marks the beginning of the loop, after `step` updates."""
    self._book(self._clock())
    self._base = "compile"
    self._step = step

  def warm(self, step: int, now: float | None = None) -> None:
    """Marks the completion of this process's first step on the device.

    Time before this counts as `compile`; throughput is measured from here.

    Args:
      now: time of the completion, in seconds of `clock`; now if None.
    """
    self._book(self._clock() if now is None else now)
    self._base = "step"
    self._step = step

  def data_wait(self, secs: float) -> None:
    """Records that the loop has just waited `secs` seconds for a batch.

    Inside of an `account` the wait counts as part of that account.
    """
    if not self._open:
      now = self._clock()
      self._spans.append(("data_wait", now - secs, now))

  @contextlib.contextmanager
  def waiting_for_data(self) -> Iterator[None]:
    """Records the time inside of the context by `data_wait`."""
    began = self._clock()
    yield
    self.data_wait(self._clock() - began)

  @contextlib.contextmanager
  def account(self, name: str) -> Iterator[None]:
    """Puts the time inside the context into account `name`.

    Of nested contexts the inner one counts. Wait for the last dispatched step
    before an evaluation or a save: otherwise its time counts as theirs.

    Raises:
      ValueError: unknown account.
    """
    if name not in ACCOUNTS:
      raise ValueError(
        f"account {name!r}: unknown; the accounts are {', '.join(ACCOUNTS)}"
      )
    self._switch(push=name)
    try:
      yield
    finally:
      self._switch()

  def _switch(self, push: str | None = None) -> None:
    now = self._clock()
    if self._open and now > self._open_since:
      self._spans.append((self._open[-1], self._open_since, now))
    if push is None:
      self._open.pop()
    else:
      self._open.append(push)
    self._open_since = now

  def ckpt_written(self, secs: float | None) -> None:
    """Records the seconds that a checkpoint's write took; None for no write."""
    if secs is None:
      return
    self._write_secs = (self._write_secs or 0.0) + secs

  def completes(self, step: int, wait: Callable[[], Any]) -> None:
    """Notes when the device completes `step`; `row` then ends at that time.

    Args:
      wait: blocks until the completion. It is called in a thread, so the loop
        goes on; `row` raises its exceptions.
    """
    completion: concurrent.futures.Future[float] = concurrent.futures.Future()
    self._completions[step] = completion

    def note() -> None:
      try:
        wait()
      except Exception as e:
        completion.set_exception(e)
      else:
        completion.set_result(self._clock())

    name = f"completion of step {step}"
    threading.Thread(target=note, name=name, daemon=True).start()

  # Results for the loop.

  def row(self, step: int, now: float | None = None) -> dict[str, float]:
    """Returns the figures for the row of `step`, since the previous row.

    Args:
      now: completion time of the step, in seconds of `clock`. By default the
        time that `completes` noted, else now. Later time counts for the next
        row.

    Returns:
      {name: value}, with the names of docs/config.md. Unknown figures are left
      out, and so are the rates before a step was measured.
    """
    if now is None:
      completion = self._completions.pop(step, None)
      now = completion.result() if completion else self._clock()
    warm = self._base == "step"
    spent = self._book(now)
    if not warm:
      self._base = "step"
    steps = step - (self._step or 0) if warm else 0
    self._step = step
    examples = step * self._batch_size
    row: dict[str, float] = {
      "examples_seen": examples,
      "progress": step / self._total_steps if self._total_steps else 1.0,
    }
    if self._tokens_per_example:
      row["tokens_seen"] = examples * self._tokens_per_example
    if self._examples_per_epoch:
      row["epoch"] = examples / self._examples_per_epoch
    if self._sources_at:
      row |= self._sources_at(step)
    busy = spent["step"] + spent["data_wait"]
    if steps > 0 and busy > 0:
      row |= self._rates(steps, busy, spent["data_wait"])
    if self._recent:
      row["eta_secs"] = self._eta(step)
    if self._first_row:
      row["compile_secs"] = self._accounts["compile"] - self._compile_before
      self._first_row = False
    return row | self._memory() | self._totals(now)

  def summary(self) -> dict[str, float]:
    """Returns the totals up to now, for the last row of the run."""
    self._book(self._clock())
    return self._totals(self._mark)

  def accounts(self) -> dict[str, float]:
    """Returns the seconds in each account, earlier processes included."""
    spent = self._split(self._clock())[0]
    return {name: self._accounts[name] + spent[name] for name in ACCOUNTS}

  def state(self) -> dict[str, Any]:
    """Returns the state that `restore` takes after a restart, as JSON."""
    return {
      "accounts": self.accounts(),
      "device_secs": self._device_secs(self._clock()),
      "num_devices": self._num_devices,
      "restarts": self._restarts,
      "wall_secs": self._wall(),
    }

  def restore(
    self, state: dict[str, Any] | None, last_alive: float | None = None
  ) -> None:
    """Continues the accounts of the process that saved `state`.

    Args:
      state: result of `state`, saved with the checkpoint that is resumed; None
        for a new clock.
      last_alive: Unix time in seconds of the last sign of life of earlier
        processes, such as `Writers.last_alive`. Time from saving to then
        counts as `lost`.
    """
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

  # Arithmetic.

  def _rates(
    self, steps: int, busy_secs: float, wait_secs: float
  ) -> dict[str, float]:
    self._recent.append((steps, busy_secs))
    rates = {
      "step_secs": busy_secs / steps,
      "examples_per_sec": steps * self._batch_size / busy_secs,
      "data_wait_fraction": wait_secs / busy_secs,
    }
    if self._tokens_per_example:
      rates["tokens_per_sec"] = (
        rates["examples_per_sec"] * self._tokens_per_example
      )
    if self._num_devices > 1:
      for name in ("examples_per_sec", "tokens_per_sec"):
        if name in rates:
          rates[f"{name}_per_device"] = rates[name] / self._num_devices
    if self._flops_per_step and self._peak:
      rates["mfu"] = flops.mfu(
        self._flops_per_step, busy_secs / steps, self._num_devices, self._peak
      )
    return rates

  def _eta(self, step: int) -> float:
    """Returns the seconds left, pauses included at their rate so far."""
    steps = sum(n for n, _ in self._recent)
    step_secs = sum(secs for _, secs in self._recent) / steps
    busy = self._accounts["step"] + self._accounts["data_wait"]
    pauses = self._accounts["eval"] + self._accounts["save"]
    return max(0, self._last_step - step) * step_secs * (1 + pauses / busy)

  def _totals(self, now: float) -> dict[str, float]:
    row = {"device_hours": self._device_secs(now) / 3600}
    if self._stall_secs:
      row["ckpt_stall_secs"] = self._stall_secs
      self._stall_secs = 0.0
    if self._write_secs is not None:
      row["ckpt_write_secs"] = self._write_secs
      self._write_secs = None
    if self._restarts:
      row["restarts"] = self._restarts
    accounts = self._accounts.items()
    return row | {f"account/{k}_secs": v for k, v in accounts if v}

  def _device_secs(self, now: float) -> float:
    return self._device_secs_before + (now - self._born) * self._num_devices

  def _book(self, now: float) -> dict[str, float]:
    """Adds the time up to `now` to the accounts; returns what it added."""
    now = max(now, self._mark)
    spent, self._spans = self._split(now)
    for name, secs in spent.items():
      self._accounts[name] += secs
    self._stall_secs += spent["save"]
    if self._open:
      self._open_since = max(self._open_since, now)
    self._mark = now
    return spent

  def _split(
    self, now: float
  ) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Returns seconds by account from the mark to `now`, and later spans."""
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


def memory_bytes() -> dict[str, int]:
  """Returns `host_rss_bytes` and, if the backend has it, `device_peak_bytes`.

  The first is the resident memory of this process, the second the largest peak
  of this host's devices since the process began.
  """
  import jax

  memory = {"host_rss_bytes": _rss_bytes()}
  stats = [d.memory_stats() or {} for d in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  if peaks:
    memory["device_peak_bytes"] = max(peaks)
  return memory


def _rss_bytes() -> int:
  try:
    with open("/proc/self/statm") as f:
      return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except FileNotFoundError:  # Not Linux: only the peak is available.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
