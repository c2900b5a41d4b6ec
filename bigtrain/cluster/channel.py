"""The channel between the processes of a job.

Every process keeps one TCP connection to process 0 (hub.py), served by a thread
of its own without jax's runtime, so it works while the main thread waits in a
collective for a process that is gone. Messages are lines of JSON.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from bigtrain.cluster import hub

_POLL_SECS = 0.2
_CONNECT_SECS = 10.0
# A process waits before it reports its failure: if another one was killed, the
# collectives of all fail, and its loss should be known first.
_CULPRIT_SECS = 1.5
_FAREWELL_SECS = 0.5  # Process 0 stays, so that all can read its last message.
_ANSWER_SECS = 5.0

_Topic = tuple[str, int]  # Name and number of an exchange.
_Posts = dict[tuple[str, int], Any]


class JobError(RuntimeError):
  """The processes of a job cannot join, or their common work failed."""


class Channel:
  """This process's end of the channel; alone until it has joined a job.

  Exchanges of one name are made in the same order on all processes; threads
  use names of their own. Values are JSON.
  """

  def __init__(self) -> None:
    self.index, self.count = 0, 1
    self.secret = secrets.token_hex(16)  # Known to the job's processes only.
    self.host = ""  # This host, for the other processes; "" on process 0.
    self.first_host = ""  # Process 0's host, for this process.
    self.ending = False  # All processes have agreed to end: `should_end`.
    self.failed = False  # This process has reported its failure.
    self._loop: asyncio.AbstractEventLoop | None = None
    self._writer: asyncio.StreamWriter | None = None
    self._heartbeat_secs = 0.0
    self._settled = threading.Event()  # It has joined, or cannot.
    self._failure: BaseException | None = None
    self._closed = False
    self._on_hang: Callable[[], Any] = lambda: None
    self._on_abrupt_end: list[Callable[[], None]] = []
    self._condition = threading.Condition()  # Guards the three below.
    self._num_exchanges: dict[str, int] = collections.defaultdict(int)
    # For each exchange that is not over: {(kind, process): value}.
    self._posts: dict[_Topic, _Posts] = {}
    self._num_calls = 0  # Of should_end.
    self._signalled = False  # Whether some process got a signal.
    self._progress: dict[str, Any] = {"host_secs": 0.0}
    self.report_phase("start", 0)

  @property
  def joined(self) -> bool:
    return self._settled.is_set() and self._failure is None

  def join(
    self,
    addresses: Sequence[tuple[str, int]],
    index: int,
    count: int,
    times: hub.Times,
    *,
    listening: socket.socket | None = None,
    check: Callable[[], None] = lambda: None,
  ) -> None:
    """Waits for all processes of the job; JobError if they cannot join.

    `addresses` of process 0 are tried in turn; on process 0, `listening` is its
    open port. `check` is called while waiting and raises to stop.
    """
    job_hub = None
    if index == 0:
      port = addresses[0][1]
      try:
        listening = listening or hub.listen(port)
      except OSError as e:
        raise JobError(
          f"process 0 cannot listen on port {port}: {e.strerror or e}; is "
          "another job using it?"
        ) from e
      addresses = [("localhost", port)]
      job_hub = hub.Hub(count, self.secret, times)
    self.index, self.count = index, count
    self._heartbeat_secs = times.heartbeat_secs
    self._settled.clear()
    self._failure = None

    async def communicate() -> None:
      self._loop = asyncio.get_running_loop()
      serving = None  # Named, since the loop does not keep it alive.
      if job_hub is not None and listening is not None:
        serving = asyncio.ensure_future(job_hub.serve(listening))
      reader = await self._meet(addresses, times.join_secs)
      self._settled.set()
      await self._receive_all(reader)
      del serving

    def run() -> None:
      try:
        asyncio.run(communicate())
      except RuntimeError as e:  # JobError, or the loop was stopped.
        if self.joined:
          raise
        self._failure = e
        self._settled.set()

    threading.Thread(target=run, name="job", daemon=True).start()
    try:
      while not self._settled.wait(_POLL_SECS):
        check()
    except BaseException:
      if self._loop is not None:
        self._loop.call_soon_threadsafe(self._loop.stop)
      raise
    if self._failure is not None:
      self.index, self.count = 0, 1
      raise self._failure

  async def _meet(
    self, addresses: Sequence[tuple[str, int]], join_secs: float
  ) -> asyncio.StreamReader:
    """Connects to process 0 and waits until all others have, too."""
    deadline = time.monotonic() + join_secs
    problem = ""
    for host, port in itertools.cycle(addresses):
      if time.monotonic() > deadline:
        break
      try:
        connecting = asyncio.open_connection(host, port, limit=hub.LINE_BYTES)
        reader, writer = await asyncio.wait_for(connecting, _CONNECT_SECS)
        self._writer = writer
        problem = "it closed the connection"  # Perhaps it is being restarted.
        name, pid = socket.gethostname(), os.getpid()
        self._send(index=self.index, count=self.count, host=name, pid=pid)
        # Process 0 may have begun to wait a little later.
        limit = max(0.0, deadline - time.monotonic()) + 10
        line = await asyncio.wait_for(reader.readline(), limit)
        answer = json.loads(line)
      except OSError as e:
        problem = str(e) or "no answer"
      except ValueError:
        writer.close()
      else:
        if answer["kind"] != "welcome":
          raise JobError(answer["reason"])
        self.secret = answer["secret"]
        self.first_host = host
        if self.index:
          self.host = writer.get_extra_info("sockname")[0]
        return reader
      await asyncio.sleep(_POLL_SECS)
    host, port = addresses[0]
    raise JobError(
      f"process {self.index}: no process 0 at {host}:{port} within "
      f"{join_secs:g} s (config.cluster.join_secs): {problem}; is the port "
      "open between the hosts?"
    )

  async def _receive_all(self, reader: asyncio.StreamReader) -> None:
    self._silent_secs = 0.0
    heartbeats = asyncio.ensure_future(self._send_heartbeats())
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        self._silent_secs = 0.0
        self._receive(json.loads(line))
    heartbeats.cancel()
    if not self._closed:
      reason = "process 0 disconnected without an error, perhaps killed"
      self._end(hub.EXIT_LOST, reason)

  async def _send_heartbeats(self) -> None:
    last = time.monotonic()
    while True:
      self._send(kind="heartbeat", progress=self._progress)
      await asyncio.sleep(hub.HEARTBEAT_SECS)
      now = time.monotonic()
      # If this process itself was stopped for long, process 0 was not silent.
      self._silent_secs += min(now - last, 2 * hub.HEARTBEAT_SECS)
      last = now
      if self._silent_secs > self._heartbeat_secs:
        self._end(
          hub.EXIT_LOST,
          f"process 0 sent no heartbeat for {self._heartbeat_secs:g} s "
          "(config.cluster.heartbeat_secs): stopped, or the network is down",
        )

  def _send(self, **message: Any) -> None:
    line = json.dumps(message).encode() + b"\n"
    if self._loop is not None:
      self._loop.call_soon_threadsafe(self._write, line)

  def _write(self, line: bytes) -> None:
    if self._writer is not None:
      with contextlib.suppress(OSError):
        self._writer.write(line)

  def _receive(self, message: dict[str, Any]) -> None:
    kind = message["kind"]
    if kind == "post":
      name, number = message["topic"]
      what, index, value = message["what"], message["index"], message["value"]
      # Here and not in `close`: process 0 may leave before that goes on.
      self._closed |= name == hub.CLOSING
      self._store((name, number), what, index, value)
    elif kind == "end":
      # The others must have read it before process 0 and its hub are gone.
      delay = _FAREWELL_SECS if self.index == 0 else 0.0
      asyncio.get_running_loop().call_later(delay, self._obey, message)
    elif kind == "signal":
      with self._condition:
        self._signalled = True
        self._gather(("calls", 0), self._num_calls)

  def gather(self, value: Any, name: str = "gather") -> list[Any]:
    """Returns the values of all processes, by process; a barrier."""
    topic = self._begin(name)
    if self.count == 1:
      self._forget(topic)
      return [value]
    self._gather(topic, value)
    posts = self._wait(topic, bool)
    self._forget(topic)
    return posts["values", 0]

  def _gather(self, topic: _Topic, value: Any, equal: bool = False) -> None:
    self._send(kind="gather", topic=topic, value=value, equal=equal)

  def broadcast(self, value: Any, name: str = "broadcast") -> Any:
    """Returns process 0's value; waits for process 0 only."""
    topic = self._begin(name)
    if self.index == 0:
      self._post(topic, "value", value)
    else:
      value = self._wait(topic, bool)["value", 0]
    self._forget(topic)
    return value

  def require_equal(self, name: str, value: Any) -> None:
    """Ends all processes with code 2 if values differ; does not wait."""
    if self.joined:
      topic = self._begin(name)
      self._gather(topic, value, equal=True)
      self._forget(topic)

  def event(self, name: str, timeout_secs: float = 1800.0) -> "Event":
    return Event(self, self._begin(name), timeout_secs)

  def _begin(self, name: str) -> _Topic:
    jax = sys.modules.get("jax")
    if self.count == 1 and jax is not None and jax.process_count() > 1:
      raise JobError(
        "jax's processes have not joined: call "
        "bigtrain.cluster.process.join_job on all of them."
      )
    with self._condition:
      topic = name, self._num_exchanges[name]
      self._num_exchanges[name] += 1
      self._posts.setdefault(topic, {})  # Others may have begun earlier.
      return topic

  def _post(
    self, topic: _Topic, what: str, value: Any, to: int | None = None
  ) -> None:
    if self.count == 1:
      self._store(topic, what, 0, value)
    else:
      self._send(kind="post", topic=topic, what=what, value=value, to=to)

  def _store(self, topic: _Topic, what: str, index: int, value: Any) -> None:
    name, number = topic
    with self._condition:
      if topic in self._posts or number >= self._num_exchanges[name]:
        self._posts.setdefault(topic, {}).setdefault((what, index), value)
        self._condition.notify_all()

  def _wait(
    self,
    topic: _Topic,
    ready: Callable[[_Posts], bool],
    timeout_secs: float | None = None,
  ) -> _Posts:
    with self._condition:
      posts = self._posts.setdefault(topic, {})
      self._condition.wait_for(lambda: ready(posts), timeout_secs)
      return dict(posts)

  def _forget(self, topic: _Topic) -> None:
    with self._condition:
      self._posts.pop(topic, None)

  def report_phase(self, phase: str, step: int) -> None:
    self._progress |= dict(phase=phase, step=step, on_device=False)
    self._phase_began = time.monotonic()

  def host_work_done(self) -> None:
    """Ends the host's part of a step; what takes longer is a straggler."""
    self._progress["on_device"] = True
    self._progress["host_secs"] += time.monotonic() - self._phase_began

  def on_hang(self, report: Callable[[], Any]) -> None:
    """Calls `report` before the end if any process of the job hangs."""
    self._on_hang = report

  def on_abrupt_end(self, release: Callable[[], None]) -> None:
    """Calls `release` if another process makes this one end."""
    self._on_abrupt_end.append(release)

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
    log = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(log, f"{prefix}: {reason}\n".encode())
    os._exit(code)

  def report_signal(self, name: str) -> None:
    self._send(kind="signal", name=name)

  def should_end(self) -> bool:
    """Whether all processes end at this call, because one got a signal.

    Every process calls this equally often, and the n-th answer is the same on
    all: after a signal a call blocks until it is known how many calls each
    process has made, and all end at the next one, which none has begun.
    """
    with self._condition:
      self._num_calls += 1
      if self._signalled:
        num_calls = self._wait(("calls", 0), bool)["values", 0]
        self.ending = self._num_calls > max(num_calls)
      return self.ending

  def fail(
    self,
    code: int,
    reason: str,
    *,
    hang: bool = False,
    answer_secs: float = _ANSWER_SECS,
  ) -> None:
    """Makes process 0 end all processes, with the first failure's reason.

    Returns only if process 0 does not answer. After a `hang` all write their
    stacks, and the reason names the laggard.
    """
    self.failed = True
    if code == hub.EXIT_LOST and not hang:
      time.sleep(_CULPRIT_SECS)
    self._send(kind="fail", code=code, reason=reason, hang=hang)
    time.sleep(answer_secs)

  def close(self) -> None:
    """Waits until all processes are done, so that none leaves too early."""
    self.gather(None, hub.CLOSING)
    if self.index == 0:
      time.sleep(_FAREWELL_SECS)


