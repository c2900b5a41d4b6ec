"""A peer that trains in a process of its own, step by step, when it is asked.

Peers may set flags of jax, or want another Python; apart, they cannot disturb
what they are compared with. A peer says in one line of JSON that it is ready,
with whatever there is to know about it; then it reads how many steps to do,
and answers with the seconds that they took. It ends with its input.
"""

import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import measure

_MARK = "peer: "


class Peer:
  """The side of the benchmark.

  Args:
    script: module of benchmarks that calls `serve`.
    options: what it is to train, for its command line, as JSON.
    env: of the process.
    python: the interpreter.

  Attributes:
    ready: what the peer has told about itself.

  Raises:
    RuntimeError: it failed; with the end of what it said.
  """

  def __init__(
    self,
    script: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    python: str = sys.executable,
  ):
    self._said: collections.deque[str] = collections.deque(maxlen=20)
    self._script = script
    self._process = subprocess.Popen(
      [python, "-m", f"benchmarks.{script}", json.dumps(options)],
      env=dict(env),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self.ready: dict[str, Any] = self._answer()

  def run(self, steps: int) -> float:
    """Seconds of so many steps, one after the other."""
    self._process.stdin.write(f"{steps}\n")
    self._process.stdin.flush()
    return self._answer()

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()

  def _answer(self) -> Any:
    for line in self._process.stdout:
      if line.startswith(_MARK):
        return json.loads(line.removeprefix(_MARK))
      self._said.append(line)
    self.close()
    raise RuntimeError(f"benchmarks.{self._script}: {''.join(self._said)}")


def serve(ready: Mapping[str, Any], run: Callable[[int], float]) -> None:
  """The side of the peer: does what it is told until its input ends.

  Args:
    ready: what to tell about itself.
    run: does so many steps and returns the seconds.
  """
  _tell(ready)
  for line in sys.stdin:
    _tell(run(int(line)))


def _tell(value: Any) -> None:
  print(_MARK + json.dumps(value), flush=True)


def environment(*folders: str) -> dict[str, str]:
  """Environment of a peer that finds modules in `folders`, and ours."""
  env = measure.environment()
  path = os.pathsep.join([*folders, env["PYTHONPATH"]])
  # jax would else take most of a GPU's memory, and leave others none.
  return env | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
