"""Process 0's end of the connections between the processes of a job.

The hub receives messages from every process (connection.py), detects lost
ones and sends its decisions to all: that the job ends and why, the call at
which all end together after a signal. It logs stragglers.
"""

import asyncio
import collections
import contextlib
import hmac
import json
import logging
import socket
import statistics
import time
from typing import Any

EXIT_LOST = 1
EXIT_DIFFER = 2

HEARTBEAT_SECS = 1.0
LINE_BYTES = 1 << 20
# A process is a straggler if its host work per step is more than this multiple
# of the median and more than this fraction of the step.
_STRAGGLER_RATIO = 2.0
_STRAGGLER_FRACTION = 0.2
_MAX_REPORTED = 16  # Processes in a report.


class Member:
  """A process of the job, as seen by process 0."""

  def __init__(self, index: int, host: str, pid: int, writer: Any):
    self.index = index
    self.host = host
    self.pid = pid
    self.writer = writer
    self.silent_secs = 0.0
    self.done = False
    self.phase = "start"
    self.step = 0
    self.on_device = False
    self.host_secs = 0.0
    self.num_calls: int | None = None  # Of should_end, once a signal came.
    # (time, step, host_secs) at the last check for stragglers.
    self.last_check = (time.monotonic(), 0, 0.0)

  def __str__(self) -> str:
    return f"process {self.index} (host {self.host}, pid {self.pid})"


