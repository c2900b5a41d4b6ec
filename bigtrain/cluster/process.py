"""The process and its job: signals, exit codes, joining other processes.

Importing this module is quick and does not load jax, so that signals can be
caught before the slow imports begin. Running processes communicate through
connection.py; a process that runs alone has no connection.
"""

import contextlib
import gc
import itertools
import json
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
_profile_requests: list[bool] = []
_connection: Any = None  # To the job's other processes; None if alone.
_agrees_on_end = False  # Whether `preempted` was called: processes are in step.
_on_hang: list[Callable[[], Any]] = []
_num_comparisons = itertools.count()
_num_broadcasts = itertools.count()
# Process 0 is a few steps ahead at most, with a few broadcasts each.
_KEPT_BROADCASTS = 1000


class Preempted(Exception):
  """A signal ended the run; the state, if any, is saved."""


def begin() -> None:
  """Does what comes before the slow imports: see `catch_signals`.

  Imports and traces leave a million objects that stay alive. Collecting garbage
  among them, as often as Python does, takes a tenth of the time of an import.
  """
  gc.set_threshold(50_000, 20, 20)
  catch_signals()


def catch_signals() -> None:
  """Makes SIGTERM, SIGUSR1 and SIGINT save, then exit with code 75.

  The first signal is only recorded, for `preempted` to report; a second one
  ends the process at once. SIGUSR2 asks for a profile instead, see
  `profile_requested`. Call this from the main thread.
  """
  for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, _on_signal)
  signal.signal(signal.SIGUSR2, lambda *_: _profile_requests.append(True))


def _on_signal(number: int, frame: Any) -> None:
  name = signal.Signals(number).name
  if _signals:
    _print(
      f"second signal, {name}: exiting now; the last checkpoint is intact."
    )
    code = EXIT_PREEMPTED if number != signal.SIGINT else 128 + number
    if _connection is not None:
      _connection.fail_now(code, f"second signal, {name}")
    os._exit(code)
  _signals.append(number)
  _print(
    f"{name}: will finish the step, save and exit with {EXIT_PREEMPTED}; "
    "a second signal exits at once."
  )
  if _connection is not None:
    _connection.report_signal(name)


def received() -> list[int]:
  """Signals that ask this process to save and end; a caller may change it."""
  return _signals


def _print(text: str) -> None:
  # A handler may interrupt any code, even the logger while it holds its lock.
  os.write(2, f"bigtrain: {text}\n".encode())


def preempted() -> bool:
  """Whether the job ends here because one of its processes got a signal.

  All processes call this equally often, at points where the state can be
  saved; the answer is the same on all of them.
  """
  global _agrees_on_end
  _agrees_on_end = True
  if _connection is None:
    return bool(_signals)
  return _connection.should_end()


def profile_requested() -> bool:
  """Whether SIGUSR2 has come since the last call."""
  requested = bool(_profile_requests)
  _profile_requests.clear()
  return requested


def check_preempted() -> None:
  """Raises Preempted after a signal, where there is nothing to save.

  Does nothing once the processes of a job agree on their end (`preempted`):
  then none of them may end by itself.
  """
  if _signals and not (_agrees_on_end and _connection is not None):
    raise Preempted(f"{signal.Signals(_signals[0]).name} received")


