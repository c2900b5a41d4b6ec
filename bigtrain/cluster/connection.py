"""Each process's connection to process 0 while the job runs.

Every process keeps a TCP connection to process 0 (hub.py), served by a thread
of its own. It uses neither jax's runtime nor the devices, so it works while
the main thread waits in a collective for a process that is gone:

- if a process disconnects without an error message, or sends no heartbeat for
  `heartbeat_secs`, all processes end and name it;
- if a process fails, all end with its exit code and its error message;
- if processes have different data, all end (`Connection.require_equal`);
- after a signal to one process, all end at the same point
  (`Connection.should_end`);
- the log names a process that does more work on the host than the others.

Messages are lines of JSON. The first one carries a secret that only the job's
processes know, which keeps others out.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from bigtrain.cluster import hub
from bigtrain.cluster.hub import EXIT_LOST, HEARTBEAT_SECS, LINE_BYTES

# How long a process that fails waits before it reports that. If another one is
# killed, the collectives of all others fail within milliseconds, and the loss
# of the killed one should be known first.
_CULPRIT_SECS = 1.5
# How long process 0 stays after its last message, so that all can read it, and
# how long a signal handler waits after a message.
_FAREWELL_SECS = 0.5
_ANSWER_SECS = 5.0


class Connection:
  """The connection of this process; on process 0 it also starts the hub.

  Attributes:
    index: index of this process.
    count: number of processes.
    ending: whether all processes have agreed to end (see `should_end`).
    failed: whether this process has reported its failure.
  """

  def __init__(
    self,
    index: int,
    count: int,
    *,
    heartbeat_secs: float,
    report_secs: float = 60.0,
    on_hang: Callable[[], None] = lambda: None,
  ):
    """Starts nothing yet: `listen` on process 0, then `connect` on all.

    Args:
      on_hang: called before the end if some process hangs.
    """
    self.index = index
    self.count = count
    self.ending = False
    self.failed = False
    self._secret = ""
    self._heartbeat_secs = heartbeat_secs
    self._report_secs = report_secs
    self._on_hang = on_hang
    self._on_abrupt_end: list[Callable[[], None]] = []
    self._loop = asyncio.new_event_loop()
    self._writer: Any = None
    self._listening: socket.socket | None = None
    self._connected = threading.Event()
    self._all_done = threading.Event()
    self._condition = threading.Condition()  # Guards the three below.
    self._num_calls = 0  # Of should_end.
    self._signal: str | None = None
    self._end_at_call: int | None = None
    self._phase, self._step, self._on_device = "start", 0, False
    self._host_secs = 0.0
    self._phase_began = time.monotonic()

  def listen(self) -> int:
    """Opens the port of process 0 and returns it."""
    if socket.has_dualstack_ipv6():
      self._listening = socket.create_server(
        ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
      )
    else:
      self._listening = socket.create_server(("", 0), backlog=4096)
    return self._listening.getsockname()[1]

  def connect(
    self, host: str, port: int, *, secret: str, timeout_secs: float
  ) -> None:
    """Connects to process 0's hub.

    Args:
      host: host of process 0.

    Raises:
      OSError: process 0 cannot be reached.
    """
    self._secret = secret
    failure: list[OSError] = []
    threading.Thread(
      target=self._run, args=(host, port, failure), name="job", daemon=True
    ).start()
    if not self._connected.wait(timeout_secs):
      raise OSError(f"no answer within {timeout_secs:g} s")
    if failure:
      raise failure[0]

  def _run(self, host: str, port: int, failure: list[OSError]) -> None:
    try:
      self._loop.run_until_complete(self._communicate(host, port))
    except OSError as e:
      failure.append(e)
      self._connected.set()

  async def _communicate(self, host: str, port: int) -> None:
    if self._listening is not None:
      job_hub = hub.Hub(
        self.count, self._secret, self._heartbeat_secs, self._report_secs
      )
      serving = asyncio.ensure_future(job_hub.serve(self._listening))
      serving.add_done_callback(lambda _: None)  # Keeps a reference to it.
    reader, self._writer = await asyncio.open_connection(
      host, port, limit=LINE_BYTES
    )
    self._send(
      secret=self._secret,
      index=self.index,
      host=socket.gethostname(),
      pid=os.getpid(),
    )
    self._silent_secs = 0.0
    heartbeats = asyncio.ensure_future(self._send_heartbeats())
    self._connected.set()
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        self._silent_secs = 0.0
        self._receive(json.loads(line))
    heartbeats.cancel()
    if not self._all_done.is_set():
      self._end(
        EXIT_LOST, "process 0 disconnected without an error, perhaps killed"
      )

  async def _send_heartbeats(self) -> None:
    last = time.monotonic()
    while True:
      self._send(
        kind="heartbeat",
        phase=self._phase,
        step=self._step,
        on_device=self._on_device,
        host_secs=self._host_secs,
      )
      await asyncio.sleep(HEARTBEAT_SECS)
      now = time.monotonic()
      self._silent_secs += min(now - last, 2 * HEARTBEAT_SECS)
      last = now
      if self._silent_secs > self._heartbeat_secs:
        self._end(
          EXIT_LOST,
          f"process 0 sent no heartbeat for {self._heartbeat_secs:g} s "
          "(config.cluster.heartbeat_secs): it was stopped, or the network is "
          "down",
        )

  def _send(self, **message: Any) -> None:
    with contextlib.suppress(OSError):
      self._writer.write(json.dumps(message).encode() + b"\n")

  def _send_from_thread(self, **message: Any) -> None:
    """Like `_send`, from any thread."""
    self._loop.call_soon_threadsafe(lambda: self._send(**message))

  def _receive(self, message: dict[str, Any]) -> None:
    kind = message["kind"]
    if kind == "end":
      # The others must have read it before process 0 and its hub are gone.
      delay = _FAREWELL_SECS if self.index == 0 else 0.0
      self._loop.call_later(delay, self._obey, message)
    elif kind == "all_done":
      self._all_done.set()
    elif kind == "signal":
      with self._condition:
        self._signal = message["reason"]
        self._send(kind="calls", calls=self._num_calls)
    elif kind == "end_at_call":
      with self._condition:
        self._end_at_call = message["call"]
        self._condition.notify_all()

  def _obey(self, message: dict[str, Any]) -> None:
    if message["hang"]:
      self._on_hang()
    self._end(message["code"], message["reason"])

  def _end(self, code: int, reason: str) -> NoReturn:
    """Ends this process, even if its main thread waits forever."""
    for release in self._on_abrupt_end:
      thread = threading.Thread(target=release, daemon=True)
      thread.start()
      thread.join(2.0)
    prefix = "preempted" if code == 75 else "error"
    # Straight to the descriptor: a hung thread may hold the stream's lock. When
    # process 0 is gone, jax's own threads report errors too: silence them, so
    # that this is the last line.
    stderr = sys.__stderr__.fileno()
    log = os.dup(stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), stderr)
    os.write(log, f"{prefix}: {reason}\n".encode())
    os._exit(code)

  def on_abrupt_end(self, release: Callable[[], None]) -> None:
    """Calls `release` if another process makes this one end."""
    self._on_abrupt_end.append(release)

  def report_phase(self, phase: str, step: int) -> None:
    """Reports the current phase with the next heartbeat."""
    self._phase, self._step, self._on_device = phase, step, False
    self._phase_began = time.monotonic()

  def host_work_done(self) -> None:
    """Reports that the host's part of the step is done."""
    self._on_device = True
    self._host_secs += time.monotonic() - self._phase_began

  def report_signal(self, name: str) -> None:
    """Reports a signal; may be called in a signal handler."""
    self._send_from_thread(kind="signal", name=name)

  def should_end(self) -> bool:
    """Whether all processes end at this call, because one got a signal.

    Every process calls this equally often, at points where all of them could
    end; the answer to the n-th call is the same on all. After a signal a call
    blocks until process 0 knows how many calls each process has made and has
    chosen the one at which all end. No process has begun that call yet, so
    none waits on the device for one that has ended.
    """
    with self._condition:
      self._num_calls += 1
      while self._signal is not None and self._end_at_call is None:
        self._condition.wait(0.5)
      self.ending = (
        self._end_at_call is not None and self._num_calls >= self._end_at_call
      )
      return self.ending

  def require_equal(self, name: str, value: Any) -> None:
    """Ends all processes with code 2 if they pass different values.

    Returns at once. The n-th value of a name is compared with the n-th value
    of that name on the other processes.
    """
    self._send_from_thread(kind="equal", name=name, value=value)

  def fail(self, code: int, reason: str, *, hang: bool = False) -> None:
    """Reports that this process fails, which ends all processes.

    Process 0 then ends all of them, this one included: with the code and the
    reason of the process that failed first. Returns only if process 0 does not
    answer.

    Args:
      hang: whether this process hangs: then all write their stacks, and the
        reason names the process that holds up the others.
    """
    self.failed = True
    if code == EXIT_LOST and not hang:
      time.sleep(_CULPRIT_SECS)
    self._send_from_thread(kind="fail", code=code, reason=reason, hang=hang)
    time.sleep(_ANSWER_SECS)

  def fail_now(self, code: int, reason: str) -> None:
    """Like `fail`, but does not wait for the answer; for signal handlers."""
    self._send_from_thread(kind="fail", code=code, reason=reason, hang=False)
    time.sleep(_FAREWELL_SECS)

  def close(self, timeout_secs: float = 60.0) -> None:
    """Waits until all processes are done, so that none leaves too early."""
    self._send_from_thread(kind="done")
    if not self._all_done.wait(timeout_secs):
      logging.warning("Not all processes were done in %g s.", timeout_secs)
    if self.index == 0:
      time.sleep(_FAREWELL_SECS)
