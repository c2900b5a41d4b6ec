"""The process and its job: signals, exit codes, joining other processes.

Importing this module is quick and does not load jax, so that signals can be
caught before the slow imports begin. What processes tell each other while they
run is in job.py; alone, a process has no job.
"""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
  from bigtrain.cluster import launchers

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: schedulers may requeue the job.

# Seconds, the defaults of config.cluster.
_TIMES = {"join_secs": 300.0, "heartbeat_secs": 30.0, "straggler_secs": 60.0}

_signals: list[int] = []
_job: Any = None  # The connection to the job's other processes, if any.
_agreeing = False  # Whether `preempted` was asked: the processes are in step.
_on_hang: list[Callable[[], Any]] = []


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
    code = EXIT_PREEMPTED if number != signal.SIGINT else 128 + number
    if _job is not None:
      _job.last_word(code, f"{name} again")
    os._exit(code)
  _signals.append(number)
  _say(
    f"{name}: will finish the step, save and exit with {EXIT_PREEMPTED}; "
    "once more ends at once."
  )
  if _job is not None:
    _job.signalled(name)


def _say(text: str) -> None:
  # A handler may interrupt any code, also the logger while it holds its lock.
  os.write(2, f"bigtrain: {text}\n".encode())


def preempted() -> bool:
  """Whether the job is to end here because a process of it got a signal.

  All processes call it equally often; the answer is the same on all of them.
  Called where the state can be saved.
  """
  global _agreeing
  _agreeing = True
  return bool(_signals) if _job is None else _job.tick()


def check_preempted() -> None:
  """Raises Preempted if a signal has come; for where nothing is to save.

  Once the processes of a job agree on their end (`preempted`), none of them
  ends by itself.
  """
  if _signals and not (_agreeing and _job is not None):
    raise Preempted(f"{signal.Signals(_signals[0]).name} received")


def join(config: Any) -> None:
  """Joins the job's other processes where there are some.

  That is where its launcher says so (launchers.py). Called before jax is asked
  for its devices.

  Reads config.cluster: `join_secs` (300), how long to wait for the others;
  `heartbeat_secs` (30), silence after which one counts as gone;
  `straggler_secs` (60), between two looks for stragglers. And
  config.expect_processes and config.expect_devices.

  Raises:
    ConfigError: these are wrong, or there are not as many as expected.
    RuntimeError: the others did not come.
  """
  import jax

  from bigtrain import settings
  from bigtrain.cluster import launchers

  options = config.kwargs("cluster")
  times = {}
  for name, default in _TIMES.items():
    times[name] = options.pop(name, default)
    if isinstance(times[name], bool) or not isinstance(
      times[name], int | float
    ):
      raise settings.ConfigError(
        f"config.cluster.{name}: expected seconds, got {times[name]!r}."
      )
  for name in options:
    hint = settings.did_you_mean(name, _TIMES)
    raise settings.ConfigError(f"config.cluster.{name}: unknown key.{hint}")
  expected = {
    name: config.get(f"expect_{name}") for name in ("processes", "devices")
  }

  def check(name: str, found: int) -> None:
    if expected[name] not in (None, found):
      raise settings.ConfigError(
        f"config.expect_{name}={expected[name]}: there are {found}."
      )

  if not jax.distributed.is_initialized():
    place = launchers.find(timeout_secs=times["join_secs"])
    if place is not None:
      check("processes", place.count)  # Before they wait for each other.
      _form_job(place, times)
    elif jax.process_count() > 1:
      raise RuntimeError(
        f"jax has found {jax.process_count()} processes, but nothing told this "
        "one where process 0 is: give --coordinator=HOST:PORT."
      )
  check("processes", jax.process_count())
  check("devices", jax.device_count())