def join_job(config: Any) -> None:
  """Joins the job's other processes, if the launcher started several.

  See launchers.py for how a job is detected. Call this before jax is asked
  for its devices.

  Reads config.cluster: `join_secs` (300), time limit for all processes to
  join; `heartbeat_secs` (30), silence after which a process counts as lost;
  `straggler_secs` (60), interval between two checks for stragglers. Also reads
  config.expect_processes and config.expect_devices.

  Raises:
    ConfigError: one of these is wrong, or the job has another number of
      processes or devices than expected.
    RuntimeError: other processes did not join, or cannot be reached.
  """
  import jax

  from bigtrain import settings
  from bigtrain.cluster import launchers

  options = config.kwargs("cluster")
  times = {
    name: settings.check_number(
      f"config.cluster.{name}", options.pop(name, default), above=0
    )
    for name, default in _TIMES.items()
  }
  for name in options:
    hint = settings.did_you_mean(name, _TIMES)
    raise settings.ConfigError(f"config.cluster.{name}: unknown key.{hint}")
  expected = {
    name: config.get(f"expect_{name}") for name in ("processes", "devices")
  }

  def check(name: str, count: int) -> None:
    if expected[name] not in (None, count):
      raise settings.ConfigError(
        f"config.expect_{name}={expected[name]}: the job has {count}."
      )

  if not jax.distributed.is_initialized():
    place = launchers.detect(timeout_secs=times["join_secs"])
    if place is not None:
      check("processes", place.count)  # Before they wait for each other.
      _form_job(place, times)
    elif jax.process_count() > 1:
      raise RuntimeError(
        f"jax detected {jax.process_count()} processes, but the address of "
        "process 0 is unknown: pass --coordinator=HOST:PORT."
      )
  check("processes", jax.process_count())
  check("devices", jax.device_count())


def _form_job(place: "launchers.Place", times: Mapping[str, float]) -> None:
  """Waits for the other processes and starts jax's runtime on all of them."""
  global _connection
  import jax
  from absl import logging as absl_logging

  from bigtrain.cluster import connection, rendezvous

  address, count, index = place.address, place.count, place.index
  joined = connection.Connection(
    index,
    count,
    heartbeat_secs=times["heartbeat_secs"],
    report_secs=times["straggler_secs"],
    on_hang=_call_on_hang,
  )
  port = joined.listen() if index == 0 else 0
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
    joined.connect(
      host, token["port"], secret=token["secret"], timeout_secs=60.0
    )
  except OSError as e:
    raise RuntimeError(
      f"process {index} cannot reach process 0 at {host} port "
      f"{token['port']}: {e}; is the port open between the hosts?"
    ) from e
  _connection = joined
  absl_logging.info(
    "Process %d of %d (launcher: %s); process 0 is at %s.",
    index,
    count,
    place.launcher,
    address,
  )
  if _signals:
    joined.report_signal(signal.Signals(_signals[0]).name)

  def initialize() -> None:
    # jax's handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    # jax's own heartbeats end a job too, with less helpful messages: give ours
    # time to come first.
    jax.distributed.initialize(
      coordinator_address=address,
      num_processes=count,
      process_id=index,
      local_device_ids=place.devices,
      # With detection on, jax would give a process only one of several GPUs.
      cluster_detection_method="deactivate",
      heartbeat_timeout_seconds=int(max(100, 4 * times["heartbeat_secs"])),
    )

  # This blocks in C++, where the main thread could not handle signals.
  Background(initialize, "join").result()


def require_same_run(identity: Callable[[], Mapping[str, Any]]) -> None:
  """Compares config, code and packages of all processes; waits for them.

  Raises:
    ConfigError: on all processes, naming every value that differs from process
      0's and its process.
  """
  if _connection is None:
    return
  from bigtrain import settings

  own = [f"{name}={value!r}" for name, value in sorted(identity().items())]
  key = f"bigtrain/require_same_run/{next(_num_comparisons)}"
  by_process = share(key, own, _TIMES["join_secs"])
  problems = []
  for index, values in enumerate(by_process):
    if others := sorted(set(values) - set(by_process[0])):
      problems.append(f"process {index} has {', '.join(others)}")
    if missing := sorted(set(by_process[0]) - set(values)):
      problems.append(f"process 0 has {', '.join(missing)}")
  if problems:
    raise settings.ConfigError(
      f"the processes of this job differ: {'; '.join(problems)}."
    )


def require_equal(name: str, value: Any) -> None:
  """Ends the job with code 2 if processes pass different values for `name`.

  Unlike `require_same_run` this returns at once, so threads may call it.
  """
  if _connection is not None:
    _connection.require_equal(name, value)


