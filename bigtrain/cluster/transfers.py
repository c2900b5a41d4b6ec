"""Sends files between the processes of a job, over TCP.

A process serves a folder (`Server`), and sends its address to the others
through the channel. They send the job's secret and names of files (`fetch`),
and receive each file's size and contents.
"""

import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from bigtrain.cluster import hub, process

_LIMIT_SECS = 60.0  # For each message between the two ends.
_BLOCK_BYTES = 2**20


class Server:
  """Serves the files below a folder until `close`.

  Attributes:
    address: argument of `fetch`, which can be sent as JSON.
  """

  def __init__(self, folder: str):
    self._folder = os.path.realpath(folder)
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
      for name in request["files"]:
        path = os.path.realpath(os.path.join(self._folder, name))
        if not path.startswith(self._folder + os.sep):
          return
        with open(path, "rb") as file:
          num_bytes = os.fstat(file.fileno()).st_size
          visitor.sendall(b"%d\n" % num_bytes)
          if num_bytes:  # sendfile would send all for 0.
            visitor.sendfile(file, 0, num_bytes)

  def close(self) -> None:
    # Unlike `close` alone, this wakes the thread that waits in `accept`.
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()


def fetch(address: Sequence[Any], names: Sequence[str], folder: str) -> None:
  """Copies files from another process's folder into a local folder."""
  host, port = address[0] or process.job.first_host, address[1]
  with (
    socket.create_connection((host, port), _LIMIT_SECS) as connection,
    connection.makefile("rb") as received,
  ):
    request = {"secret": process.job.secret, "files": names}
    connection.sendall(json.dumps(request).encode() + b"\n")
    for name in names:
      path = os.path.join(folder, name)
      os.makedirs(os.path.dirname(path), exist_ok=True)
      left = int(received.readline() or -1)  # Bytes to come; -1 for no answer.
      with open(path, "wb") as file:
        while left > 0:
          block = received.read(min(left, _BLOCK_BYTES))
          if not block:
            break
          left -= file.write(block)
      if left:
        raise ConnectionError(f"{host} port {port} did not send {name}")
