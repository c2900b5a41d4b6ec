"""The channel between the processes of a job.

Every process has one TCP connection to process 0 (hub.py). A separate thread
serves it without jax's runtime, so it works even while the main thread waits in
a collective for a process that is gone. Messages are lines of JSON.

The channel has four uses:

  exchanges   `gather`, `broadcast`, `require_equal` and `Event`. An exchange
              has a topic (a name and a number) and consists of posts.
  health      heartbeats with each process's progress. A process that is silent
              or disconnects ends the job; stragglers are logged.
  failures    `fail` makes process 0 end all processes with one reason.
  signals     `should_end` makes all processes end at the same step.
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
# Delay before a process reports that its work failed. If another process was
# killed, the collectives of all others fail at once, and the hub should notice
# the killed one first, because that is the reason to report.
_CULPRIT_SECS = 1.5
_FAREWELL_SECS = 0.5  # Process 0 stays, so that all can read its last message.
_ANSWER_SECS = 5.0  # Time for process 0 to end this process after a failure.

_Topic = tuple[str, int]  # Name and number of an exchange.
# Posts of processes in an exchange: {(kind of post, process): value}.
_Posts = dict[tuple[str, int], Any]


class JobError(RuntimeError):
  """The processes of a job cannot join, or their common work failed."""


class Channel:
  """This process's end of the channel. Until it joins a job, it is alone.

  All processes make the exchanges with a given name in the same order, and no
  two threads use the same name. Values are JSON.
  """

  def __init__(self) -> None:
    self.index = 0
    self.count = 1
    self.secret = secrets.token_hex(16)  # Only the job's processes know it.
    self.host = ""  # This host, as others can reach it; "" on process 0.
    self.first_host = ""  # Process 0's host, as this process reaches it.
    self.ending = False  # Whether all processes have agreed to end.
    self.failed = False  # Whether this process has reported a failure.
    self._loop: asyncio.AbstractEventLoop | None = None
    self._writer: asyncio.StreamWriter | None = None
    self._heartbeat_secs = 0.0
    self._settled = threading.Event()  # Set when it has joined, or cannot.
    self._failure: BaseException | None = None
    self._closed = False
    self._on_hang: Callable[[], Any] = lambda: None
    self._on_abrupt_end: list[Callable[[], None]] = []
    self._condition = threading.Condition()  # Guards the next four.
    self._num_exchanges: dict[str, int] = collections.defaultdict(int)
    self._posts: dict[_Topic, _Posts] = {}  # Of exchanges that are not over.
    self._num_calls = 0  # Number of calls of `should_end`.
    self._signalled = False  # Whether some process got a signal.
    self._progress: dict[str, Any] = {"host_secs": 0.0}
    self.report_phase("start", 0)

  @property
  def joined(self) -> bool:
    """Whether this process has joined a job of several."""
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
    """Joins a job, and waits for all its processes.

    Args:
      addresses: (host, port) pairs of process 0, which are tried in turn.
      index, count: this process's number, and the number of processes.
      times: config.cluster.
      listening: on process 0, the port if it is open already.
      check: called while waiting; it raises to give up.

    Raises:
      JobError: if the processes cannot join.
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
      serving = None  # A variable, because the loop does not keep it alive.
      if job_hub is not None and listening is not None:
        serving = asyncio.ensure_future(job_hub.serve(listening))
      reader = await self._meet(addresses, times.join_secs)
      self._settled.set()
      await self._receive_all(reader)
      del serving

    def run() -> None:
      try:
        asyncio.run(communicate())
      except RuntimeError as e:  # A JobError, or `check` stopped the loop.
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
        self._send(
          index=self.index,
          count=self.count,
          host=socket.gethostname(),
          pid=os.getpid(),
        )
        # Process 0 may have begun to wait a little later.
        limit = max(0.0, deadline - time.monotonic()) + 10
        line = await asyncio.wait_for(reader.readline(), limit)
        answer = json.loads(line)
      except OSError as e:
        problem = str(e) or "no answer"
      except ValueError:  # No JSON: another program answers there.
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
    """Receives messages until process 0 disconnects."""
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
      # If this process itself was stopped for a while, process 0 was not
      # silent.
      self._silent_secs += min(now - last, 2 * hub.HEARTBEAT_SECS)
      last = now
      if self._silent_secs > self._heartbeat_secs:
        self._end(
          hub.EXIT_LOST,
          f"process 0 sent no heartbeat for {self._heartbeat_secs:g} s "
          "(config.cluster.heartbeat_secs): stopped, or the network is down",
        )

  def _send(self, **message: Any) -> None:
    """Sends a message to process 0, from any thread."""
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
      # Here and not in `close`: process 0 may leave before that continues.
      self._closed |= name == hub.CLOSING
      self._store(
        (name, number), message["what"], message["index"], message["value"]
      )
    elif kind == "end":
      # The others must read the message before process 0 and its hub are gone.
      delay = _FAREWELL_SECS if self.index == 0 else 0.0
      asyncio.get_running_loop().call_later(delay, self._obey, message)
    elif kind == "signal":  # See `should_end`.
      with self._condition:
        self._signalled = True
        self._gather(("calls", 0), self._num_calls)

  def gather(self, value: Any, name: str = "gather") -> list[Any]:
    """Returns the values of all processes, in their order. It is a barrier."""
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
    """Returns process 0's value. It waits only for process 0."""
    topic = self._begin(name)
    if self.index == 0:
      self._post(topic, "value", value)
    else:
      value = self._wait(topic, bool)["value", 0]
    self._forget(topic)
    return value

  def require_equal(self, name: str, value: Any) -> None:
    """Ends all processes with code 2 if their values differ.

    It does not wait for the others.
    """
    if self.joined:
      topic = self._begin(name)
      self._gather(topic, value, equal=True)
      self._forget(topic)

  def event(self, name: str, timeout_secs: float = 1800.0) -> "Event":
    return Event(self, self._begin(name), timeout_secs)

  def _begin(self, name: str) -> _Topic:
    """Begins the next exchange of a name."""
    jax = sys.modules.get("jax")
    if self.count == 1 and jax is not None and jax.process_count() > 1:
      raise JobError(
        "jax's processes have not joined: call "
        "bigtrain.cluster.process.join_job on all of them."
      )
    with self._condition:
      topic = name, self._num_exchanges[name]
      self._num_exchanges[name] += 1
      # Other processes may have begun earlier, and posted something.
      self._posts.setdefault(topic, {})
      return topic

  def _post(
    self, topic: _Topic, what: str, value: Any, to: int | None = None
  ) -> None:
    """Posts a value to all processes, or to one."""
    if self.count == 1:
      self._store(topic, what, 0, value)
    else:
      self._send(kind="post", topic=topic, what=what, value=value, to=to)

  def _store(self, topic: _Topic, what: str, index: int, value: Any) -> None:
    """Keeps a post for `_wait`, unless its exchange is over."""
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
    """Waits until an exchange's posts are `ready`, or for `timeout_secs`."""
    with self._condition:
      posts = self._posts.setdefault(topic, {})
      self._condition.wait_for(lambda: ready(posts), timeout_secs)
      return dict(posts)

  def _forget(self, topic: _Topic) -> None:
    with self._condition:
      self._posts.pop(topic, None)

  def report_phase(self, phase: str, step: int) -> None:
    """Tells process 0, with the next heartbeat, what this process is doing."""
    self._progress |= dict(phase=phase, step=step, on_device=False)
    self._phase_began = time.monotonic()

  def host_work_done(self) -> None:
    """Ends the host's part of a step, which is timed to find stragglers."""
    self._progress["on_device"] = True
    self._progress["host_secs"] += time.monotonic() - self._phase_began

  def on_hang(self, report: Callable[[], Any]) -> None:
    """Registers `report`, which is called before the end if a process hangs."""
    self._on_hang = report

  def on_abrupt_end(self, release: Callable[[], None]) -> None:
    """Registers `release`, to be called if another process ends this one."""
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
    # Straight to the descriptor, because a hung thread may hold the stream's
    # lock. When process 0 is gone, jax's own threads report errors, too. They
    # are silenced, so that this is the last line.
    log = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(log, f"{prefix}: {reason}\n".encode())
    os._exit(code)

  def report_signal(self, name: str) -> None:
    """Tells all processes that this one got a signal."""
    self._send(kind="signal", name=name)

  def should_end(self) -> bool:
    """Whether all processes end at this call, because one of them got a signal.

    All processes call it equally often, and their n-th calls return the same
    answer. After a signal, a call blocks until all processes have reported how
    many calls they have begun. They all end at the first call that none has
    begun.
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
    """Makes process 0 end all processes, with the reason of the first failure.

    It returns only if process 0 does not answer within `answer_secs`. After a
    `hang`, all processes write their stacks, and the reason names the process
    that has fallen behind.
    """
    self.failed = True
    if code == hub.EXIT_LOST and not hang:
      time.sleep(_CULPRIT_SECS)
    self._send(kind="fail", code=code, reason=reason, hang=hang)
    time.sleep(answer_secs)

  def close(self) -> None:
    """Waits until all processes are done: one that leaves early looks lost."""
    self.gather(None, hub.CLOSING)
    if self.index == 0:
      time.sleep(_FAREWELL_SECS)


class Event:
  """Work that succeeds or fails on all processes together.

  Each process calls `done`. Process 0 waits for all of them (`wait_for_all`)
  and calls `succeed`; the others `wait`. If any process calls `fail`, every
  method that waits raises a JobError.
  """

  def __init__(self, channel: Channel, topic: _Topic, timeout_secs: float):
    self._channel, self._topic = channel, topic
    self._timeout_secs = timeout_secs
    self._succeeded = False

  def wait_for_first(self) -> None:
    """Waits until process 0 calls this too; process 0 itself does not wait."""
    if self._channel.index == 0:
      self._channel._post(self._topic, "begun", True)
    else:
      self._wait("begun", [0])

  def done(self, result: Any = None) -> None:
    """Sends process 0 the result of this process's part."""
    self._channel._post(self._topic, "done", result, to=0)

  def wait_for_all(self) -> list[Any]:
    """Returns the results of all processes' parts, on process 0."""
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
    """Waits for success."""
    self._wait("success", [0])

  def check(self) -> bool:
    """Whether the event has succeeded; raises JobError if it has failed."""
    self._wait("success", [])
    return self._succeeded

  def forget(self) -> None:
    self._channel._forget(self._topic)

  def _wait(self, what: str, indices: Iterable[int]) -> list[Any]:
    """Waits for posts of one kind from some processes; returns the values."""
    if self._succeeded:
      return []
    keys = [(what, index) for index in indices]

    def failures(posts: _Posts) -> list[str]:
      return [value for (kind, _), value in posts.items() if kind == "failure"]

    def is_ready(posts: _Posts) -> bool:
      return bool(failures(posts)) or posts.keys() >= set(keys)

    posts = self._channel._wait(self._topic, is_ready, self._timeout_secs)
    if ("success", 0) in posts:
      self._succeeded = True
      self.forget()
    elif failures(posts):
      raise JobError(failures(posts)[0])
    else:
      absent = [index for _, index in keys if (what, index) not in posts]
      if absent:
        raise JobError(
          f"process(es) {absent} not done after {self._timeout_secs:g} s."
        )
    return [posts[key] for key in keys if key in posts]


def tpu_clusters() -> Sequence[Any]:
  """jax's detectors of Cloud TPU slices, which have no public name."""
  from jax._src import clusters

  return clusters.GkeTpuCluster, clusters.GceTpuCluster
