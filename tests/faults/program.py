"""Starts the real program with a tiny config, and reads what it leaves.

Nothing here sleeps and hopes: a test waits for a file, a line of the log or
the end of a process, and fails when it takes too long.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny

from bigtrain.checkpoints import folders
from bigtrain.data import arrays

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
CONFIG = HERE / "tiny_config.py"
NUM_TRAIN = 80  # Ten batches.
NUM_VAL = 20  # The last batch is not full.

# A machine that is busy takes minutes over what takes seconds.
LIMIT_SECS = 300.0
_POLL_SECS = 0.02


def digits():
  """{"train", "val": arrays}: images, labels, and an id for each."""
  found = arrays.Source(name="digits").read(np.arange(NUM_TRAIN + NUM_VAL))
  found["id"] = np.arange(NUM_TRAIN + NUM_VAL, dtype=np.int32) + 1000
  found["label"] = found["label"].astype(np.int32)
  return {
    "train": {k: v[:NUM_TRAIN] for k, v in found.items()},
    "val": {k: v[NUM_TRAIN:] for k, v in found.items()},
  }


def write_data(folder, **replaced):
  """Writes train.npz and val.npz; `replaced` are arrays for one of them."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in {**digits(), **replaced}.items():
    np.savez(folder / f"{name}.npz", **content)


def free_port():
  """A port where nobody listens."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def listens(port):
  """Whether somebody does."""
  with socket.socket() as visitor:
    return visitor.connect_ex(("127.0.0.1", port)) == 0


def flags_of(port, count, index):
  """Of one of several processes on this machine."""
  return (
    f"--coordinator=127.0.0.1:{port}",
    f"--num_processes={count}",
    f"--process_id={index}",
  )


class Process:
  """A run of the program.

  Attributes:
    pid: its number.
    log: file of what it says.
  """

  def __init__(self, command, env, log):
    self.log = log
    with open(log, "w") as file:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=ROOT,
      )
    self.pid = self._process.pid

  def send(self, number):
    """Sends a signal."""
    self._process.send_signal(number)

  def wait(self, secs=LIMIT_SECS):
    """The exit code; negative for the signal that ended it."""
    try:
      return self._process.wait(secs)
    except subprocess.TimeoutExpired:
      raise AssertionError(
        f"not at its end after {secs:.0f} s:\n{self.text()}"
      ) from None

  def ended(self):
    """Whether it has ended."""
    return self._process.poll() is not None

  def linger(self, secs):
    """Waits so long, or until its end if that comes first."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(secs)

  def kill(self):
    """SIGKILL, and waits."""
    self._process.kill()
    self._process.wait()

  def text(self):
    """All that it said so far."""
    return self.log.read_text(errors="replace")

  def last_line(self):
    """The last line of that."""
    return self.text().rstrip("\n").rpartition("\n")[2]

  def until(self, condition, what, secs=LIMIT_SECS):
    """Waits for a condition; fails if the process ends before."""
    deadline = time.monotonic() + secs
    while not condition():
      over = self.ended() and not condition()
      if over or time.monotonic() > deadline:
        why = "it ended" if over else f"{secs:.0f} s passed"
        raise AssertionError(f"{why} without {what}:\n{self.text()}")
      time.sleep(_POLL_SECS)

  def until_says(self, words):
    """Waits for words in its log."""
    self.until(lambda: words in self.text(), repr(words))

  def until_file(self, path):
    """Waits for a file."""
    self.until(lambda: os.path.exists(path), f"the file {path}")

  def until_catches(self, number):
    """Waits until it has a handler for a signal: as early as can be."""

    def catches():
      status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
      (mask,) = (s for s in status.splitlines() if s.startswith("SigCgt:"))
      return int(mask.split()[1], 16) >> (number - 1) & 1

    self.until(catches, f"a handler for {signal.Signals(number).name}")


