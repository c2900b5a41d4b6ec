"""Starts the real program with a tiny config, and reads its results."""

import pathlib
import sys

import numpy as np
import pytest
import tiny
from support import processes

from bigtrain.checkpoints import folders
from bigtrain.data import arrays

HERE = pathlib.Path(__file__).parent
ROOT = processes.ROOT
CONFIG = HERE / "tiny_config.py"
NUM_TRAIN = 80  # Ten batches.
NUM_VAL = 20  # The last batch is not full.


def digits():
  """{"train", "val": arrays}: images, labels, and an id for each."""
  data = arrays.Source(name="digits").read(np.arange(NUM_TRAIN + NUM_VAL))
  data["id"] = np.arange(NUM_TRAIN + NUM_VAL, dtype=np.int32) + 1000
  data["label"] = data["label"].astype(np.int32)
  return {
    "train": {k: v[:NUM_TRAIN] for k, v in data.items()},
    "val": {k: v[NUM_TRAIN:] for k, v in data.items()},
  }


def write_data(folder, **replaced):
  """Writes train.npz and val.npz; `replaced` has other arrays for a split."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in {**digits(), **replaced}.items():
    np.savez(folder / f"{name}.npz", **content)


class Program:
  """Starts the program any number of times.

  Args:
    shared: folder shared by all runs: data, logs and the compilation cache.
    env: more environment variables of the processes.
  """

  def __init__(self, shared, env=None):
    self.data = shared / "data"
    self._shared = shared
    self._env = {"PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    # Killed runs may leave damaged entries, so the cache is not the tests' own.
    self._cache = shared / "compile_cache"
    self._processes = processes.Processes(shared)

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
    env=None,
    under=(),
  ):
    """Starts a process.

    Args:
      workdir: folder of the run. Logs are written beside it, or beside the
        data if it is in an object store.
      changes: "key=value" for --config.key=value.
      fault: arguments of run_with_fault.py; none for the plain program.
      devices: number of simulated devices.
      data: another folder with train.npz and val.npz.
      model: model of the tiny config, "net" or "vit".
      cached: whether to use the compilation cache.
      flags: more words of the command line.
      config: another config, with its arguments.
      env: more environment variables.
      under: words of another program that starts the program.
    """
    beside = pathlib.Path(workdir)
    if "://" in str(workdir):
      beside = self._shared / beside.name
    default = f"{CONFIG}:data={data or self.data},model={model}"
    command = processes.main_command(
      config or default,
      workdir,
      f"--config.compile_cache={self._cache if cached else False}",
      *(f"--config.{change}" for change in changes),
      *flags,
    )
    if fault:
      faulty = [sys.executable, "-m", "faults.run_with_fault", *fault, "--"]
      command[:3] = faulty
    command[:0] = under
    number = len(list(beside.parent.glob(f"{beside.name}.*.log")))
    return self._processes.start(
      command,
      devices=devices,
      env={**self._env, **(env or {})},
      log=beside.parent / f"{beside.name}.{number}.log",
    )

  def run(self, workdir, *changes, code=0, **options):
    """Starts a process, waits for its end and checks its exit code."""
    process = self.start(workdir, *changes, **options)
    exit_code = process.wait()
    assert exit_code == code, f"exit code {exit_code}:\n{process.text()}"
    return process

  def start_job(self, workdir, *changes, each=({}, {}), **options):
    """Starts the processes of one job.

    Args:
      workdir, changes, options: see `start`.
      each: options for each process; "changes" are more changes, "starts" is
        False for a process that never starts.
    """
    port = processes.free_port()
    job = []
    for index, own in enumerate(each):
      own = {**options, **own}
      env = processes.job_variables(port, len(each), index)
      own_changes = (*changes, *own.pop("changes", ()))
      if own.pop("starts", True):
        job.append(self.start(workdir, *own_changes, env=env, **own))
    return job

  def close(self):
    """Ends all processes that still run."""
    self._processes.close()


def path_of(workdir, step, *parts):
  """A path in the checkpoint of a step."""
  return workdir.joinpath("checkpoints", f"{step:08d}", *parts)


def steps(workdir):
  """Steps of the checkpoints."""
  return list(folders.listing(str(workdir)).checkpoints)


def host_state(workdir, step):
  """The saved host state, without the clock and the parts that tests change."""
  manifest = folders.read_manifest(folders.find(str(workdir), step))
  saved = manifest.host_state.to_json()
  changed = ("clock", "config", "hooks")
  return {k: v for k, v in saved.items() if k not in changed}


def assert_same_state(workdir, other, step):
  """The checkpoints of a step hold the same bits in two workdirs."""
  tiny.assert_same(tiny.arrays(workdir, step), tiny.arrays(other, step))
  assert host_state(workdir, step) == host_state(other, step)


def assert_same_run(workdir, other, step):
  """The same final state and the same rows, with no row twice or missing."""
  assert steps(workdir)[-1] == steps(other)[-1] == step
  assert_same_state(workdir, other, step)
  assert tiny.rows(workdir) == tiny.rows(other)


def assert_same_numbers(rows, expected):
  """Compares runs on different devices: equal examples, close losses."""
  assert rows.keys() == expected.keys()
  for step, row in expected.items():
    assert rows[step].keys() == row.keys()
    for name, value in row.items():
      wanted = value if "id_" in name else pytest.approx(value, rel=2e-3)
      assert rows[step][name] == wanted, (step, name)
