"""Waits until all processes of a job are there, and says who is not.

jax's own start-up would end a process from C++, without a word of ours, when
one is missing. So the processes meet before it, on the port that jax's
coordination service uses afterwards: each says to process 0 who it is, and
process 0 answers all at once, with what they need to talk to it later on.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

_POLL_SECS = 0.2
_LINE_BYTES = 1 << 16


class MissingError(RuntimeError):
  """Not all processes came in time."""


def meet(
  address: str,
  index: int,
  count: int,
  *,
  timeout_secs: float,
  token: dict[str, Any],
  check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
  """Returns process 0's `token`, on all processes, once all are there.

  Args:
    address: HOST:PORT of process 0.
    index: of this process.
    count: of processes.
    timeout_secs: how long to wait for the others.
    token: anything that JSON has; that of process 0 counts.
    check: called while waiting; raises to stop.

  Raises:
    MissingError: some did not come; or two claim to be the same one.
  """
  deadline = time.monotonic() + timeout_secs
  if index:
    return _visit(address, index, count, deadline, timeout_secs, check)
  _host(address, count, deadline, timeout_secs, token, check)
  return token


def _host(
  address: str,
  count: int,
  deadline: float,
  timeout_secs: float,
  token: dict[str, Any],
  check: Callable[[], None],
) -> None:
  there: dict[int, tuple[str, socket.socket]] = {}
  with contextlib.ExitStack() as at_end, _listener(address) as listener:
    problem = None
    while len(there) < count - 1 and not problem:
      check()
      if time.monotonic() > deadline:
        missing = sorted(set(range(1, count)) - there.keys())
        problem = (
          f"{len(missing)} of {count} processes did not come within "
          f"{timeout_secs:g} s (config.cluster.join_secs): {_few(missing)}"
        )
        break
      try:
        connection = at_end.enter_context(listener.accept()[0])
        connection.settimeout(_POLL_SECS * 10)
        hello = _read(connection)
        who = f"host {hello['host']}, pid {hello['pid']}"
        number = hello["index"]
      except (OSError, ValueError, KeyError, TypeError):
        continue  # Nobody yet, or none of ours.
      if hello["count"] != count:
        problem = (
          f"process {number} ({who}) was told of {hello['count']} processes, "
          f"process 0 of {count}"
        )
        _answer(connection, {"problem": problem})
      elif number in there or not 0 < number < count:
        other = there[number][0] if number in there else "process 0"
        problem = f"two processes are number {number}: {who} and {other}"
        _answer(connection, {"problem": problem})
      else:
        there[number] = who, connection
    answer = {"problem": problem} if problem else {"token": token}
    for _, connection in there.values():
      _answer(connection, answer)
    if problem:
      raise MissingError(problem)


def _visit(
  address: str,
  index: int,
  count: int,
  deadline: float,
  timeout_secs: float,
  check: Callable[[], None],
) -> dict[str, Any]:
  host, _, port = address.rpartition(":")
  problem: Any = None
  while time.monotonic() < deadline:
    check()
    try:
      connection = socket.create_connection(
        (host.strip("[]"), int(port)), timeout=_POLL_SECS * 10
      )
    except OSError as e:
      problem = e
      time.sleep(_POLL_SECS)
      continue
    with connection:
      hello = dict(
        index=index, count=count, host=socket.gethostname(), pid=os.getpid()
      )
      connection.sendall(json.dumps(hello).encode() + b"\n")
      answer = _wait(connection, deadline + 10, check)
    if answer is None:
      problem = "it hung up"  # Perhaps it is just starting again.
      time.sleep(_POLL_SECS)
    elif answer.get("problem"):
      raise MissingError(answer["problem"])
    else:
      return answer["token"]
  raise MissingError(
    f"process {index}: no process 0 at {address} within {timeout_secs:g} s "
    f"(config.cluster.join_secs): {problem}"
  )


def _wait(
  connection: socket.socket, deadline: float, check: Callable[[], None]
) -> dict[str, Any] | None:
  """The answer, or None if the connection ends without one."""
  connection.settimeout(_POLL_SECS)
  received = b""
  while time.monotonic() < deadline:
    check()
    with contextlib.suppress(TimeoutError):
      try:
        part = connection.recv(_LINE_BYTES)
      except ConnectionError:
        return None
      received += part
      if received.endswith(b"\n"):
        return json.loads(received)
      if not part:
        return None
  return None


@contextlib.contextmanager
def _listener(address: str) -> Iterator[socket.socket]:
  port = int(address.rpartition(":")[2])
  try:
    if socket.has_dualstack_ipv6():
      listener = socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
      )
    else:
      listener = socket.create_server(("", port), backlog=4096)
  except OSError as e:
    raise MissingError(
      f"process 0 cannot listen on port {port}: {e.strerror or e}; is another "
      "job using it?"
    ) from e
  with listener:
    listener.settimeout(_POLL_SECS)
    yield listener


def _read(connection: socket.socket) -> dict[str, Any]:
  with connection.makefile("rb") as file:
    return json.loads(file.readline(_LINE_BYTES))


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
  with contextlib.suppress(OSError):
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _few(numbers: list[int], most: int = 20) -> str:
  shown = ", ".join(map(str, numbers[:most]))
  return shown + (", ..." if len(numbers) > most else "")