class Program:
  """Starts the program, as often as a test likes.

  Args:
    shared: folder of what all runs share: data, and the compilation cache.
    env: more variables of the processes.
  """

  def __init__(self, shared, env=None):
    self.data = shared / "data"
    self._shared = shared
    self._env = env or {}
    self._cache = shared / "compile_cache"
    self._processes = []

  def start(
    self,
    workdir,
    *changes,
    fault=(),
    devices=1,
    data=None,
    model="net",
    cached=True,
    flags=(),
    config=None,
  ):
    """Starts a process.

    Args:
      workdir: of the run; logs are written beside it, or beside the data if
        it is in an object store.
      changes: "key=value" for --config.key=value.
      fault: arguments of run_with_fault.py; none for the plain program.
      devices: simulated ones.
      data: another folder of train.npz and val.npz.
      model: the config's.
      cached: whether what was compiled before need not be compiled again.
      flags: more of the command line.
      config: another than the tiny one, with its arguments.
    """
    beside = pathlib.Path(workdir)
    if "://" in str(workdir):
      beside = self._shared / beside.name
    default = f"{CONFIG}:data={data or self.data},model={model}"
    plain = [sys.executable, "-m", "bigtrain.main"]
    faulty = [sys.executable, "-m", "faults.run_with_fault", *fault, "--"]
    command = [
      *(faulty if fault else plain),
      f"--config={config or default}",
      f"--workdir={workdir}",
      f"--config.compile_cache={self._cache if cached else False}",
      *(f"--config.{change}" for change in changes),
      *flags,
    ]
    env = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
      "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
      "PYTHONDONTWRITEBYTECODE": "1",
      **self._env,
    }
    number = len(list(beside.parent.glob(f"{beside.name}.*.log")))
    log = beside.parent / f"{beside.name}.{number}.log"
    process = Process(command, env, log)
    self._processes.append(process)
    return process

  def run(self, workdir, *changes, code=0, **options):
    """Starts a process, waits for its end and checks its exit code."""
    process = self.start(workdir, *changes, **options)
    found = process.wait()
    assert found == code, f"exit code {found}:\n{process.text()}"
    return process

  def start_job(self, workdir, *changes, each=({}, {}), **options):
    """Starts the processes of one job.

    Args:
      workdir, changes, options: as for `start`.
      each: for each process its own options; "changes" are more changes.
    """
    port = free_port()
    job = []
    for index, own in enumerate(each):
      own = {**options, **own}
      flags = flags_of(port, len(each), index)
      own_changes = (*changes, *own.pop("changes", ()))
      if own.pop("starts", True):
        job.append(self.start(workdir, *own_changes, flags=flags, **own))
    return job

  def close(self):
    """Leaves no process behind."""
    for process in self._processes:
      if not process.ended():
        process.kill()


def path_of(workdir, step, *parts):
  """A place in the checkpoint of a step."""
  return workdir.joinpath("checkpoints", f"{step:08d}", *parts)


def steps(workdir):
  """Steps of the checkpoints."""
  return list(folders.listing(str(workdir)).checkpoints)


def host_state(workdir, step):
  """What the host saved: all but the clock, and what tests change."""
  saved = folders.read_manifest(folders.find(str(workdir), step)).host_state
  changed = ("clock", "config", "hooks")
  return {k: v for k, v in saved.items() if k not in changed}


def assert_same_state(workdir, other, step):
  """The checkpoints of a step hold the same bits in two workdirs."""
  tiny.assert_same(tiny.arrays(workdir, step), tiny.arrays(other, step))
  assert host_state(workdir, step) == host_state(other, step)


def assert_same_run(workdir, other, step):
  """The same state at the end, the same rows, none twice and none missing."""
  assert steps(workdir)[-1] == steps(other)[-1] == step
  assert_same_state(workdir, other, step)
  assert tiny.rows(workdir) == tiny.rows(other)


def assert_same_numbers(rows, expected):
  """Rows of other numbers of devices: the examples exactly, losses nearly."""
  assert rows.keys() == expected.keys()
  for step, row in expected.items():
    assert rows[step].keys() == row.keys()
    for name, value in row.items():
      wanted = value if "id_" in name else pytest.approx(value, rel=2e-3)
      assert rows[step][name] == wanted, (step, name)
