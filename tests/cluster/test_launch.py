"""The launch scripts under real schedulers: two nodes of Slurm, mpirun."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tiny

from bigtrain import checkpoint, storage
from cluster import slurm as slurm_lib

ROOT = pathlib.Path(__file__).parent.parent.parent
LAUNCH = ROOT / "launch"
LIMIT_SECS = 300.0

pytestmark = pytest.mark.cluster


def arguments(workdir, *changes, total_steps=60):
  return [
    f"--config={ROOT}/configs/digits.py",
    f"--workdir={workdir}",
    f"--config.total_steps={total_steps}",
    "--config.ckpt_steps=1000",
    "--config.log_steps=10",
    "--config.tensorboard=False",
    *changes,
  ]


def slowly(file):
  """A change: each step takes time, and makes `file` from step 20 on."""
  hook = dict(type="cluster.test_launch.Slowly", file=str(file))
  return f"--config.hooks={dict(slowly=hook)}"


class Slowly:
  """A hook that leaves a test the time for a signal."""

  def __init__(self, file):
    self._file = pathlib.Path(file)

  def before_step(self, step):
    """Sleeps, and says when step 20 has come."""
    if step < 40 and not self._file.exists():
      time.sleep(0.05)
    if step == 20:
      self._file.touch()


@pytest.fixture(scope="module")
def env():
  return {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "PYTHON": sys.executable,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
  }


@pytest.fixture(scope="module")
def undisturbed(env, tmp_path_factory):
  """Workdir of a run of two processes, by launch/local.sh."""
  folder = tmp_path_factory.mktemp("undisturbed")
  done = subprocess.run(
    [LAUNCH / "local.sh", "2", *arguments(folder / "run")],
    env={**env, "LOGS": str(folder)},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=LIMIT_SECS,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return folder / "run"


def until(condition, what):
  deadline = time.monotonic() + LIMIT_SECS
  while not condition():
    assert time.monotonic() < deadline, f"no {what}"
    time.sleep(0.05)


def assert_same(workdir, other):
  step = list(storage.listing(str(other)).checkpoints)[-1]
  assert checkpoint.steps(str(workdir))[-1] == step
  tiny.assert_same(tiny.arrays(workdir, step), tiny.arrays(other, step))
  assert tiny.rows(workdir) == tiny.rows(other)


def start(env, *command):
  return subprocess.Popen(
    command, env=env, cwd=ROOT, stdout=-1, stderr=-2, text=True
  )


@pytest.mark.parametrize("script", ["local", "mpi"])
def test_a_signal_saves_and_the_rest_is_the_same(
  script, env, undisturbed, tmp_path
):
  head = [str(LAUNCH / "local.sh"), "2"]
  if script == "mpi":
    if not shutil.which("mpirun"):
      pytest.skip("mpirun is not installed: `make test-cluster` does that")
    head = [str(LAUNCH / "mpi.sh"), "-np", "2", "--oversubscribe"]
    head += ["--allow-run-as-root", "--"]
  env = {**env, "LOGS": str(tmp_path)}
  workdir, file = tmp_path / "run", tmp_path / "step-20"
  job = start(env, *head, *arguments(workdir, slowly(file)))
  until(lambda: file.exists() or job.poll() is not None, "step 20")
  job.send_signal(signal.SIGTERM)
  said, _ = job.communicate(timeout=LIMIT_SECS)
  assert job.returncode == 75, said
  (saved,) = checkpoint.steps(str(workdir))
  assert 20 <= saved < 60
  job = start(env, *head, *arguments(workdir, slowly(file)))
  said, _ = job.communicate(timeout=LIMIT_SECS)
  assert job.returncode == 0, said
  assert_same(workdir, undisturbed)


@pytest.mark.parametrize("script", ["local", "mpi"])
def test_a_mistake_is_told_by_all_and_ends_with_2(script, env, tmp_path):
  head = [str(LAUNCH / "local.sh"), "2"]
  if script == "mpi":
    if not shutil.which("mpirun"):
      pytest.skip("mpirun is not installed: `make test-cluster` does that")
    head = [str(LAUNCH / "mpi.sh"), "-np", "2", "--oversubscribe"]
    head += ["--allow-run-as-root", "--"]
  job = start(
    {**env, "LOGS": str(tmp_path)},
    *head,
    *arguments(tmp_path / "run", "--config.lerning_rate=1"),
  )
  said, _ = job.communicate(timeout=LIMIT_SECS)
  assert job.returncode == 2, said
  assert "config.lerning_rate" in said


@pytest.mark.skipif(
  not shutil.which("shellcheck"), reason="shellcheck is not installed"
)
def test_the_scripts_are_clean():
  scripts = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]
  scripts += [*pathlib.Path(__file__).parent.glob("*.sh")]
  done = subprocess.run(
    ["shellcheck", *scripts], capture_output=True, text=True, check=False
  )
  assert len(scripts) == 5 and done.returncode == 0, done.stdout


def test_the_number_of_processes_is_wanted(env):
  job = start(env, str(LAUNCH / "local.sh"), "--config=x")
  said, _ = job.communicate(timeout=60)
  assert job.returncode == 2 and "Usage: " in said


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
  if why := slurm_lib.missing():
    pytest.skip(why)
  cluster = slurm_lib.Slurm(tmp_path_factory.mktemp("slurm"))
  yield cluster
  cluster.close()


def submit(slurm, env, folder, *flags):
  """The number of the job."""
  folder.mkdir(exist_ok=True)
  slurm.env |= {k: env[k] for k in ("JAX_PLATFORMS", "PYTHON", "PYTHONPATH")}
  slurm.env["XLA_FLAGS"] = env["XLA_FLAGS"]
  said = slurm.run(
    "sbatch",
    "--time=10",
    f"--output={folder}/%x-%j.log",
    f"--chdir={folder}",
    str(LAUNCH / "slurm.sbatch"),
    *flags,
  )
  return re.fullmatch(r"Submitted batch job (\d+)", said)[1]


def logs(folder):
  return "\n".join(p.read_text() for p in sorted(folder.glob("*.log")))


def test_slurm_requeues_what_was_preempted(slurm, env, undisturbed, tmp_path):
  workdir, file = tmp_path / "run", tmp_path / "step-20"
  job = submit(slurm, env, tmp_path, *arguments(workdir, slowly(file)))
  until(file.exists, f"step 20: {logs(tmp_path)}")
  slurm.run("scancel", "--signal=TERM", job)
  state = slurm.wait(job, LIMIT_SECS)
  assert state["JobState"] == "COMPLETED", logs(tmp_path)
  assert state["Restarts"] == "1"
  assert "preempted: saved step" in logs(tmp_path)
  assert_same(workdir, undisturbed)


def test_slurm_does_not_requeue_a_mistake(slurm, env, tmp_path):
  flags = arguments(tmp_path / "run", "--config.lerning_rate=1")
  state = slurm.wait(submit(slurm, env, tmp_path, *flags), LIMIT_SECS)
  assert state["JobState"] == "FAILED" and state["ExitCode"] == "2:0"
  assert state["Restarts"] == "0"
