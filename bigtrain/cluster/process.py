"""This process and its job: signals, exit codes, joining other processes.

The program imports this module first and calls `catch_signals`, so that signals
are caught before the slow imports begin. For the same reason this module
imports jax only inside its functions. `join_job` connects the processes of a
job. Afterwards `gather`, `broadcast` and `event` exchange values between them,
and `preempted` tells them when to end after a signal.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import TYPE_CHECKING, Any, NoReturn

from bigtrain.cluster import channel, hub
from bigtrain.cluster.channel import Event, JobError

if TYPE_CHECKING:
  from bigtrain.cluster import launchers
  from bigtrain.config.settings import Config

__all__ = ["Event", "JobError"]

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: schedulers may requeue the job.

_signals: list[int] = []
_profile_requests: list[bool] = []
# Whether `preempted` has been called. From then on all processes end together.
_agrees_on_end = False

# The channel to the job's other processes, and those of its methods that other
# modules use.
job = channel.Channel()
gather = job.gather
broadcast = job.broadcast
event = job.event
require_equal = job.require_equal
report_phase = job.report_phase
host_work_done = job.host_work_done
on_hang = job.on_hang
on_abrupt_end = job.on_abrupt_end


class Preempted(Exception):
  """A signal ended the run. The state, if there was one, has been saved."""


def num_cores() -> int:
  """Number of cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def catch_signals() -> None:
  """Makes SIGTERM, SIGUSR1 and SIGINT save, then exit with code 75.

  A second signal ends the process at once. SIGUSR2 asks for a profile.
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
    if job.joined:
      job.fail(code, f"second signal, {name}", answer_secs=0.5)
    os._exit(code)
  _signals.append(number)
  _print(
    f"{name}: will finish the step, save and exit with {EXIT_PREEMPTED}; "
    "a second signal exits at once."
  )
  job.report_signal(name)


def received() -> list[int]:
  """Signals that ask this process to save and end; callers may clear it."""
  return _signals


def _print(text: str) -> None:
  # Without the logger: a signal may interrupt it while it holds its lock.
  os.write(2, f"bigtrain: {text}\n".encode())


def preempted() -> bool:
  """Whether the job ends now, after a signal; the same on all processes."""
  global _agrees_on_end
  _agrees_on_end = True
  if not job.joined:
    return bool(_signals)
  if _signals:  # It may have come before this process had joined.
    job.report_signal(signal.Signals(_signals[0]).name)
  return job.should_end()


def profile_requested() -> bool:
  """Whether a SIGUSR2 has come since the last call."""
  requested = bool(_profile_requests)
  _profile_requests.clear()
  return requested


def check_preempted() -> None:
  """Raises Preempted after a signal, where there is nothing to save.

  It does nothing once the processes of a job end together (see `preempted`).
  """
  if _signals and not (_agrees_on_end and job.joined):
    raise Preempted(f"{signal.Signals(_signals[0]).name} received")


def join_job(config: "Config") -> None:
  """Joins the job's other processes, if the launcher started several.

  Call it before anything asks jax for its devices. If jax.distributed is
  initialized already, its processes are the job.
  """
  import jax

  from bigtrain.cluster import launchers
  from bigtrain.config.errors import ConfigError, check_kwargs, check_number

  options = config.kwargs("cluster")
  check_kwargs(hub.Times, options, "config.cluster")
  for name, value in options.items():
    check_number(f"config.cluster.{name}", value, above=0)
  times = hub.Times(**options)

  def check(name: str, count: int) -> None:
    expected = config.get(f"expect_{name}")
    if expected not in (None, count):
      raise ConfigError(
        f"config.expect_{name}={expected}: the job has {count}."
      )

  if not jax.distributed.is_initialized():
    place = launchers.detect(timeout_secs=times.join_secs)
    if place is not None:
      check("processes", place.count)  # Before they wait for each other.
      _start_jax(place, times)
    elif (count := _process_count()) > 1:
      raise JobError(
        f"jax detected {count} processes, but the address of "
        "process 0 is unknown: pass --coordinator=HOST:PORT."
      )
  elif jax.process_count() > 1 and not job.joined:
    _join_running(times)
  check("processes", _process_count())
  check("devices", jax.device_count())


def _process_count() -> int:
  """Returns jax.process_count(); its first call makes jax find its devices."""
  import jax

  from bigtrain.config.errors import ConfigError

  try:
    return jax.process_count()
  except AssertionError as e:  # jax's own, without a reason.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    raise ConfigError(
      f"JAX_PLATFORMS={platforms}: jax finds no such devices. Install "
      "bigtrain[cuda] or bigtrain[tpu], look at the driver (nvidia-smi), or "
      "leave JAX_PLATFORMS out, and jax uses what there is."
    ) from e


def _start_jax(place: "launchers.Place", times: hub.Times) -> None:
  """Joins the channel, and then initializes jax.distributed."""
  import jax
  from absl import logging as absl_logging

  host, _, port = place.address.rpartition(":")
  address = host.strip("[]"), int(port)
  job.join([address], place.index, place.count, times, check=check_preempted)
  absl_logging.info(
    "Process %d of %d (launcher: %s); process 0 is at %s.",
    place.index,
    place.count,
    place.launcher,
    place.address,
  )

  def initialize() -> None:
    # jax's handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
      coordinator_address=place.address,
      num_processes=place.count,
      process_id=place.index,
      local_device_ids=place.devices,
      # Otherwise jax would give a process only one of several GPUs.
      cluster_detection_method="deactivate",
      # The messages of jax's own heartbeats are less helpful: ours come first.
      heartbeat_timeout_seconds=int(max(100, 4 * times.heartbeat_secs)),
    )

  # This blocks in C++, where the main thread could not handle signals.
  Background(initialize, "join").result()


def _join_running(times: hub.Times) -> None:
  """Joins the channel of a job whose jax.distributed is initialized already.

  Process 0 opens a port, and sends its addresses to the others through jax.
  """
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  index = jax.process_index()
  listening = None
  text = np.zeros(1024, np.uint8)
  if index == 0:
    listening = hub.listen()
    hosts = [socket.gethostname(), "127.0.0.1"]
    udp = socket.socket(type=socket.SOCK_DGRAM)
    with contextlib.suppress(OSError), udp:
      # Finds this host's own address. It may be any other host: connecting a
      # UDP socket sends nothing.
      udp.connect(("192.0.2.1", 9))
      hosts.insert(0, udp.getsockname()[0])
    port = listening.getsockname()[1]
    content = json.dumps([(host, port) for host in hosts]).encode()
    text[: len(content)] = list(content)
  text = np.asarray(multihost_utils.broadcast_one_to_all(text))
  content = bytes(text).rstrip(b"\0")
  addresses = [(host, port) for host, port in json.loads(content)]
  job.join(
    addresses,
    index,
    jax.process_count(),
    times,
    listening=listening,
    check=check_preempted,
  )


def require_same_run(identity: Callable[[], Mapping[str, Any]]) -> None:
  """Raises ConfigError on all processes if config, code or packages differ."""
  if not job.joined:
    return
  from bigtrain.config.errors import ConfigError

  own = [f"{name}={value!r}" for name, value in sorted(identity().items())]
  by_process = gather(own, "identity")
  first = set(by_process[0])
  problems = []
  for index, values in enumerate(by_process):
    only_here = sorted(set(values) - first)
    if only_here:
      problems.append(f"process {index} has {', '.join(only_here)}")
    only_first = sorted(first - set(values))
    if only_first:
      problems.append(f"process 0 has {', '.join(only_first)}")
  if problems:
    raise ConfigError(
      f"the processes of this job differ: {'; '.join(problems)}."
    )


def end_job(code: int, reason: str, *, hang: bool = False) -> None:
  """Ends all processes of a job with `code`, this one included."""
  agreed = code == EXIT_PREEMPTED and job.ending
  if job.joined and not agreed:
    job.fail(code, reason, hang=hang)


class Background:
  """Runs a function in a thread.

  While C++ code runs in the main thread, Python cannot handle signals. So C++
  calls that may take minutes run in a thread, and the main thread waits in
  `result`.
  """

  def __init__(self, fn: Callable[[], Any], name: str = "background"):
    self._future: futures.Future[Any] = futures.Future()
    self._thread = threading.Thread(
      target=self._run, args=(fn,), daemon=True, name=name
    )
    self._thread.start()

  def _run(self, fn: Callable[[], Any]) -> None:
    try:
      self._future.set_result(fn())
    except BaseException as e:  # Raised again by `result`.
      self._future.set_exception(e)

  @property
  def failed(self) -> bool:
    return self._future.done() and self._future.exception() is not None

  def result(self) -> Any:
    """Waits for the function's result.

    Raises:
      Preempted: after a signal. The process should then end with `exit_now`.
    """
    while not futures.wait([self._future], timeout=0.2).done:
      check_preempted()
    return self._future.result()


def exit_now(code: int) -> NoReturn:
  """Ends the process, without waiting for threads or jax's barriers."""
  if job.joined and not job.failed:
    job.close()
  logging.shutdown()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):  # It may be a file on a full disk.
      stream.flush()
  os._exit(code)
