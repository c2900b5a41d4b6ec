"""Judges of a model's answers: functions, commands and HTTP addresses.

`get` makes one from its description in a config:

  "my_project.rewards.exact"             a function of (texts, row)
  dict(command="python judge.py")        JSON lines in, one number per line out
  dict(url="http://localhost:8000/")     a JSON list in, a list of numbers out

A function is called for each prompt, with all answers to the prompt, in another
process (reward_worker.py). A command or an address is called once for all of
this process's prompts in a batch. Each answer is a JSON object with

  "answer"    its text; with tools, the text of the last turn
  "row"       the row of its prompt
  "messages"  with tools, all messages after the prompt

Every call has a time limit, after which everything that the call has started is
killed. So a judge that hangs delays a step by `time_limit` per try, and no
more.
"""

import base64
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from absl import logging

from bigtrain.config.errors import (
  ConfigError,
  check_kwargs,
  check_number,
  did_you_mean,
)
from bigtrain.config.modules import find_attribute
from bigtrain.data.formats.reward_worker import (
  Failure,
  Workers,
  numbers_of,
  response_of,
)

# Wait before the second try; it doubles with each further one.
_FIRST_WAIT_SECS = 0.5
_MAX_WAIT_SECS = 30.0
# Statuses of servers that may answer later: too many requests, and the like.
_LATER = (408, 425, 429)
# Characters of an answer or a message that errors quote.
_NUM_SHOWN = 200


Result = list[float] | str


class Answers(NamedTuple):
  """The answers to one prompt."""

  row: Any
  texts: Sequence[str]
  messages: Sequence[Any] | None  # Of each answer, if there are tools.


class Judge(Protocol):
  """Yields rewards of each prompt's answers, or a message about a failure."""

  @property
  def name(self) -> str: ...

  @property
  def is_outside(self) -> bool: ...  # No function of this program's user.

  def __call__(self, prompts: Sequence[Answers]) -> Iterable[Result]: ...


def get(spec: Any, time_limit: float, workers: Workers) -> Judge:
  """Makes the judge of an entry of `rewards`."""
  if isinstance(spec, str):
    if re.match(r"\w+://", spec):
      raise ConfigError(f"rewards: {spec!r}: expected dict(url={spec!r}).")
    find_attribute(spec, "rewards")
    return _Function(spec, time_limit, workers)
  if not isinstance(spec, Mapping):
    raise ConfigError(
      "rewards: expected the dotted path of a function, dict(command=...) or "
      f"dict(url=...), got {spec!r}."
    )
  options = {"time_limit": time_limit, **spec}
  kinds: dict[str, Callable[..., Judge]] = {
    "command": _command,
    "url": _address,
  }
  given = [kind for kind in kinds if kind in options]
  if len(given) != 1:
    hint = "" if given else did_you_mean(next(iter(spec), ""), kinds)
    raise ConfigError(
      f"rewards: expected either command or url, got {dict(spec)!r}.{hint}"
    )
  make = kinds[given[0]]
  check_kwargs(make, options, "rewards", ("workers",))
  check_number("rewards: time_limit", options["time_limit"], above=0)
  retries = options.get("retries", 0)
  check_number("rewards: retries", retries, least=0, whole=True)
  return make(**options, workers=workers)


def _command(
  command: str | Sequence[str],
  time_limit: float,
  workers: Workers,
  retries: int = 0,
) -> Judge:
  del workers
  words = shlex.split(command) if isinstance(command, str) else [*command]
  if not words or not all(isinstance(word, str) for word in words):
    raise ConfigError(
      f"rewards: command: expected a program with arguments, got {command!r}."
    )
  if shutil.which(words[0]) is None:
    raise ConfigError(
      f"rewards: command={command!r}: there is no program {words[0]!r}."
    )
  run = _Program(words, time_limit)
  return _Batched(f"command {shlex.join(words)!r}", run, retries)


def _address(
  url: str,
  time_limit: float,
  workers: Workers,
  headers: Mapping[str, str] | None = None,
  retries: int = 0,
) -> Judge:
  parts = urllib.parse.urlsplit(url)
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ConfigError(f"rewards: url={url!r}: expected http:// or https://.")
  headers = {
    name: _with_environment(value, f"rewards: headers: {name}")
    for name, value in (headers or {}).items()
  }
  post = _Address(url, headers, time_limit, workers)
  return _Batched(f"address {url}", post, retries)


def _with_environment(value: Any, key: str) -> str:
  """Fills in variables such as $TOKEN, so that configs contain no secrets."""
  if not isinstance(value, str):
    raise ConfigError(f"{key}: expected a text, got {value!r}.")
  for braced, plain in re.findall(r"\$(?:\{(\w+)\}|(\w+))", value):
    if (braced or plain) not in os.environ:
      name = braced or plain
      raise ConfigError(f"{key}: the environment has no variable {name}.")
  return os.path.expandvars(value)


@dataclasses.dataclass
class _Function:
  """A Python function; it is called for each prompt."""

  dotted: str
  secs: float
  workers: Workers
  is_outside: bool = False

  @property
  def name(self) -> str:
    return self.dotted

  def __call__(self, prompts: Sequence[Answers]) -> Iterable[Result]:
    return self.workers.map(self._judge, prompts)

  def _judge(self, prompt: Answers) -> Result:
    row, texts, messages = prompt
    result = self.workers(
      numbers_of, self.dotted, texts, row, messages, secs=self.secs
    )
    if isinstance(result, Failure):
      return result.message
    if len(result) == len(texts) and all(map(math.isfinite, result)):
      return result
    return f"expected {len(texts)} finite numbers, got {result}"