class Hub:
  """Receives messages from all processes and sends decisions to all."""

  def __init__(
    self, count: int, secret: str, heartbeat_secs: float, report_secs: float
  ):
    """See `connection.Connection`."""
    self._count = count
    self._secret = secret
    self._heartbeat_secs = heartbeat_secs
    self._report_secs = report_secs
    self._members: dict[int, Member] = {}
    self._ended = False
    self._signal: str | None = None
    # {name: {process: values in order}} that have to be equal.
    self._values: dict[str, dict[int, list[Any]]] = {}

  async def serve(self, sock: socket.socket) -> None:
    """Accepts the processes and watches them until cancelled."""
    server = await asyncio.start_server(
      self._connected, sock=sock, limit=LINE_BYTES
    )
    async with server:
      await self._watch()

  async def _connected(self, reader: Any, writer: Any) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
      hello = json.loads(await asyncio.wait_for(reader.readline(), 30))
      if not hmac.compare_digest(hello["secret"], self._secret):
        raise ValueError("wrong secret")
      member = Member(hello["index"], hello["host"], hello["pid"], writer)
      self._members[member.index] = member
      await self._listen(member, reader)
    writer.close()

  async def _listen(self, member: Member, reader: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        member.silent_secs = 0.0
        self._receive(member, json.loads(line))
    if not member.done:
      self._end(
        EXIT_LOST,
        f"{member} disconnected without an error, perhaps killed; it was in "
        f"phase {member.phase!r} at step {member.step}",
      )

  def _receive(self, member: Member, message: dict[str, Any]) -> None:
    kind = message["kind"]
    if kind == "heartbeat":
      member.phase, member.step = message["phase"], message["step"]
      member.on_device = message["on_device"]
      member.host_secs = message["host_secs"]
    elif kind == "fail":
      member.done = True
      reason = f"{member}: {message['reason']}"
      if message["hang"]:
        reason += f"; {self._laggards()}"
      self._end(message["code"], reason, hang=message["hang"])
    elif kind == "equal":
      self._compare(member, message["name"], message["value"])
    elif kind == "signal" and self._signal is None:
      self._signal = f"{member}: {message['name']}"
      self._send_all({"kind": "signal", "reason": self._signal})
    elif kind == "calls":
      member.num_calls = message["calls"]
      calls = [m.num_calls for m in self._members.values()]
      if len(calls) == self._count and None not in calls:
        # Each process blocks in its current or next call of should_end, so
        # none has begun this one.
        call = 1 + max(n for n in calls if n is not None)
        self._send_all({"kind": "end_at_call", "call": call})
    elif kind == "done":
      member.done = True
      members = self._members.values()
      if len(members) == self._count and all(m.done for m in members):
        self._send_all({"kind": "all_done"})

  def _compare(self, member: Member, name: str, value: Any) -> None:
    """Ends the job if another process has a different value of this name."""
    by_process = self._values.setdefault(name, collections.defaultdict(list))
    position = len(by_process[member.index])
    by_process[member.index].append(value)
    for index, values in by_process.items():
      if len(values) > position and values[position] != value:
        self._end(
          EXIT_DIFFER,
          f"the processes of this job differ in {name}: {member} has {value}, "
          f"{self._members[index]} has {values[position]}",
        )

  def _laggards(self) -> str:
    """Describes which processes hold up the others."""
    positions = {m: (m.step, m.on_device) for m in self._members.values()}
    least, most = min(positions.values()), max(positions.values())
    if least == most:
      return f"all processes are at step {least[0]}"
    late = [m for m, position in positions.items() if position == least]
    others = "wait for it on the device" if least[0] == most[0] else "are"
    return (
      f"the laggard is {', '.join(map(str, late))}, at step {least[0]} in "
      f"phase {late[0].phase!r}, while others {others} at step {most[0]}"
    )

  def _end(self, code: int, reason: str, hang: bool = False) -> None:
    if not self._ended:
      self._ended = True
      self._send_all(
        {"kind": "end", "code": code, "reason": reason, "hang": hang}
      )

  def _send_all(self, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    for member in self._members.values():
      with contextlib.suppress(OSError):
        member.writer.write(line)

  async def _watch(self) -> None:
    reported = last = time.monotonic()
    while True:
      await asyncio.sleep(HEARTBEAT_SECS)
      now = time.monotonic()
      # If this process itself was stopped for long, the others were not silent.
      passed, last = min(now - last, 2 * HEARTBEAT_SECS), now
      self._send_all({"kind": "heartbeat"})
      for member in list(self._members.values()):
        member.silent_secs += passed
        if not member.done and member.silent_secs > self._heartbeat_secs:
          self._end(
            EXIT_LOST,
            f"{member} sent no heartbeat for {self._heartbeat_secs:g} s "
            "(config.cluster.heartbeat_secs): it was stopped, or its network "
            f"is down; it was in phase {member.phase!r} at step {member.step}",
          )
      if now - reported > self._report_secs:
        reported = now
        for line in self._stragglers(now):
          logging.warning("%s", line)

  def _stragglers(self, now: float) -> list[str]:
    """Log lines about processes with more host work than the others."""
    host_secs_per_step: dict[int, float] = {}
    step_secs = []
    for member in self._members.values():
      then, step, host_secs = member.last_check
      member.last_check = (now, member.step, member.host_secs)
      if step and member.step > step:
        steps = member.step - step
        host_secs_per_step[member.index] = (
          member.host_secs - host_secs
        ) / steps
        step_secs.append((now - then) / steps)
    if len(host_secs_per_step) < self._count:
      return []
    median = statistics.median_low(host_secs_per_step.values())
    limit = max(
      _STRAGGLER_RATIO * median,
      _STRAGGLER_FRACTION * statistics.median(step_secs),
    )
    lines = [
      f"straggler: {self._members[index]} spends {secs:.3g} s per step on the "
      f"host (input, hooks); the median is {median:.3g} s. All others wait."
      for index, secs in host_secs_per_step.items()
      if secs > limit
    ]
    if lines:
      slowest = sorted(host_secs_per_step.items(), key=lambda item: -item[1])
      shown = [f"{i}: {secs:.3g}" for i, secs in slowest[:_MAX_REPORTED]]
      lines.append(
        f"host seconds per step, by process: {', '.join(shown)}; a step takes "
        f"{statistics.median(step_secs):.3g}."
      )
    return lines
