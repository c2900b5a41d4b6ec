"""What the processes of a job tell each other while it runs, and end together.

Every process keeps a TCP connection to process 0 (hub.py), served by a thread
of its own. It does not go through jax's runtime or the devices, so it works
while the main thread waits in a collective for a process that is gone:

- a process that ends without a word, or is not heard of for `heartbeat_secs`,
  ends all of them, and each says which one it was;
- one that fails says why, and all end with its exit code;
- one that has other data than the rest ends all of them, too (`Job.same`);
- a signal that reaches any of them becomes one agreed moment (`Job.tick`);
- one that does more work on the host than the others is named in the log.

Messages are lines of JSON. A secret that only the job's processes know, and
that comes first, keeps others out.
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
from bigtrain.cluster.hub import BEAT_SECS, EXIT_GONE, LINE_BYTES

# How long a process that fails waits whether another failed first: where one
# is killed, the collectives of the others fail too, within milliseconds.
_CULPRIT_SECS = 1.5
# How long process 0 stays after its last word, so that all can read it, and
# how long a process that fails waits for that word.
_FAREWELL_SECS = 0.5
_ANSWER_SECS = 5.0


class Job:
  """The connection of this process, beside the hub if it is process 0.

  Attributes:
    index: of this process.
    count: of processes.
    agreed: whether all processes have agreed to end (see `tick`).
    failed: whether this process has said that it fails.
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
      index: of this process.
      count: of processes.
      heartbeat_secs: silence after which a process counts as gone.
      report_secs: between two looks for stragglers.
      on_hang: called before the end if some process hangs.
    """
    self.index = index
    self.count = count
    self.agreed = False
    self.failed = False
    self._secret = ""
    self._heartbeat_secs = heartbeat_secs
    self._report_secs = report_secs
    self._on_hang = on_hang
    self._at_abrupt_end: list[Callable[[], None]] = []
    self._loop = asyncio.new_event_loop()
    self._writer: Any = None
    self._listening: socket.socket | None = None
    self._connected = threading.Event()
    self._closed = threading.Event()
    self._turn = threading.Condition()
    self._ticks = 0
    self._hold: str | None = None
    self._target: int | None = None
    self._phase, self._step, self._on_device = "start", 0, False
    self._host_secs = 0.0
    self._since = time.monotonic()

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
    """Joins process 0's hub.

    Args:
      host: of process 0.
      port: what `listen` returned there.
      secret: the same on all processes, and known to nobody else.
      timeout_secs: how long to try.

    Raises:
      OSError: it cannot be reached.
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
      self._loop.run_until_complete(self._live(host, port))
    except OSError as e:
      failure.append(e)
      self._connected.set()

  async def _live(self, host: str, port: int) -> None:
    if self._listening is not None:
      made = hub.Hub(
        self.count, self._secret, self._heartbeat_secs, self._report_secs
      )
      serving = asyncio.ensure_future(made.serve(self._listening))
      serving.add_done_callback(lambda _: None)  # Else it would be collected.
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
    beating = asyncio.ensure_future(self._beat())
    self._connected.set()
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        self._silent_secs = 0.0
        self._heard(json.loads(line))
    beating.cancel()
    if not self._closed.is_set():
      self._end(EXIT_GONE, "process 0 is gone without a word, killed perhaps")

  async def _beat(self) -> None:
    last = time.monotonic()
    while True:
      self._send(
        kind="beat",
        phase=self._phase,
        step=self._step,
        on_device=self._on_device,
        host_secs=self._host_secs,
      )
      await asyncio.sleep(BEAT_SECS)
      now = time.monotonic()
      self._silent_secs += min(now - last, 2 * BEAT_SECS)
      last = now
      if self._silent_secs > self._heartbeat_secs:
        self._end(
          EXIT_GONE,
          f"process 0 has not been heard of for {self._heartbeat_secs:g} s "
          "(config.cluster.heartbeat_secs), stopped or cut off",
        )

  def _send(self, **message: Any) -> None:
    with contextlib.suppress(OSError):
      self._writer.write(json.dumps(message).encode() + b"\n")

  def _say(self, **message: Any) -> None:
    """As _send, from any thread."""
    self._loop.call_soon_threadsafe(lambda: self._send(**message))

  def _heard(self, message: dict[str, Any]) -> None:
    kind = message["kind"]
    if kind == "end":
      # The others must have heard it before process 0 and its hub are gone.
      delay = _FAREWELL_SECS if self.index == 0 else 0.0
      self._loop.call_later(delay, self._obey, message)
    elif kind == "closed":
      self._closed.set()
    elif kind == "hold":
      with self._turn:
        self._hold = message["reason"]
        self._send(kind="ticks", ticks=self._ticks)
    elif kind == "target":
      with self._turn:
        self._target = message["ticks"]
        self._turn.notify_all()

  def _obey(self, message: dict[str, Any]) -> None:
    if message["hang"]:
      self._on_hang()
    self._end(message["code"], message["reason"])

  def _end(self, code: int, reason: str) -> NoReturn:
    """Ends this process: its main thread may wait for what never comes."""
    for release in self._at_abrupt_end:
      thread = threading.Thread(target=release, daemon=True)
      thread.start()
      thread.join(2.0)
    word = "preempted" if code == 75 else "error"
    # Straight to the descriptor: a hung thread may hold the stream's lock.
    os.write(sys.__stderr__.fileno(), f"{word}: {reason}\n".encode())
    os._exit(code)

  def at_abrupt_end(self, release: Callable[[], None]) -> None:
    """Has `release` called if another process makes this one end."""
    self._at_abrupt_end.append(release)

  def at(self, phase: str, step: int) -> None:
    """What this process is doing, for what others say of it."""
    self._phase, self._step, self._on_device = phase, step, False
    self._since = time.monotonic()

  def dispatches(self) -> None:
    """The step is given to the device: the host's work for it is done."""
    self._on_device = True
    self._host_secs += time.monotonic() - self._since

  def signalled(self, name: str) -> None:
    """Says that a signal has come; may be called in a signal handler."""
    self._say(kind="signal", name=name)

  def tick(self) -> bool:
    """Whether all processes end at this call, because one got a signal.

    Every process calls it equally often, wherever they could end together: the
    answer to the n-th call is the same on all of them. Once a signal has come
    a call waits for the others' word how far they are. No process can wait
    for the device meanwhile in vain: the call that is agreed on is one that
    the foremost has not made.
    """
    with self._turn:
      self._ticks += 1
      while self._hold is not None and self._target is None:
        self._turn.wait(0.5)
      self.agreed = self._target is not None and self._ticks >= self._target
      return self.agreed

  def reason(self) -> str:
    """Which process got what signal."""
    return self._hold or ""

  def same(self, name: str, value: Any) -> None:
    """Says what must be the same on all processes; waits for none of them.

    Where it is not, all end with code 2. The n-th value of a name is compared
    with the n-th that the others say of it.

    Args:
      name: of what it is, in a config's words.
      value: anything that JSON has.
    """
    self._say(kind="same", name=name, value=value)

  def fail(self, code: int, reason: str, *, hang: bool = False) -> None:
    """Tells all that this process fails; they end with `code`, and say why.

    All end by process 0's word, this one too: where another failed first, with
    that one's code and reason. Returns only if that word does not come.

    Args:
      code: exit code for all.
      reason: one line.
      hang: this process hangs: who holds it up is added, and stacks written.
    """
    self.failed = True
    if code == EXIT_GONE and not hang:
      time.sleep(_CULPRIT_SECS)
    self._say(kind="fail", code=code, reason=reason, hang=hang)
    time.sleep(_ANSWER_SECS)

  def last_word(self, code: int, reason: str) -> None:
    """As `fail`, where there is no time; for signal handlers."""
    self._say(kind="fail", code=code, reason=reason, hang=False)
    time.sleep(_FAREWELL_SECS)

  def close(self, timeout_secs: float = 60.0) -> None:
    """Waits until all processes are done, so that none leaves too early."""
    self._say(kind="bye")
    if not self._closed.wait(timeout_secs):
      logging.warning("Not all processes were done in %g s.", timeout_secs)
    if self.index == 0:
      time.sleep(_FAREWELL_SECS)