class _CallError(Exception):
  """A call that failed; `again` says whether another try may help."""

  def __init__(self, message: str, again: bool):
    super().__init__(message)
    self.again = again


@dataclasses.dataclass
class _Batched:
  """A command or an address; it is called once for all prompts.

  Attributes:
    call: returns one value for each request, or raises a _CallError.
    retries: number of further tries after the first one.
  """

  name: str
  call: Callable[[Sequence[Any]], list[Any]]
  retries: int
  is_outside: bool = True

  def __call__(self, prompts: Sequence[Answers]) -> list[Result]:
    requests = [
      {"answer": text, "row": row}
      | ({} if messages is None else {"messages": messages[i]})
      for row, texts, messages in prompts
      for i, text in enumerate(texts)
    ]
    if not requests:
      return []
    values = self._try(requests)
    if isinstance(values, str):
      return [values] * len(prompts)
    results: list[Result] = []
    for prompt in prompts:
      own, values = values[: len(prompt.texts)], values[len(prompt.texts) :]
      wrong = [x for x in own if not _is_finite(x)]
      if wrong:
        got = f"{wrong[0]!r:.{_NUM_SHOWN}}"
        results.append(f"expected {len(own)} finite numbers, got {got}")
      else:
        results.append([float(x) for x in own])
    return results

  def _try(self, requests: Sequence[Any]) -> list[Any] | str:
    wait_secs = _FIRST_WAIT_SECS
    for attempt in range(self.retries + 1):
      try:
        values = self.call(requests)
        if len(values) != len(requests):
          raise _CallError(
            f"expected {len(requests)} numbers, got {len(values)}", again=True
          )
        return values
      except _CallError as e:
        tries = f" ({attempt + 1} tries)" if attempt else ""
        message = f"{e}{tries}"
        if not e.again or attempt == self.retries:
          return message
        logging.warning(
          "reward %s: %s; trying again in %g s.", self.name, e, wait_secs
        )
        time.sleep(wait_secs)
        wait_secs = min(2 * wait_secs, _MAX_WAIT_SECS)
    raise AssertionError  # The last try returns.


def _is_finite(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)


@dataclasses.dataclass
class _Program:
  """Runs a command: one JSON object per line in, one number per line out."""

  words: Sequence[str]
  secs: float

  def __call__(self, requests: Sequence[Any]) -> list[Any]:
    # With files in place of pipes, nobody waits for a reader, or for a process
    # that the command leaves behind.
    with (
      tempfile.TemporaryFile() as given,
      tempfile.TemporaryFile() as printed,
      tempfile.TemporaryFile() as errors,
    ):
      given.write(b"".join(_json(request) + b"\n" for request in requests))
      given.seek(0)
      self._run(given, printed, errors)
      printed.seek(0)
      lines = printed.read().decode(errors="replace").split("\n")
    return [_number(line) for line in lines if line.strip()]

  def _run(self, given: Any, printed: Any, errors: Any) -> None:
    try:
      process = subprocess.Popen(
        self.words,
        stdin=given,
        stdout=printed,
        stderr=errors,
        start_new_session=True,
      )
    except OSError as e:
      raise _CallError(f"it does not start: {e}", again=False) from e
    try:
      code = process.wait(self.secs)
    except subprocess.TimeoutExpired as e:
      raise _CallError(f"it took more than {self.secs:g} s", again=True) from e
    finally:
      if process.poll() is None:  # Also after Ctrl-C. All that it has started.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
      errors.seek(0)
      lines = errors.read().decode(errors="replace").strip().splitlines()
      last = f": {lines[-1]:.{_NUM_SHOWN}}" if lines else ""
      raise _CallError(f"it ended with exit code {code}{last}", again=True)


def _number(line: str) -> Any:
  try:
    return float(line)
  except ValueError:
    return line.strip()  # The caller refuses it.


@dataclasses.dataclass
class _Address:
  """Posts a JSON list to an address, which responds with a list of numbers."""

  url: str
  headers: Mapping[str, str]
  secs: float
  workers: Workers

  def __call__(self, requests: Sequence[Any]) -> list[Any]:
    body = _json(requests)
    headers = dict(self.headers)
    result = self.workers(response_of, self.url, headers, body, secs=self.secs)
    if isinstance(result, Failure):
      raise _CallError(result.message, again=True)
    status, content = result
    text = content.decode(errors="replace")
    shown = " ".join(text.split())[:_NUM_SHOWN]
    if not 200 <= status < 300:
      is_later = status in _LATER or status >= 500
      raise _CallError(f"HTTP status {status}: {shown}", again=is_later)
    try:
      values = json.loads(text)
    except ValueError:
      values = None
    if not isinstance(values, list):
      # It may be cut off, or a page of a proxy.
      raise _CallError(f"expected a JSON list, got {shown!r}", again=True)
    return values


def _json(value: Any) -> bytes:
  # Rows of Parquet files may have dates and the like.
  return json.dumps(value, ensure_ascii=False, default=_as_json).encode()


def _as_json(value: Any) -> Any:
  """Converts values that rows may have, such as pictures and dates, to JSON."""
  if isinstance(value, bytes | bytearray):
    return base64.b64encode(value).decode()
  return value.tolist() if isinstance(value, np.ndarray) else str(value)
