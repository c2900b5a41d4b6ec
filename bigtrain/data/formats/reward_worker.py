"""Calls functions of rewards in another process, with a time limit.

A function takes the answers to a prompt, a list of texts, and the prompt's row,
and returns a number for each. One that blocks or crashes costs the process.
"""

import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


class Worker:
  """The process, which starts when it is needed."""

  def __init__(self, secs: float):
    self._secs, self._process = secs, None

  def __call__(
    self, dotted: str, texts: Sequence[str], row: Any
  ) -> list[float] | str:
    """Returns the rewards of texts, or what went wrong."""
    process: Any = self._process or _start()
    self._process = process
    try:
      pickle.dump((dotted, texts, row, self._secs), process.stdin)
      process.stdin.flush()
      result = pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
      self._process, code = None, process.wait()
      if code == -signal.SIGALRM:
        return f"it took more than {self._secs:g} s"
      return f"it ended its process with exit code {code}"
    if isinstance(result, str):
      return result
    if len(result) == len(texts) and all(map(math.isfinite, result)):
      return result
    return f"expected {len(texts)} finite numbers, got {result}"


def _start() -> Any:
  # The accelerators are this process's, and so are its signals.
  path = os.pathsep.join(path or os.getcwd() for path in sys.path)
  return subprocess.Popen(
    [sys.executable, "-c", f"from {__name__} import serve; serve()"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    start_new_session=True,
  )


def serve() -> None:
  """The program of the process; it ends with its input."""
  results = os.fdopen(os.dup(1), "wb", buffering=0)
  os.dup2(2, 1)  # What the functions print goes to the log.
  requests = os.fdopen(os.dup(0), "rb")
  while requests.peek(1):
    dotted, texts, row, secs = pickle.load(requests)
    module, _, name = dotted.rpartition(".")
    fn = getattr(importlib.import_module(module), name)
    # The signal ends the process, whatever the function is doing.
    signal.setitimer(signal.ITIMER_REAL, secs)
    try:
      result: Any = [float(x) for x in fn(texts, row)]
    except Exception as e:
      result = f"{type(e).__name__}: {e}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    results.write(pickle.dumps(result))