def _form_job(place: "launchers.Place", times: Mapping[str, float]) -> None:
  """Meets the other processes, and starts jax's runtime for all of them."""
  global _job
  import jax
  from absl import logging as absl_logging

  from bigtrain.cluster import connection, rendezvous

  address, count, index = place.address, place.count, place.index
  made = connection.Job(
    index,
    count,
    heartbeat_secs=times["heartbeat_secs"],
    report_secs=times["straggler_secs"],
    on_hang=_tell_hang,
  )
  port = made.listen() if index == 0 else 0
  token = rendezvous.meet(
    address,
    index,
    count,
    timeout_secs=times["join_secs"],
    token={"port": port, "secret": secrets.token_hex(16)},
    check=check_preempted,
  )
  host = address.rpartition(":")[0].strip("[]") if index else "localhost"
  try:
    made.connect(host, token["port"], secret=token["secret"], timeout_secs=60.0)
  except OSError as e:
    raise RuntimeError(
      f"process {index} cannot reach process 0 at {host} port "
      f"{token['port']}: {e}; is it open between the hosts?"
    ) from e
  _job = made
  absl_logging.info(
    "Process %d of %d, says %s; process 0 is at %s.",
    index,
    count,
    place.launcher,
    address,
  )
  if _signals:
    made.signalled(signal.Signals(_signals[0]).name)

  def initialize() -> None:
    # Its handler of SIGTERM would take the place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    # Its own heartbeats end a job too, but say less: ours come first.
    jax.distributed.initialize(
      coordinator_address=address,
      num_processes=count,
      process_id=index,
      local_device_ids=place.devices,
      # All is known; jax would leave a process one of several GPUs.
      cluster_detection_method="deactivate",
      heartbeat_timeout_seconds=int(max(100, 4 * times["heartbeat_secs"])),
    )

  # In C++ the main thread would be deaf to signals.
  Background(initialize, "join").result()


def require_same_run(identity: Callable[[], Mapping[str, Any]]) -> None:
  """Refuses processes that differ in what they run.

  Args:
    identity: gives this process's values, as JSON has them, by name.

  Raises:
    ConfigError: on all processes, naming which differs from process 0 in what.
  """
  if _job is None:
    return
  from bigtrain import settings
  from bigtrain.cluster import peers

  mine = [f"{name}={value!r}" for name, value in sorted(identity().items())]
  everybody = peers.Peers(timeout_secs=_TIMES["join_secs"]).share(mine)
  problems = []
  for index, theirs in enumerate(everybody):
    if others := sorted(set(theirs) - set(everybody[0])):
      problems.append(f"process {index} has {', '.join(others)}")
    if missing := sorted(set(everybody[0]) - set(theirs)):
      problems.append(f"process 0 has {', '.join(missing)}")
  if problems:
    raise settings.ConfigError(
      f"the processes of this job differ: {'; '.join(problems)}."
    )


def require_equal(name: str, value: Any) -> None:
  """Ends the job with code 2 if other processes have another value of `name`.

  Unlike `agree` it waits for nobody, so threads may call it.

  Args:
    name: of what all must have in common, in a config's words.
    value: anything that JSON has.
  """
  if _job is not None:
    _job.same(name, value)


def at(phase: str, step: int) -> None:
  """Notes what this process is doing, for what the others say of it."""
  if _job is not None:
    _job.at(phase, step)


def dispatches() -> None:
  """Notes that the device's part of the step begins, which needs all hosts.

  What took until here is host work, and a host that does not come here is one
  that the others wait for.
  """
  if _job is not None:
    _job.dispatches()


def at_abrupt_end(release: Callable[[], None]) -> None:
  """Has `release` called if another process makes this one end."""
  if _job is not None:
    _job.at_abrupt_end(release)


def on_hang(tell: Callable[[], Any]) -> None:
  """Has `tell` called before the end if any process of the job hangs."""
  _on_hang[:] = [tell]


def _tell_hang() -> None:
  for tell in _on_hang:
    tell()


def fail(code: int, reason: str, *, hang: bool = False) -> None:
  """Has all processes of the job end with `code`; alone it does nothing.

  This one ends as well, saying which process failed first and why.
  """
  if _job is not None and not (code == EXIT_PREEMPTED and _job.agreed):
    _job.fail(code, reason, hang=hang)


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

  @property
  def failed(self) -> bool:
    """Whether `fn` has raised something, for `result` to raise."""
    return bool(self._outcome) and not self._outcome[0][0]

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
  if _job is not None and not _job.failed:
    _job.close()
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
