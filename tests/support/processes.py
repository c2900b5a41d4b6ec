"""Starts processes for tests: one by itself, or several as one job.

Tests do not sleep for a fixed time: they wait for a file, for a line of a log
or for the end of a process, and fail if that takes too long.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from support import compile_cache

TESTS = pathlib.Path(__file__).parents[1]
ROOT = TESTS.parent

# A busy machine needs minutes for what otherwise takes seconds.
LIMIT_SECS = 900.0
_POLL_SECS = 0.02
# Time for the other processes of a job to end after one has failed.
_GRACE_SECS = 30.0


def free_port():
  """Returns a port of the loopback interface that is not in use."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def listens(port):
  """Whether a process listens on a port of the loopback interface."""
  with socket.socket() as visitor:
    return visitor.connect_ex(("127.0.0.1", port)) == 0


def environment(devices=1, **variables):
  """Environment of a process: simulated devices, and imports from tests/.

  Args:
    devices: number of simulated CPU devices.
    variables: more variables, or other values of these.
  """
  return {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": compile_cache.flags(devices),
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS))),
    **variables,
  }


def main_command(config, workdir, *flags):
  """Command line of the program."""
  command = [sys.executable, "-m", "bigtrain.main"]
  return [*command, f"--config={config}", f"--workdir={workdir}", *flags]


def run(command, *, devices=1, timeout=LIMIT_SECS, env=None):
  """Runs a single process to its end; returns a CompletedProcess with text."""
  return subprocess.run(
    command,
    cwd=ROOT,
    env=environment(devices, **(env or {})),
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


class Process:
  """A process that runs in the background.

  Attributes:
    pid: process number.
    log: file of its standard output and standard error.
  """

  def __init__(self, command, env, log, *, group=False):
    """Starts it.

    Args:
      command: program and arguments.
      env: all of its environment.
      log: path of the log.
      group: whether `end` also ends the processes that it has started.
    """
    self.log = log
    self._group = group
    with open(log, "w") as file:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=ROOT,
        start_new_session=group,
      )
    self.pid = self._process.pid

  def send(self, number):
    """Sends a signal."""
    self._process.send_signal(number)

  def wait(self, secs=LIMIT_SECS):
    """Returns the exit code; the negative signal number if a signal killed it.

    Args:
      secs: time limit.
    """
    try:
      return self._process.wait(secs)
    except subprocess.TimeoutExpired:
      raise AssertionError(
        f"still running after {secs:.0f} s:\n{self.text()}"
      ) from None

  def ended(self):
    """Whether it has ended."""
    return self._process.poll() is not None

  def linger(self, secs):
    """Waits for `secs`, or until its end if that comes first."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(secs)

  def kill(self):
    """Sends SIGKILL and waits for the end."""
    self._process.kill()
    self._process.wait()

  def end(self):
    """Ends it if it still runs."""
    if self.ended():
      return
    if not self._group:
      self.kill()
      return
    for number in (signal.SIGTERM, signal.SIGKILL):
      if not self.ended():
        os.killpg(self.pid, number)
        self.linger(_GRACE_SECS)

  def text(self):
    """The log so far."""
    return self.log.read_text(errors="replace")

  def last_line(self):
    """The last line of the log."""
    return self.text().rstrip("\n").rpartition("\n")[2]

  def lines(self, prefix):
    """Lines of the log that begin with `prefix`, without it."""
    return [
      line.removeprefix(prefix)
      for line in self.text().splitlines()
      if line.startswith(prefix)
    ]

  def until(self, condition, what, secs=LIMIT_SECS):
    """Waits for a condition; fails if the process ends before it is true."""
    deadline = time.monotonic() + secs
    while not condition():
      over = self.ended() and not condition()
      if over or time.monotonic() > deadline:
        why = "it ended" if over else f"{secs:.0f} s passed"
        raise AssertionError(f"{why} without {what}:\n{self.text()}")
      time.sleep(_POLL_SECS)

  def until_log_has(self, words):
    """Waits for words in the log."""
    self.until(lambda: words in self.text(), repr(words))

  def until_file(self, path):
    """Waits for a file."""
    self.until(lambda: os.path.exists(path), f"the file {path}")

  def until_catches(self, number):
    """Waits until the process has installed a handler for a signal."""

    def catches():
      status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
      (mask,) = (s for s in status.splitlines() if s.startswith("SigCgt:"))
      return int(mask.split()[1], 16) >> (number - 1) & 1

    self.until(catches, f"a handler for {signal.Signals(number).name}")


class Processes:
  """Starts processes, and ends those that still run at the end of the block.

  Args:
    folder: folder for the logs.
  """

  def __init__(self, folder):
    self._folder = pathlib.Path(folder)
    self._started = []

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()

  def close(self):
    """Ends all processes that still run."""
    for process in self._started:
      process.end()

  def start(self, command, *, devices=1, env=None, log=None, group=False):
    """Starts one process.

    Args:
      command: program and arguments.
      devices: number of simulated CPU devices.
      env: variables, in addition to those of `environment`.
      log: path of the log; a new file of the folder if None.
      group: whether to end the processes that it has started with it.
    """
    log = log or self._folder / f"process-{len(self._started)}.log"
    env = environment(devices, **(env or {}))
    process = Process(command, env, log, group=group)
    self._started.append(process)
    return process

  def start_job(self, command, count=2, *, devices=1, env=None):
    """Starts `count` processes of a command as one job on the loopback."""
    port = free_port()
    return [
      self.start(
        command,
        devices=devices,
        env={**(env or {}), **job_variables(port, count, index)},
      )
      for index in range(count)
    ]


def job_variables(port, count, index):
  """Environment variables that make a process one of a job."""
  return {
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    "JAX_NUM_PROCESSES": str(count),
    "JAX_PROCESS_ID": str(index),
  }


def job_flags(port, count, index):
  """Command-line flags of the program that do the same."""
  return (
    f"--coordinator=127.0.0.1:{port}",
    f"--num_processes={count}",
    f"--process_id={index}",
  )


def exit_codes(job, secs=LIMIT_SECS):
  """Waits for all processes of a job; returns their exit codes.

  Args:
    job: list of `Process`.
    secs: time limit for all of them together.
  """
  deadline = time.monotonic() + secs
  return [p.wait(max(0.1, deadline - time.monotonic())) for p in job]


def run_job(
  command, folder, count=2, *, devices=1, code=0, env=None, secs=LIMIT_SECS
):
  """Runs a job to its end and checks the exit code of every process.

  Args:
    command: program and arguments, the same for all processes.
    folder: folder for the logs.
    count: number of processes.
    devices: number of simulated CPU devices of each process.
    code: expected exit code.
    env: more environment variables.
    secs: time limit.

  Returns:
    The list of `Process`es, all ended.
  """
  with Processes(folder) as processes:
    job = processes.start_job(command, count, devices=devices, env=env)
    deadline = time.monotonic() + secs
    while not all(p.ended() for p in job) and time.monotonic() < deadline:
      if any(p.ended() and p.wait() != code for p in job):
        deadline = min(deadline, time.monotonic() + _GRACE_SECS)
      time.sleep(_POLL_SECS)
    codes = [p.wait() if p.ended() else "still running" for p in job]
  logs = "\n".join(f"{p.log}:\n{p.text()[-3000:]}" for p in job)
  assert codes == [code] * count, f"exit codes {codes}\n{logs}"
  return job
