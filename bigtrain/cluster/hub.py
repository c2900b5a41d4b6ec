"""Process 0's end of the channel (channel.py).

The hub listens on the job's port until all processes have connected, and then
releases the port for jax. It passes messages on, collects the values of a
gather, and watches the processes: losing one ends the job, and slow ones are
logged.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import statistics
import time
from typing import Any, NamedTuple

EXIT_LOST = 1  # A process is lost or hangs.
EXIT_DIFFER = 2  # Processes have different configs or values.
CLOSING = "closing"  # The exchange in which all processes leave.

HEARTBEAT_SECS = 1.0
LINE_BYTES = 1 << 30  # Largest message.
_HELLO_SECS = 30.0  # Time for a connection to say who it is.
# A process is a straggler if its host work per step is more than this multiple
# of the median and more than this fraction of the step. Less would hardly slow
# the others down.
_STRAGGLER_RATIO = 2.0
_STRAGGLER_FRACTION = 0.2
_MAX_LISTED = 20  # Number of processes in a message.


class Times(NamedTuple):
  """Values of config.cluster, in seconds."""

  join_secs: float = 300.0  # Limit for all processes to join.
  heartbeat_secs: float = 30.0  # Silence after which a process counts as lost.
  straggler_secs: float = 60.0  # Between two checks for stragglers.


def listen(port: int = 0) -> socket.socket:
  """Opens a port of this host, by default any free one."""
  dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual else socket.AF_INET
  return socket.create_server(
    ("", port), family=family, dualstack_ipv6=dual, backlog=4096
  )


@dataclasses.dataclass(eq=False)
class Member:
  """A process of the job, as seen by process 0."""

  index: int
  host: str
  pid: int
  writer: asyncio.StreamWriter
  silent_secs: float = 0.0  # Since its last message.
  done: bool = False  # Whether it may disconnect.
  # Its progress, from heartbeats.
  phase: str = "start"
  step: int = 0
  on_device: bool = False  # Whether the host's part of the step is done.
  host_secs: float = 0.0  # Time of all its steps on the host.
  # (time, step, host_secs) at the last check for stragglers.
  last_check: tuple[float, int, float] = (0.0, 0, 0.0)

  def __str__(self) -> str:
    return f"process {self.index} (host {self.host}, pid {self.pid})"


class Hub:
  """Receives the messages of all processes; runs in process 0's event loop."""

  def __init__(self, count: int, secret: str, times: Times):
    self._count = count
    self._secret = secret
    self._times = times
    self._members: dict[int, Member] = {}
    self._settled = asyncio.Event()  # Set when all have joined, or cannot.
    self._problem = ""  # Why they cannot join.
    self._started = False  # Whether all have joined.
    self._ended = False  # Whether it has made all of them end.
    self._signalled = False  # Whether all know of a signal.
    # {(name, number): {process: value}} of gathers that not all have joined.
    self._gathered: dict[tuple[str, int], dict[int, Any]] = {}

  async def serve(self, listening: socket.socket) -> None:
    """Waits for all processes, then watches them while they run."""
    server = await asyncio.start_server(
      self._visit, sock=listening, limit=LINE_BYTES
    )
    try:
      await asyncio.wait_for(self._settled.wait(), self._times.join_secs)
    except TimeoutError:
      missing = sorted(set(range(self._count)) - self._members.keys())
      shown = ", ".join(map(str, missing[:_MAX_LISTED]))
      shown += ", ..." if len(missing) > _MAX_LISTED else ""
      self._refuse(
        f"{len(missing)} of {self._count} processes did not join within "
        f"{self._times.join_secs:g} s (config.cluster.join_secs): {shown}"
      )
    except asyncio.CancelledError:
      server.close()
      raise
    if self._problem:
      await asyncio.Event().wait()  # Tells late visitors about it, too.
    server.close()  # jax uses the port next.
    self._send_all({"kind": "welcome", "secret": self._secret})
    await self._watch()

  async def _visit(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    """Serves one connection, from its first message to its end."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
      hello = json.loads(await asyncio.wait_for(reader.readline(), _HELLO_SECS))
      member = Member(hello["index"], hello["host"], hello["pid"], writer)
      if self._admit(member, hello["count"]):
        await self._listen(member, reader)
    writer.close()

  def _admit(self, member: Member, count: int) -> bool:
    """Adds a process if it belongs to this job."""
    other = self._members.get(member.index)
    if count != self._count:
      self._refuse(
        f"{member} was started with num_processes={count}, process 0 with "
        f"{self._count}"
      )
    elif other:
      self._refuse(
        f"two processes have index {member.index}: {member} and {other}"
      )
    if self._problem:
      _send({"kind": "problem", "reason": self._problem}, member)
      return False
    self._members[member.index] = member
    if self._members.keys() == set(range(self._count)):
      self._started = True
      self._settled.set()
    return True

  def _refuse(self, problem: str) -> None:
    """Gives up waiting; the first problem is the one that is reported."""
    if not self._problem:
      self._problem = problem
      self._send_all({"kind": "problem", "reason": problem})
      self._settled.set()

  async def _listen(self, member: Member, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        member.silent_secs = 0.0
        self._receive(member, json.loads(line))
    if not self._started:
      del self._members[member.index]  # It may be started again.
    elif not member.done:
      self._end(
        EXIT_LOST,
        f"{member} disconnected without an error, perhaps killed; it was in "
        f"phase {member.phase!r} at step {member.step}",
      )

  def _receive(self, member: Member, message: dict[str, Any]) -> None:
    kind = message["kind"]
    if kind == "heartbeat":
      for name, value in message["progress"].items():
        setattr(member, name, value)
    elif kind == "post":
      message["index"] = member.index
      if message["to"] is None:
        self._send_all(message)
      else:
        _send(message, self._members[message["to"]])
    elif kind == "fail":
      member.done = True
      reason = f"{member}: {message['reason']}"
      if message["hang"]:
        reason += f"; {self._laggards()}"
      self._end(message["code"], reason, hang=message["hang"])
    elif kind == "gather":
      self._gather(member, message)
    elif kind == "signal" and not self._signalled:
      self._signalled = True
      self._send_all({"kind": "signal"})

  def _gather(self, member: Member, message: dict[str, Any]) -> None:
    """Adds a process's value; the last one completes the exchange."""
    name, number = message["topic"]
    topic = (name, number)
    if name == CLOSING:
      member.done = True
    by_process = self._gathered.setdefault(topic, {})
    value = message["value"]
    by_process[member.index] = value
    if message["equal"]:
      for index, other in by_process.items():
        if other != value:
          self._end(
            EXIT_DIFFER,
            f"the processes of this job differ in {name}: {member} has "
            f"{value}, {self._members[index]} has {other}",
          )
    if len(by_process) == self._count:
      del self._gathered[topic]
      if not message["equal"]:
        values = [by_process[index] for index in range(self._count)]
        self._send_all(
          {
            "kind": "post",
            "topic": topic,
            "what": "values",
            "index": 0,
            "value": values,
          }
        )

  def _laggards(self) -> str:
    """Names the processes that are behind the others, after a hang."""
    positions = {m: (m.step, m.on_device) for m in self._members.values()}
    last, first = min(positions.values()), max(positions.values())
    if last == first:
      return f"all processes are at step {last[0]}"
    late = [m for m, position in positions.items() if position == last]
    others = "wait for it on the device" if last[0] == first[0] else "are"
    return (
      f"the laggard is {', '.join(str(m) for m in late)}, at step {last[0]} in "
      f"phase {late[0].phase!r}, while others {others} at step {first[0]}"
    )

  def _end(self, code: int, reason: str, hang: bool = False) -> None:
    """Tells all processes to end; only the first reason is used."""
    if not self._ended:
      self._ended = True
      end = {"kind": "end", "code": code, "reason": reason, "hang": hang}
      self._send_all(end)

  def _send_all(self, message: dict[str, Any]) -> None:
    _send(message, *self._members.values())

  async def _watch(self) -> None:
    """Sends heartbeats, and checks those of the processes."""
    last = checked = time.monotonic()
    while True:
      await asyncio.sleep(HEARTBEAT_SECS)
      now = time.monotonic()
      # If this process itself was stopped for a while, the others were not
      # silent.
      passed = min(now - last, 2 * HEARTBEAT_SECS)
      last = now
      self._send_all({"kind": "heartbeat"})
      for member in self._members.values():
        member.silent_secs += passed
        if not member.done and member.silent_secs > self._times.heartbeat_secs:
          self._end(
            EXIT_LOST,
            f"{member} sent no heartbeat for {self._times.heartbeat_secs:g} s "
            "(config.cluster.heartbeat_secs): it was stopped, or its network "
            f"is down; it was in phase {member.phase!r} at step {member.step}",
          )
      if now - checked > self._times.straggler_secs:
        checked = now
        for line in self._stragglers(now):
          logging.warning("%s", line)

  def _stragglers(self, now: float) -> list[str]:
    """Lines about the processes that were slow since the last check."""
    # Seconds per step, by process: on the host, and in all.
    host_secs: dict[int, float] = {}
    all_secs: dict[int, float] = {}
    for member in self._members.values():
      then, old_step, old_host_secs = member.last_check
      member.last_check = (now, member.step, member.host_secs)
      if 0 < old_step < member.step:
        num_steps = member.step - old_step
        own_secs = member.host_secs - old_host_secs
        host_secs[member.index] = own_secs / num_steps
        all_secs[member.index] = (now - then) / num_steps
    if len(host_secs) < self._count:
      return []
    median = statistics.median_low(host_secs.values())
    step_secs = statistics.median(all_secs.values())
    limit = max(_STRAGGLER_RATIO * median, _STRAGGLER_FRACTION * step_secs)
    slowest = sorted(host_secs.items(), key=lambda item: -item[1])
    lines = [
      f"straggler: {self._members[index]} spends {secs:.3g} s per step on the "
      f"host (input, hooks); the median is {median:.3g} s. All others wait."
      for index, secs in slowest
      if secs > limit
    ]
    if lines:
      shown = [f"{index}: {secs:.3g}" for index, secs in slowest[:_MAX_LISTED]]
      lines.append(
        f"host seconds per step, by process: {', '.join(shown)}; a step takes "
        f"{step_secs:.3g}."
      )
    return lines


def _send(message: dict[str, Any], *members: Member) -> None:
  line = json.dumps(message).encode() + b"\n"
  for member in members:
    with contextlib.suppress(OSError):
      member.writer.write(line)
