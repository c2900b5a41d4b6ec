"""Sends parts of files between the processes of a job, over TCP.

A process that has a file serves it for a while, at an address that it passes
on through the channel. The others connect, send a secret that only the job's
processes know and the ranges of bytes that they need, and receive these bytes.
"""

import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.cluster import hub, process

_LIMIT_SECS = 60.0  # Of one step of a conversation.


class Server:
  """Serves a file to the job's processes until it is closed.

  Attributes:
    address: for `fetch` on other processes, as JSON.
  """

  def __init__(self, path: str):
    """Starts to serve the file `path`."""
    self._path = path
    self._socket = hub.listen()
    self.address = [process.job.host, self._socket.getsockname()[1]]
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
      if not hmac.compare_digest(request["secret"], process.job.secret):
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
  ranges: Sequence[tuple[int, int]],
  targets: Sequence[np.ndarray],
) -> None:
  """Receives ranges of bytes of the file that another process serves.

  Args:
    ranges: (offset, number of bytes) of each.

  Raises:
    OSError: the process cannot be reached, or does not send them.
  """
  host, port = address[0] or process.job.first_host, address[1]
  with socket.create_connection((host, port), _LIMIT_SECS) as connection:
    request = {"secret": process.job.secret, "ranges": ranges}
    connection.sendall(json.dumps(request).encode() + b"\n")
    for target in targets:
      buffer = target.reshape(-1).view(np.uint8).data
      while len(buffer):
        count = connection.recv_into(buffer)
        if not count:
          raise ConnectionError(f"{host} port {port} sent too little")
        buffer = buffer[count:]
