"""The channel between the processes of a job.

Every process keeps one TCP connection to process 0 (hub.py), served by a thread
of its own. It uses neither jax's runtime nor the devices, so it works while
devices train, in any thread, and while the main thread waits in a collective
for a process that is gone. Messages are lines of JSON.
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
# How long a process that fails waits before it reports that. If another one is
# killed, the collectives of all others fail within milliseconds, and the loss
# of the killed one should be known first.
_CULPRIT_SECS = 1.5
# How long process 0 stays after its last message, so that all can read it.
_FAREWELL_SECS = 0.5
_ANSWER_SECS = 5.0

_Topic = tuple[str, int]  # Name and number of an exchange.
_Posts = dict[tuple[str, int], Any]


class JobError(RuntimeError):
  """The processes of a job cannot join, or their common work failed."""


class Channel:
  """This process's end of the channel; alone until it has joined a job.

  Exchanges of one name are made in the same order on all processes; those of
  different names may overlap, so threads use names of their own. Values are
  JSON.

  Attributes:
    secret: known to the job's processes only.
    host: address of this host for the other processes; "" on process 0.
    first_host: address of process 0's host for this process.
    ending: whether all processes have agreed to end (see `should_end`).
    failed: whether this process has reported its failure.
  """

  def __init__(self) -> None:
    self.index, self.count = 0, 1
    self.secret = secrets.token_hex(16)
    self.host = self.first_host = ""
    self.ending = False
    self.failed = False
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
    self._phase, self._step, self._on_device = "start", 0, False
    self._host_secs = 0.0
    self._phase_began = time.monotonic()

  # Joining.

  @property
  def joined(self) -> bool:
    """Whether this process runs with others."""
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
    """Waits for all processes of the job.

    Args:
      addresses: host and port of process 0; tried in turn if there are several.
      listening: port of process 0, on process 0, if it is open already.
      check: called while waiting; raises to stop.

    Raises:
      JobError: some processes did not join, two have the same index, or
        process 0 cannot listen on its port.
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

  # Messages.

  async def _receive_all(self, reader: asyncio.StreamReader) -> None:
    self._silent_secs = 0.0
    heartbeats = asyncio.ensure_future(self._send_heartbeats())
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        self._silent_secs = 0.0
        self._receive(json.loads(line))
    heartbeats.cancel()
    if not self._closed:
      self._end(
        hub.EXIT_LOST, "process 0 disconnected without an error, perhaps killed"
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
      await asyncio.sleep(hub.HEARTBEAT_SECS)
      now = time.monotonic()
      # If this process itself was stopped for long, process 0 was not silent.
      self._silent_secs += min(now - last, 2 * hub.HEARTBEAT_SECS)
      last = now
      if self._silent_secs > self._heartbeat_secs:
        self._end(
          hub.EXIT_LOST,
          f"process 0 sent no heartbeat for {self._heartbeat_secs:g} s "
          "(config.cluster.heartbeat_secs): it was stopped, or the network is "
          "down",
        )

  def _send(self, **message: Any) -> None:
    """Sends a message to the hub, from any thread; none if alone."""
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

  # Exchanges.

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
    """Returns process 0's value; waits for process 0 only, for no device."""
    topic = self._begin(name)
    if self.index == 0:
      self._post(topic, "value", value)
    else:
      value = self._wait(topic, bool)["value", 0]
    self._forget(topic)
    return value

  def require_equal(self, name: str, value: Any) -> None:
    """Ends all processes with code 2 if they pass different values.

    Returns at once, before the others have called it.
    """
    if self.joined:
      topic = self._begin(name)
      self._gather(topic, value, equal=True)
      self._forget(topic)

  def event(self, name: str, timeout_secs: float = 1800.0) -> "Event":
    """Returns the next event of this name."""
    return Event(self, self._begin(name), timeout_secs)

  def _begin(self, name: str) -> _Topic:
    jax = sys.modules.get("jax")
    if self.count == 1 and jax is not None and jax.process_count() > 1:
      raise JobError(
        f"jax runs in {jax.process_count()} processes that have not joined: "
        "call bigtrain.cluster.process.join_job on all of them."
      )
    with self._condition:
      topic = name, self._num_exchanges[name]
      self._num_exchanges[name] += 1
      self._posts.setdefault(topic, {})  # Others may have begun earlier.
      return topic

  def _post(
    self, topic: _Topic, what: str, value: Any, to: int | None = None
  ) -> None:
    """Sends a part of an exchange to one process or all, this one included."""
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
    """Returns what was posted once it is `ready`, or when the time is up."""
    with self._condition:
      posts = self._posts.setdefault(topic, {})
      self._condition.wait_for(lambda: ready(posts), timeout_secs)
      return dict(posts)

  def _forget(self, topic: _Topic) -> None:
    with self._condition:
      self._posts.pop(topic, None)

  # Progress.

  def report_phase(self, phase: str, step: int) -> None:
    """Reports the current phase with the next heartbeat."""
    self._phase, self._step, self._on_device = phase, step, False
    self._phase_began = time.monotonic()

  def host_work_done(self) -> None:
    """Reports that the host's part of the step is done; the device's begins.

    The device's part needs all hosts. The time up to here is host work, and a
    host that takes longer than the others is a straggler.
    """
    self._on_device = True
    self._host_secs += time.monotonic() - self._phase_began

  # The end.

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
    """Reports a signal; may be called in a signal handler."""
    self._send(kind="signal", name=name)

  def should_end(self) -> bool:
    """Whether all processes end at this call, because one got a signal.

    Every process calls this equally often, at points where all of them could
    end; the answer to the n-th call is the same on all. After a signal a call
    blocks until it is known how many calls each process has made. All end at
    the next one, which none has begun, so none waits on the device for one
    that has ended.
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
    """Reports that this process fails, which ends all processes.

    Process 0 then ends all of them, this one included: with the code and the
    reason of the process that failed first. Returns only if process 0 does not
    answer.

    Args:
      hang: whether this process hangs: then all write their stacks, and the
        reason names the process that holds up the others.
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

  Each process does its part and calls `done`. Process 0 waits for all,
  finishes the work and calls `succeed`; the others `wait`. Any process may
  `fail`, which the others notice at once: then all that waits raises JobError.
  """

  def __init__(self, channel: Channel, topic: _Topic, timeout_secs: float):
    """Use `Channel.event`."""
    self._channel = channel
    self._topic = topic
    self._timeout_secs = timeout_secs
    self._succeeded = False

  def wait_for_first(self) -> None:
    """Waits until process 0 calls this; process 0 does not wait."""
    if self._channel.index == 0:
      self._channel._post(self._topic, "begun", True)
    else:
      self._wait("begun", [0])

  def done(self, result: Any = None) -> None:
    """Reports that this process has done its part, with a JSON result."""
    self._channel._post(self._topic, "done", result, to=0)

  def wait_for_all(self) -> list[Any]:
    """Returns, on process 0, the results of all processes' parts."""
    return self._wait("done", range(self._channel.count))

  def succeed(self) -> None:
    """Reports, on process 0, that the whole work is done."""
    self._channel._post(self._topic, "success", True)
    self._succeeded = True
    self.forget()

  def fail(self, reason: str) -> None:
    """Reports that this process failed, unless the event has succeeded."""
    if not self._succeeded:
      index, host = self._channel.index, socket.gethostname()
      reason = f"process {index} on host {host}: {reason}"
      self._channel._post(self._topic, "failure", reason)

  def wait(self) -> None:
    """Waits, on any process but 0, until the event has succeeded."""
    self._wait("success", [0])

  def check(self) -> bool:
    """Whether the event has succeeded; raises JobError if it has failed."""
    self._wait("success", [])
    return self._succeeded

  def forget(self) -> None:
    """Frees the memory of an event that no process uses."""
    self._channel._forget(self._topic)

  def _wait(self, what: str, indices: Iterable[int]) -> list[Any]:
    """Returns what these processes posted, unless the event ends first."""
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
    elif absent := [
      index for what, index in keys if (what, index) not in posts
    ]:
      raise JobError(
        f"process(es) {absent} not done after {self._timeout_secs:g} s."
      )
    return [posts[key] for key in keys if key in posts]


def tpu_clusters() -> Sequence[Any]:
  """jax's detectors of Cloud TPU slices, which have no public name."""
  from jax._src import clusters

  return clusters.GkeTpuCluster, clusters.GceTpuCluster