def share(key: str, value: Any, timeout_secs: float) -> list[Any]:
  """Returns the values of all processes, by process; acts as a barrier.

  Uses the key-value store of jax.distributed, not the devices, so threads may
  call it while the devices train.

  Raises:
    JaxRuntimeError: a process did not share its value in time.
  """
  import jax

  count = jax.process_count()
  if count == 1:
    return [value]
  # jax has no public way to its key-value store.
  from jax._src import distributed

  client = distributed.global_state.client
  client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
  timeout = int(timeout_secs * 1000)
  return [
    json.loads(client.blocking_key_value_get(f"{key}/{i}", timeout))
    for i in range(count)
  ]


def broadcast(value: Any) -> Any:
  """Returns process 0's value on all processes.

  Unlike a collective of jax this waits for process 0 only, and for no device.
  All processes call it equally often.
  """
  import jax

  if jax.process_count() == 1:
    return value
  # jax has no public way to its key-value store.
  from jax._src import distributed

  client = distributed.global_state.client
  number = next(_num_broadcasts)
  if jax.process_index() == 0:
    client.key_value_set(f"bigtrain/broadcast/{number}", json.dumps(value))
    if number >= _KEPT_BROADCASTS:
      old = number - _KEPT_BROADCASTS
      client.key_value_delete(f"bigtrain/broadcast/{old}")
    return value
  timeout = 24 * 3600 * 1000  # Longer than the watchdog's limits.
  return json.loads(
    client.blocking_key_value_get(f"bigtrain/broadcast/{number}", timeout)
  )


def report_phase(phase: str, step: int) -> None:
  """Reports the current phase to process 0, for its messages."""
  if _connection is not None:
    _connection.report_phase(phase, step)


def host_work_done() -> None:
  """Reports that the host's part of the step is done; the device's begins.

  The device's part needs all hosts. The time up to here is host work, and a
  host that takes longer than the others is a straggler.
  """
  if _connection is not None:
    _connection.host_work_done()


def on_abrupt_end(release: Callable[[], None]) -> None:
  """Calls `release` if another process makes this one end."""
  if _connection is not None:
    _connection.on_abrupt_end(release)


def on_hang(report: Callable[[], Any]) -> None:
  """Calls `report` before the end if any process of the job hangs."""
  _on_hang[:] = [report]


def _call_on_hang() -> None:
  for report in _on_hang:
    report()


def end_job(code: int, reason: str, *, hang: bool = False) -> None:
  """Ends all processes of the job with `code`; does nothing in a single one.

  This process ends too, with a message that names the process that failed
  first and its reason.
  """
  if _connection is None:
    return
  if code == EXIT_PREEMPTED and _connection.ending:
    return  # All processes have agreed on it already.
  _connection.fail(code, reason, hang=hang)


class Background:
  """Runs `fn`, which may spend minutes in C++, in a thread of its own.

  Python runs signal handlers between byte codes of the main thread only, so
  the program could not handle signals during a long compilation there.
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
    """Whether `fn` has raised an exception, which `result` will raise."""
    return bool(self._outcome) and not self._outcome[0][0]

  def result(self) -> Any:
    """Waits for `fn`; returns its result or raises its exception.

    Raises:
      Preempted: a signal came first. The thread goes on; the process should
        end with `exit_now`.
    """
    while self._thread.is_alive():
      self._thread.join(timeout=0.2)
      if self._thread.is_alive():
        check_preempted()
    succeeded, value = self._outcome[0]
    if not succeeded:
      raise value
    return value


def exit_now(code: int) -> NoReturn:
  """Ends the process with `code` now, without waiting for other threads.

  Interpreter shutdown would wait for a thread that compiles and, with several
  processes, for a barrier that a failed one never reaches.
  """
  if _connection is not None and not _connection.failed:
    _connection.close()
  logging.shutdown()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):  # It may be a file on a full disk.
      stream.flush()
  os._exit(code)
