"""Runs the variants of a sweep as processes on this machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError
from bigtrain.tools import runs
from bigtrain.tools.sweep import results

_POLL_SECS = 0.1  # Between looks at the processes.
# Signals that are passed on to the runs.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class _Child:
  """A run in a process; its output goes to a log."""

  def __init__(
    self,
    entry: results.Entry,
    command: list[str],
    variables: dict[str, str],
    log: str,
  ):
    self.entry = entry
    self.variables = variables  # Of the environment, such as its GPUs.
    self._log = log
    self._began = time.monotonic()
    with open(log, "ab") as file:
      self._log_start = file.tell()
      self.process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        # Otherwise Ctrl-C would reach it twice: from the terminal and from
        # `_forwarding`. A second signal ends a run at once.
        start_new_session=True,
      )

  def has_ended(self, was_signalled: bool) -> bool:
    """Whether the process has ended; if so, the entry gets its new state."""
    code = self.process.poll()
    if code is None:
      return False
    self.entry.secs = time.monotonic() - self._began
    self.entry.reason = ""
    if code == process.EXIT_OK:
      self.entry.state = results.FINISHED
    elif code == process.EXIT_PREEMPTED or was_signalled:
      self.entry.state = results.INTERRUPTED
    else:
      self.entry.state = results.FAILED
      if code < 0:
        self.entry.reason = f"killed by {signal.Signals(-code).name}"
      else:
        line = last_line(self._log, self._log_start)
        self.entry.reason = line or f"code {code}"
    return True


def last_line(path: str, start: int = 0) -> str:
  """The last line of a log that is not empty, from a position on."""
  with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
    file.seek(max(start, os.path.getsize(path) - 20_000))
    for line in reversed(file.read().decode(errors="replace").splitlines()):
      if line.strip():
        return line.strip()
  return ""


def run(
  table: results.Results,
  command: Callable[[results.Entry], list[str]],
  jobs: int,
  logs: str,
) -> bool:
  """Runs the variants that have not finished, `jobs` at a time.

  A signal goes to all running processes, which save and end. A second one ends
  them at once, and a third one kills them. Returns whether a signal came.
  """
  free = _devices(jobs)  # Variables of the jobs that can start now.
  os.makedirs(logs, exist_ok=True)
  waiting = _waiting(table)
  places = {
    entry.variant.name: f"[{i}/{len(table.entries)}] {entry.variant.name}"
    for i, entry in enumerate(table.entries, start=1)
  }
  running: list[_Child] = []
  with _forwarding(running) as signals:
    try:
      while running or (waiting and not signals):
        while waiting and free and not signals:
          entry = waiting.pop(0)
          place = places[entry.variant.name]
          log = os.path.join(logs, f"{entry.variant.name}.log")
          child = _Child(entry, command(entry), free.pop(0), log)
          running.append(child)
          if signals:  # A signal that came while it started.
            child.process.send_signal(signals[-1])
          entry.state = results.RUNNING
          print(f"{place}: started, log {os.path.relpath(log)}", flush=True)
          table.write()
        ended = [one for one in running if one.has_ended(bool(signals))]
        for child in ended:
          running.remove(child)
          free.append(child.variables)
          table.write()
          entry = child.entry
          words = [
            entry.state,
            table.result(entry),
            f"{entry.secs:.0f} s",
            entry.reason,
          ]
          text = ", ".join(word for word in words if word)
          print(f"{places[entry.variant.name]}: {text}", flush=True)
        time.sleep(_POLL_SECS)
    finally:
      for child in running:  # Only if this function has raised.
        child.process.kill()
        child.process.wait()
  return bool(signals)


def _waiting(table: results.Results) -> list[results.Entry]:
  """The entries to run; another process may already run some."""
  waiting = []
  for entry in table.entries:
    if runs.state(entry.workdir, {}) == "running":
      print(
        f"{entry.variant.name}: runs in another process; not started.",
        flush=True,
      )
    elif entry.state != results.FINISHED:
      entry.state = results.WAITING
      entry.reason = ""
      waiting.append(entry)
  return waiting


@contextlib.contextmanager
def _forwarding(children: list[_Child]) -> Iterator[list[int]]:
  """Sends this process's signals to the children; yields the list of them."""
  received: list[int] = []

  def forward(number: int, frame: FrameType | None) -> None:
    received.append(number)
    # SIGTERM for all signals: a terminal that closes sends SIGHUP, which a run
    # does not handle.
    to_send = signal.SIGKILL if len(received) > 2 else signal.SIGTERM
    for child in list(children):
      child.process.send_signal(to_send)
    text = "passed on; a second signal ends the runs without saving"
    os.write(2, f"sweep: {signal.Signals(number).name}: {text}.\n".encode())

  earlier = {
    number: signal.signal(number, forward)
    for number in _SIGNALS
    if signal.getsignal(number) != signal.SIG_IGN  # As nohup has it.
  }
  try:
    yield received
  finally:
    for number, handler in earlier.items():
      signal.signal(number, handler)


def _devices(jobs: int) -> list[dict[str, str]]:
  """Environment variables of each job, which share the GPUs among them."""
  gpus = _gpus()
  if jobs == 1 or not gpus:
    return [{} for _ in range(jobs)]
  if len(gpus) < jobs:
    raise ConfigError(
      f"--jobs={jobs}: each needs a GPU, and there are {len(gpus)}."
    )
  share = len(gpus) // jobs
  return [
    {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * share : (i + 1) * share])}
    for i in range(jobs)
  ]


def _gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
  """Numbers or names of the GPUs that this process may use."""
  if environment.get("JAX_PLATFORMS") == "cpu":
    return []
  if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
    return [name for name in visible.split(",") if name]
  if not shutil.which("nvidia-smi"):
    return []
  listed = subprocess.run(
    ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
  )
  return [str(i) for i, _ in enumerate(listed.stdout.splitlines())]
