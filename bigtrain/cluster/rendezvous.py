"""Waits until all processes of a job are up, and names missing ones.

If a process is missing, jax's own start-up ends the others from C++ without a
message of ours. So the processes meet before it, on the port that jax's
coordination service uses afterwards: each introduces itself to process 0, and
process 0 answers all of them at once with the data for their connections.
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


class RendezvousError(RuntimeError):
  """Processes are missing, or do not belong to the same job."""


def meet(
  address: str,
  index: int,
  count: int,
  *,
  timeout_secs: float,
  token: dict[str, Any],
  check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
  """Waits for all processes; returns process 0's `token` on each of them.

  Args:
    address: HOST:PORT of process 0.
    token: JSON; only process 0's is used.
    check: called while waiting; raises to stop.

  Raises:
    RendezvousError: some processes did not join, two have the same index, or
      process 0 cannot listen on its port.
  """
  deadline = time.monotonic() + timeout_secs
  if index:
    return _introduce(address, index, count, deadline, timeout_secs, check)
  _gather(address, count, deadline, timeout_secs, token, check)
  return token


def _gather(
  address: str,
  count: int,
  deadline: float,
  timeout_secs: float,
  token: dict[str, Any],
  check: Callable[[], None],
) -> None:
  """Process 0's part: waits for the others and answers them."""
  joined: dict[int, tuple[str, socket.socket]] = {}
  with contextlib.ExitStack() as at_end, _listener(address) as listener:
    problem = None
    while len(joined) < count - 1 and not problem:
      check()
      if time.monotonic() > deadline:
        missing = sorted(set(range(1, count)) - joined.keys())
        problem = (
          f"{len(missing)} of {count} processes did not join within "
          f"{timeout_secs:g} s (config.cluster.join_secs): {_shorten(missing)}"
        )
        break
      try:
        connection = at_end.enter_context(listener.accept()[0])
        connection.settimeout(_POLL_SECS * 10)
        hello = _read(connection)
        description = f"host {hello['host']}, pid {hello['pid']}"
        index = hello["index"]
      except (OSError, ValueError, KeyError, TypeError):
        continue  # No visitor yet, or one that is not a process of a job.
      if hello["count"] != count:
        problem = (
          f"process {index} ({description}) was started with num_processes="
          f"{hello['count']}, process 0 with {count}"
        )
        _answer(connection, {"problem": problem})
      elif index in joined or not 0 < index < count:
        other = joined[index][0] if index in joined else "process 0"
        problem = f"two processes have index {index}: {description} and {other}"
        _answer(connection, {"problem": problem})
      else:
        joined[index] = description, connection
    answer = {"problem": problem} if problem else {"token": token}
    for _, connection in joined.values():
      _answer(connection, answer)
    if problem:
      raise RendezvousError(problem)


def _introduce(
  address: str,
  index: int,
  count: int,
  deadline: float,
  timeout_secs: float,
  check: Callable[[], None],
) -> dict[str, Any]:
  """The part of any process but 0: connects and waits for the answer."""
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
      # Perhaps process 0 is just being restarted.
      problem = "it closed the connection"
      time.sleep(_POLL_SECS)
    elif answer.get("problem"):
      raise RendezvousError(answer["problem"])
    else:
      return answer["token"]
  raise RendezvousError(
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
    raise RendezvousError(
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


def _shorten(indices: list[int], most: int = 20) -> str:
  shown = ", ".join(map(str, indices[:most]))
  return shown + (", ..." if len(indices) > most else "")
