"""Process 0's side of what the processes of a job tell each other (job.py).

It hears every process, watches that each is heard of, and tells all of them
what follows: that the job ends and why, at which moment they end together
after a signal, who keeps the others waiting.
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

EXIT_GONE = 1
EXIT_DIFFER = 2

BEAT_SECS = 1.0
LINE_BYTES = 1 << 20
# Host work a step that is so many times the median, and so large a part of the
# step, makes a straggler.
_STRAGGLER_RATIO = 2.0
_STRAGGLER_FRACTION = 0.2
# How many processes a report has a figure for.
_MOST_REPORTED = 16


class Member:
  """What process 0 knows of a process."""

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
    self.ticks: int | None = None
    # (time, step, host_secs) when stragglers were looked for last.
    self.before = (time.monotonic(), 0, 0.0)

  def __str__(self) -> str:
    return f"process {self.index} (host {self.host}, pid {self.pid})"


class Hub:
  """The side of process 0: hears all, and tells all what follows."""

  def __init__(
    self, count: int, secret: str, heartbeat_secs: float, report_secs: float
  ):
    self._count = count
    self._secret = secret
    self._heartbeat_secs = heartbeat_secs
    self._report_secs = report_secs
    self._members: dict[int, Member] = {}
    self._ended = False
    self._asked: str | None = None
    # What processes say of a name, in order, by process.
    self._same: dict[str, dict[int, list[Any]]] = {}

  async def serve(self, sock: socket.socket) -> None:
    """Accepts the processes, and watches them, until cancelled."""
    server = await asyncio.start_server(
      self._connected, sock=sock, limit=LINE_BYTES
    )
    async with server:
      await self._watch()

  async def _connected(self, reader: Any, writer: Any) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
      hello = json.loads(await asyncio.wait_for(reader.readline(), 30))
      if not hmac.compare_digest(hello["secret"], self._secret):
        raise ValueError("a stranger")
      member = Member(hello["index"], hello["host"], hello["pid"], writer)
      self._members[member.index] = member
      await self._listen(member, reader)
    writer.close()

  async def _listen(self, member: Member, reader: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        member.silent_secs = 0.0
        self._heard(member, json.loads(line))
    if not member.done:
      self._end(
        EXIT_GONE,
        f"{member} is gone without a word, killed perhaps; it was in the phase "
        f"{member.phase!r} at step {member.step}",
      )

  def _heard(self, member: Member, message: dict[str, Any]) -> None:
    kind = message["kind"]
    if kind == "beat":
      member.phase, member.step = message["phase"], message["step"]
      member.on_device = message["on_device"]
      member.host_secs = message["host_secs"]
    elif kind == "fail":
      member.done = True
      reason = f"{member}: {message['reason']}"
      if message["hang"]:
        reason += f"; {self._laggards()}"
      self._end(message["code"], reason, hang=message["hang"])
    elif kind == "same":
      self._compare(member, message["name"], message["value"])
    elif kind == "signal" and self._asked is None:
      self._asked = f"{member}: {message['name']}"
      self._tell({"kind": "hold", "reason": self._asked})
    elif kind == "ticks":
      member.ticks = message["ticks"]
      ticks = [m.ticks for m in self._members.values()]
      if len(ticks) == self._count and None not in ticks:
        # All have stopped at a tick or before the next, so all will meet it.
        target = 1 + max(t for t in ticks if t is not None)
        self._tell({"kind": "target", "ticks": target})
    elif kind == "bye":
      member.done = True
      members = self._members.values()
      if len(members) == self._count and all(m.done for m in members):
        self._tell({"kind": "closed"})

  def _compare(self, member: Member, name: str, value: Any) -> None:
    """Ends the job if others said something else than `member` says now."""
    said = self._same.setdefault(name, collections.defaultdict(list))
    place = len(said[member.index])
    said[member.index].append(value)
    for index, values in said.items():
      if len(values) > place and values[place] != value:
        self._end(
          EXIT_DIFFER,
          f"the processes of this job differ in {name}: {member} has {value}, "
          f"{self._members[index]} has {values[place]}",
        )

  def _laggards(self) -> str:
    """Which processes hold the others up."""
    places = {m: (m.step, m.on_device) for m in self._members.values()}
    least, most = min(places.values()), max(places.values())
    if least == most:
      return f"all processes are at step {least[0]}"
    late = [m for m, place in places.items() if place == least]
    others = "wait for it on the device" if least[0] == most[0] else "are"
    return (
      f"the laggard is {', '.join(map(str, late))}, at step {least[0]} in the "
      f"phase {late[0].phase!r} while others {others} at step {most[0]}"
    )

  def _end(self, code: int, reason: str, hang: bool = False) -> None:
    if not self._ended:
      self._ended = True
      self._tell({"kind": "end", "code": code, "reason": reason, "hang": hang})

  def _tell(self, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    for member in self._members.values():
      with contextlib.suppress(OSError):
        member.writer.write(line)

  async def _watch(self) -> None:
    reported = last = time.monotonic()
    while True:
      await asyncio.sleep(BEAT_SECS)
      now = time.monotonic()
      # If this process was itself stopped for long, nobody else is to blame.
      passed, last = min(now - last, 2 * BEAT_SECS), now
      self._tell({"kind": "beat"})
      for member in list(self._members.values()):
        member.silent_secs += passed
        if not member.done and member.silent_secs > self._heartbeat_secs:
          self._end(
            EXIT_GONE,
            f"{member} has not been heard of for {self._heartbeat_secs:g} s "
            "(config.cluster.heartbeat_secs), stopped or cut off; it was in "
            f"the phase {member.phase!r} at step {member.step}",
          )
      if now - reported > self._report_secs:
        reported = now
        for line in self._stragglers(now):
          logging.warning("%s", line)

  def _stragglers(self, now: float) -> list[str]:
    """Says who does more on the host in a step than the others do."""
    work: dict[int, float] = {}
    step_secs = []
    for member in self._members.values():
      then, step, host_secs = member.before
      member.before = (now, member.step, member.host_secs)
      if step and member.step > step:
        work[member.index] = (member.host_secs - host_secs) / (
          member.step - step
        )
        step_secs.append((now - then) / (member.step - step))
    if len(work) < self._count:
      return []
    median = statistics.median_low(work.values())
    least = max(
      _STRAGGLER_RATIO * median,
      _STRAGGLER_FRACTION * statistics.median(step_secs),
    )
    late = [
      f"straggler: {self._members[index]} spends {secs:.3g} s of a step on the "
      f"host (input, hooks), the median is {median:.3g} s; all others wait."
      for index, secs in work.items()
      if secs > least
    ]
    if late:
      slowest = sorted(work.items(), key=lambda item: -item[1])
      shown = [f"{i}: {secs:.3g}" for i, secs in slowest[:_MOST_REPORTED]]
      late.append(
        f"seconds a step on the host, by process: {', '.join(shown)}; a step "
        f"takes {statistics.median(step_secs):.3g}."
      )
    return late
