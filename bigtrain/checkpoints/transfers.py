"""Sends parts of files between the processes of a job, over TCP.

A process that has a file serves it for a while. The others connect, send a
secret that only the job's processes know and the ranges of bytes that they
need, and receive these bytes.
"""

import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_LIMIT_SECS = 60.0  # Of one step of a conversation.


def own_host() -> str:
  """Returns an address of this host that the job's other processes reach."""
  # jax has no public way to the address of process 0.
  from jax._src import distributed

  address = distributed.global_state.coordinator_address or "localhost:1"
  host, _, port = address.rpartition(":")
  host = host.strip("[]")
  if jax.process_index() == 0:
    return host
  # Of the interface that leads to process 0. This sends nothing.
  family, *_, target = socket.getaddrinfo(host, int(port))[0]
  with socket.socket(family, socket.SOCK_DGRAM) as route:
    route.connect(target)
    return route.getsockname()[0]


class Server:
  """Serves a file until it is closed.

  Attributes:
    address: [host, port].
  """

  def __init__(self, path: str, secret: str):
    """Starts to serve the file `path` to processes that know `secret`."""
    self._path = path
    self._secret = secret
    if socket.has_dualstack_ipv6():
      self._socket = socket.create_server(
        ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
      )
    else:
      self._socket = socket.create_server(("", 0), backlog=1024)
    self.address = [own_host(), self._socket.getsockname()[1]]
    threading.Thread(target=self._accept, name="serve", daemon=True).start()

  def _accept(self) -> None:
    while True:
      try:
        visitor, _ = self._socket.accept()
      except OSError:
        return  # Closed.
      threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()

  def _serve(self, visitor: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError), visitor:
      visitor.settimeout(_LIMIT_SECS)
      with visitor.makefile("rb") as lines:
        request = json.loads(lines.readline())
      if not hmac.compare_digest(request["secret"], self._secret):
        return
      with open(self._path, "rb") as file:
        for offset, num_bytes in request["ranges"]:
          if num_bytes:  # sendfile would send all for 0.
            visitor.sendfile(file, offset, num_bytes)

  def close(self) -> None:
    """Accepts no further connections."""
    # Unlike `close` alone, this wakes the thread that waits in `accept`.
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()


def fetch(
  address: Sequence[Any],
  secret: str,
  ranges: Sequence[tuple[int, int]],
  targets: Sequence[np.ndarray],
) -> None:
  """Receives ranges of bytes of the file that another process serves.

  Args:
    ranges: (offset, number of bytes) of each.

  Raises:
    OSError: the process cannot be reached, or does not send them.
  """
  host, port = address
  with socket.create_connection((host, port), _LIMIT_SECS) as connection:
    request = {"secret": secret, "ranges": ranges}
    connection.sendall(json.dumps(request).encode() + b"\n")
    for target in targets:
      buffer = target.reshape(-1).view(np.uint8).data
      while len(buffer):
        count = connection.recv_into(buffer)
        if not count:
          raise ConnectionError(f"{host} port {port} sent too little")
        buffer = buffer[count:]