class Event:
  """Work that succeeds or fails on all processes together.

  Each process calls `done`; process 0 waits for all and calls `succeed`; the
  others `wait`. If any process calls `fail`, all that waits raises JobError.
  """

  def __init__(self, channel: Channel, topic: _Topic, timeout_secs: float):
    self._channel, self._topic = channel, topic
    self._timeout_secs = timeout_secs
    self._succeeded = False

  def wait_for_first(self) -> None:
    """Waits until process 0 calls this; process 0 does not wait."""
    if self._channel.index == 0:
      self._channel._post(self._topic, "begun", True)
    else:
      self._wait("begun", [0])

  def done(self, result: Any = None) -> None:
    self._channel._post(self._topic, "done", result, to=0)

  def wait_for_all(self) -> list[Any]:
    """Returns, on process 0, the results of all processes' parts."""
    return self._wait("done", range(self._channel.count))

  def succeed(self) -> None:
    self._channel._post(self._topic, "success", True)
    self._succeeded = True
    self.forget()

  def fail(self, reason: str) -> None:
    if not self._succeeded:
      index, host = self._channel.index, socket.gethostname()
      reason = f"process {index} on host {host}: {reason}"
      self._channel._post(self._topic, "failure", reason)

  def wait(self) -> None:
    self._wait("success", [0])

  def check(self) -> bool:
    """Whether the event has succeeded; raises JobError if it has failed."""
    self._wait("success", [])
    return self._succeeded

  def forget(self) -> None:
    self._channel._forget(self._topic)

  def _wait(self, what: str, indices: Iterable[int]) -> list[Any]:
    if self._succeeded:
      return []
    keys = [(what, index) for index in indices]
    failed = lambda posts: [posts[key] for key in posts if key[0] == "failure"]
    posts = self._channel._wait(
      self._topic,
      lambda posts: bool(failed(posts)) or posts.keys() >= set(keys),
      self._timeout_secs,
    )
    if ("success", 0) in posts:
      self._succeeded = True
      self.forget()
    elif failed(posts):
      raise JobError(failed(posts)[0])
    elif absent := [key[1] for key in keys if key not in posts]:
      secs = self._timeout_secs
      raise JobError(f"process(es) {absent} not done after {secs:g} s.")
    return [posts[key] for key in keys if key in posts]


def tpu_clusters() -> Sequence[Any]:
  """jax's detectors of Cloud TPU slices, which have no public name."""
  from jax._src import clusters

  return clusters.GkeTpuCluster, clusters.GceTpuCluster
