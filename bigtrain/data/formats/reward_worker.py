"""Calls functions in other processes, with a time limit.

Users' functions judge answers or act as a model's tools. If one blocks or
crashes, only its process ends, and the next call starts a new one.

The functions below, such as `numbers_of`, run in the other process. They turn
the result of a user's function into plain values, so this process does not need
the user's libraries.
"""

import concurrent.futures
import importlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Limit for the import of a user's module, which may load large libraries.
_IMPORT_SECS = 300.0


class Failure(NamedTuple):
  """The error of a call that failed."""

  message: str


class Workers:
  """Several processes, for several calls at the same time."""

  def __init__(self, number: int):
    self._number = number
    self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for _ in range(number):
      self._free.put(_Worker())

  def __call__(
    self, function: Callable[..., Any], *args: Any, secs: float
  ) -> Any:
    """Returns the result of one of this module's functions, or a Failure.

    Args:
      args: values that pickle can write.
      secs: time limit of the call; importing a user's module does not count.
    """
    worker = self._free.get()
    try:
      return worker(function, *args, secs=secs)
    finally:
      self._free.put(worker)

  def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields results in the order of the items, which may call `self`.

    After an error, calls that have not begun are not made.
    """
    if self._number == 1:
      yield from map(function, items)
      return
    threads = concurrent.futures.ThreadPoolExecutor(self._number)
    try:
      yield from threads.map(function, items)
    finally:
      threads.shutdown(cancel_futures=True)


class _Worker:
  """One other process. It starts with the first call."""

  def __init__(self) -> None:
    self._process: Any = None

  def __call__(
    self, function: Callable[..., Any], *args: Any, secs: float
  ) -> Any:
    if self._process is None:
      self._process = _start()
    process = self._process
    try:
      pickle.dump((function.__name__, args, secs), process.stdin)
      process.stdin.flush()
      return pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
      self._process = None
      code = process.wait()
      if code == -signal.SIGALRM:
        return Failure(f"it took more than {secs:g} s")
      return Failure(f"it ended its process with exit code {code}")


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
  os.dup2(2, 1)  # Prints of the functions go to the log.
  requests = os.fdopen(os.dup(0), "rb")
  while requests.peek(1):
    name, args, secs = pickle.load(requests)
    try:
      result = globals()[name](*args, secs=secs)
    except PlainError as e:
      result = Failure(str(e))
    except Exception as e:
      result = Failure(f"{type(e).__name__}: {e}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    results.write(pickle.dumps(result))


class PlainError(Exception):
  """An error whose message needs no traceback."""


def numbers_of(
  dotted: str, texts: Sequence[str], row: Any, messages: Any, *, secs: float
) -> list[float]:
  """Calls a reward function; it may have a parameter `messages`."""
  fn = _load(dotted)
  options = {"messages": messages} if _takes_messages(fn) else {}
  _limit(secs)
  return [float(x) for x in fn(texts, row, **options)]


def text_of(dotted: str, call: Any, row: Any, *, secs: float) -> str:
  """Calls a tool; its result is a text, or is converted to JSON."""
  fn = _load(dotted)
  _limit(secs)
  result = fn(call, row)
  if isinstance(result, str):
    return result
  return json.dumps(result, ensure_ascii=False)


def calls_of(dotted: str, text: str, *, secs: float) -> list[Any]:
  """Calls a user's parser of tool calls."""
  fn = _load(dotted)
  _limit(secs)
  return [json.loads(json.dumps(call)) for call in fn(text)]


def response_of(
  url: str, headers: dict[str, str], body: bytes, *, secs: float
) -> tuple[int, bytes]:
  """Posts JSON to an address; returns status and content of the response."""
  # urllib's own limit is for each packet, and it has none for looking up names.
  _limit(secs)
  import http.client
  import urllib.error
  import urllib.request

  class NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
      return None  # Others than POST would lose the body.

  headers = {"Content-Type": "application/json", **headers}
  request = urllib.request.Request(url, body, headers, method="POST")
  opener = urllib.request.build_opener(NoRedirects)
  try:
    with opener.open(request) as response:
      return response.status, response.read()
  except urllib.error.HTTPError as e:
    return e.code, e.read()
  except urllib.error.URLError as e:
    raise PlainError(f"no connection: {e.reason}") from e
  except (OSError, http.client.HTTPException) as e:
    raise PlainError(f"the connection was lost: {type(e).__name__}: {e}") from e


def _load(dotted: str) -> Any:
  _limit(_IMPORT_SECS)
  module, _, name = dotted.rpartition(".")
  return getattr(importlib.import_module(module), name)


def _takes_messages(fn: Any) -> bool:
  import inspect

  try:
    return "messages" in inspect.signature(fn).parameters
  except (TypeError, ValueError):  # Some functions in C have no signature.
    return False


def _limit(secs: float) -> None:
  """Ends this process after some seconds, even if it hangs."""
  signal.setitimer(signal.ITIMER_REAL, secs)
