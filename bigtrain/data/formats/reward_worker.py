"""Calls reward functions in another process, with a time limit.

A function gets the answers to a prompt, a list of texts, and the prompt's row,
and returns a number for each answer. If it blocks or crashes, only the other
process ends, and the next call starts a new one.
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
  """The other process. It starts with the first call.

  Args:
    secs: time limit of a call.
  """

  def __init__(self, secs: float):
    self._secs = secs
    self._process: Any = None

  def __call__(
    self, dotted: str, texts: Sequence[str], row: Any
  ) -> list[float] | str:
    """Returns the rewards of texts, or a message about what went wrong."""
    if self._process is None:
      self._process = _start()
    process = self._process
    try:
      pickle.dump((dotted, texts, row, self._secs), process.stdin)
      process.stdin.flush()
      result = pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
      self._process = None
      code = process.wait()
      if code == -signal.SIGALRM:
        return f"it took more than {self._secs:g} s"
      return f"it ended its process with exit code {code}"
    if isinstance(result, str):
      return result
    if len(result) == len(texts) and all(map(math.isfinite, result)):
      return result
    return f"expected {len(texts)} finite numbers, got {result}"


def _start() -> Any:
  # The other process must not use this one's accelerators, nor get its signals.
  path = os.pathsep.join(path or os.getcwd() for path in sys.path)
  return subprocess.Popen(
    [sys.executable, "-c", f"from {__name__} import serve; serve()"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    start_new_session=True,
  )


def serve() -> None:
  """The program of the other process: answers requests until its input ends."""
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
