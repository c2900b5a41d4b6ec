"""Runs a peer's steps in a separate process, on request.

Peers may set flags of jax or need another Python, so they have their own
process. A peer prints one line of JSON with facts about itself when it is
ready. Then it reads numbers of steps, and answers each with the seconds that
they took. It ends at the end of its input.
"""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import measure

_MARK = "peer: "


class Peer:
  """The benchmark's side of the connection.

  Args:
    script: module of benchmarks that calls `serve`.
    options: options of the script, for its command line, as JSON.
    env: environment of the process.
    python: path of the interpreter.
    wait: whether to wait until the peer is ready. If not, call `wait`.

  Attributes:
    ready: facts that the peer reported.

  Raises:
    RuntimeError: the process failed; the message has its last lines.
  """

  ready: dict[str, Any]

  def __init__(
    self,
    script: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    python: str = sys.executable,
    wait: bool = True,
  ):
    self._last_lines: collections.deque[str] = collections.deque(maxlen=20)
    self._script = script
    self._process = subprocess.Popen(
      [python, "-m", f"benchmarks.{script}", json.dumps(options)],
      env=dict(env),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      # A compiler's workers end with it, and Ctrl-C is for the benchmark.
      start_new_session=True,
    )
    if wait:
      self.wait()

  def wait(self) -> None:
    """Waits until the peer is ready, and reads what it reports."""
    self.ready = self._answer()

  def run(self, steps: int) -> Any:
    """Returns what the peer measures in a number of steps."""
    self._process.stdin.write(f"{steps}\n")
    self._process.stdin.flush()
    return self._answer()

  def close(self) -> None:
    """Ends the process; another thread may be waiting for its answer."""
    with contextlib.suppress(ProcessLookupError):
      if self._process.returncode is None:
        os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      with contextlib.suppress(OSError, ValueError):
        pipe.close()

  def _answer(self) -> Any:
    with contextlib.suppress(ValueError):  # Closed in another thread.
      for line in self._process.stdout:
        if line.startswith(_MARK):
          return json.loads(line.removeprefix(_MARK))
        self._last_lines.append(line)
    self.close()
    raise RuntimeError(
      f"benchmarks.{self._script}: {''.join(self._last_lines)}"
    )


def serve(ready: Mapping[str, Any], run: Callable[[int], Any]) -> None:
  """The peer's side of the connection: answers until its input ends.

  Args:
    ready: facts to report.
    run: function from a number of steps to the seconds that they take, which
      may have the CPU's beside them.
  """
  _send(ready)
  for line in sys.stdin:
    _send(run(int(line)))


def _send(value: Any) -> None:
  print(_MARK + json.dumps(value), flush=True)


def environment(*folders: str) -> dict[str, str]:
  """Returns the environment for a peer with modules in `folders`."""
  env = measure.environment()
  path = os.pathsep.join([*folders, env["PYTHONPATH"]])
  # By default jax allocates most of a GPU's memory.
  return env | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
