"""The process and its job: signals, exit codes, joining other processes.

Importing this module is quick and does not load jax, so that signals can be
caught before the slow imports begin.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: schedulers may requeue the job.

# Where srun and mpirun say how many processes they started.
_NUM_PROCESSES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

_signals: list[int] = []


class Preempted(Exception):
  """Ends the run after a signal; what had to be saved is saved."""


def catch_signals() -> None:
  """SIGTERM, SIGUSR1 and SIGINT ask for a save and an end with code 75.

  The first signal is only noted, for `preempted` to report; a second one ends
  the process at once. Called from the main thread.
  """
  for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, _on_signal)


def _on_signal(number: int, frame: Any) -> None:
  name = signal.Signals(number).name
  if _signals:
    _say(f"{name} again: ending at once; the last checkpoint stands.")
    os._exit(EXIT_PREEMPTED if number != signal.SIGINT else 128 + number)
  _signals.append(number)
  _say(
    f"{name}: will finish the step, save and exit with {EXIT_PREEMPTED}; "
    "once more ends at once."
  )


def _say(text: str) -> None:
  # A handler may interrupt any code, also the logger while it holds its lock.
  os.write(2, f"bigtrain: {text}\n".encode())


def preempted() -> bool:
  """Whether a signal has asked this process to end."""
  return bool(_signals)


def check_preempted() -> None:
  """Raises Preempted if a signal has come; for where nothing is to save."""
  if preempted():
    raise Preempted(f"{signal.Signals(_signals[0]).name} received")


def join() -> None:
  """Joins the job's other processes where the environment speaks of several.

  That is under srun and mpirun, and wherever JAX_COORDINATOR_ADDRESS,
  JAX_NUM_PROCESSES and JAX_PROCESS_ID are set; anything else is a process
  alone. Called before jax is asked for its devices.
  """
  import jax

  if jax.distributed.is_initialized():
    return
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize(
      coordinator_address=os.environ["JAX_COORDINATOR_ADDRESS"],
      num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
      process_id=int(os.environ["JAX_PROCESS_ID"]),
    )
  elif any(int(os.environ.get(name, 1)) > 1 for name in _NUM_PROCESSES):
    jax.distributed.initialize()  # It knows these environments.


class Background:
  """Runs `fn`, which may take minutes in C++, in a thread of its own.

  Python runs signal handlers between byte codes of the main thread only; a
  long compilation there would make the program deaf to signals.
  """

  def __init__(self, fn: Callable[[], Any], name: str = "background"):
    self._outcome: list[tuple[bool, Any]] = []
    self._thread = threading.Thread(
      target=self._run, args=(fn,), daemon=True, name=name
    )
    self._thread.start()

  def _run(self, fn: Callable[[], Any]) -> None:
    try:
      self._outcome.append((True, fn()))
    except BaseException as e:  # Raised again by `result`.
      self._outcome.append((False, e))

  def result(self) -> Any:
    """What `fn` returns or raises.

    Raises:
      Preempted: a signal came first; the thread is left behind, and the
        process is expected to end with `leave`.
    """
    while self._thread.is_alive():
      self._thread.join(timeout=0.2)
      if self._thread.is_alive():
        check_preempted()
    succeeded, value = self._outcome[0]
    if not succeeded:
      raise value
    return value


def leave(code: int) -> NoReturn:
  """Ends the process with `code` now, whatever threads are still doing.

  Interpreter shutdown would wait for a thread that compiles, and with several
  processes for a barrier that a failed one never reaches.
  """
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
