"""The launch scripts under real launchers: two nodes of Slurm, mpirun.

Two quickstarts, shortened, are ended in the middle in several ways and go on;
their ends must have the bits of a run that nobody disturbed.
"""

import contextlib
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

from bigtrain.checkpoints import checkpointer, folders
from schedulers import slurm as slurm_lib

ROOT = pathlib.Path(__file__).parent.parent.parent
LAUNCH = ROOT / "launch"
LIMIT_SECS = 300.0

# {name: (config, total steps, flags)}.
QUICKSTARTS = {
  "digits": (
    "digits.py",
    40,
    ["log_steps=10", "evals.val.log_steps=20", "model.depth=2"],
  ),
  "language": (
    "pydoc_lm.py:runlocal",
    12,
    ["log_steps=3", "evals.val.log_steps=6", "model.depth=2"],
  ),
}

pytestmark = pytest.mark.cluster


def arguments(quickstart, workdir, *changes):
  file, total_steps, flags = QUICKSTARTS[quickstart]
  return [
    f"--config={ROOT}/configs/{file}",
    f"--workdir={workdir}",
    f"--config.total_steps={total_steps}",
    "--config.ckpt_steps=1000",
    "--config.tensorboard=False",
    *(f"--config.{change}" for change in (*flags, *changes)),
  ]


def reaches(quickstart, file):
  """A change: each step takes time, and the third part of them makes `file`."""
  step = QUICKSTARTS[quickstart][1] // 3
  hook = dict(type="cluster.test_launch.Slowly", step=step, file=str(file))
  return f"hooks={dict(slowly=hook)}"


def signals_itself(quickstart):
  """A change: process 1 gets SIGTERM before the third part of the steps."""
  step = QUICKSTARTS[quickstart][1] // 3
  hook = dict(type="faults.one_process.Do", process=1, step=step, what="term")
  return f"hooks={dict(signal=hook)}"


class Slowly:
  """A hook that leaves a test the time for a signal."""

  def __init__(self, step, file):
    self._step = step
    self._file = pathlib.Path(file)

  def before_step(self, step):
    """Sleeps, and says when the step has come; only in the first turn."""
    if step < 2 * self._step:
      if not self._file.exists() or step > self._step:
        time.sleep(0.1)
    if step == self._step:
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


@pytest.fixture(scope="module", params=list(QUICKSTARTS))
def undisturbed(request, env, tmp_path_factory):
  """(quickstart, workdir of a run of two processes, by launch/local.sh)."""
  folder = tmp_path_factory.mktemp(request.param)
  done = subprocess.run(
    [LAUNCH / "local.sh", "2", *arguments(request.param, folder / "run")],
    env={**env, "LOGS": str(folder)},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=LIMIT_SECS,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return request.param, folder / "run"


@pytest.fixture
def start(env, tmp_path):
  """Starts a command; whatever of it is left at the end is ended."""
  jobs = []

  def call(*command):
    jobs.append(
      subprocess.Popen(
        command,
        env={**env, "LOGS": str(tmp_path)},
        cwd=ROOT,
        stdout=-1,
        stderr=-2,
        text=True,
        start_new_session=True,
      )
    )
    return jobs[-1]

  yield call
  for job in jobs:
    for number in (signal.SIGTERM, signal.SIGKILL):
      if job.poll() is None:
        os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
          job.wait(30)


def head(script):
  """The beginning of a command line for two processes."""
  if script == "local":
    return [str(LAUNCH / "local.sh"), "2"]
  if not shutil.which("mpirun"):
    pytest.skip("mpirun is not installed: `make test-cluster` does that")
  command = [str(LAUNCH / "mpi.sh"), "-np", "2", "--oversubscribe"]
  return [*command, "--allow-run-as-root", "--"]


def until(condition, what):
  deadline = time.monotonic() + LIMIT_SECS
  while not condition():
    assert time.monotonic() < deadline, f"no {what}"
    time.sleep(0.05)


def assert_same(workdir, other):
  step = list(folders.listing(str(other)).checkpoints)[-1]
  assert checkpointer.steps(str(workdir))[-1] == step
  tiny.assert_same(tiny.arrays(workdir, step), tiny.arrays(other, step))
  assert tiny.rows(workdir) == tiny.rows(other)


@pytest.mark.parametrize("script", ["local", "mpi"])
def test_a_signal_saves_and_the_rest_is_the_same(
  script, start, undisturbed, tmp_path
):
  quickstart, expected = undisturbed
  total = QUICKSTARTS[quickstart][1]
  workdir, file = tmp_path / "run", tmp_path / "reached"
  # In one case the script gets the signal, in the other one of the processes.
  of_itself = (quickstart, script) in (("digits", "mpi"), ("language", "local"))
  change = signals_itself if of_itself else lambda q: reaches(q, file)
  flags = arguments(quickstart, workdir, change(quickstart))
  job = start(*head(script), *flags)
  if not of_itself:
    until(lambda: file.exists() or job.poll() is not None, "third of the steps")
    job.send_signal(signal.SIGTERM)
  said, _ = job.communicate(timeout=LIMIT_SECS)
  assert job.returncode == 75, said
  (saved,) = checkpointer.steps(str(workdir))
  assert total // 3 <= saved < total
  job = start(*head(script), *flags)
  said, _ = job.communicate(timeout=LIMIT_SECS)
  assert job.returncode == 0, said
  assert_same(workdir, expected)


@pytest.mark.parametrize("script", ["local", "mpi"])
def test_a_mistake_is_told_by_all_and_ends_with_2(script, start, tmp_path):
  flags = arguments("digits", tmp_path / "run", "lerning_rate=1")
  job = start(*head(script), *flags)
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


@pytest.fixture(scope="module")
def cluster(env, tmp_path_factory):
  if why := slurm_lib.missing():
    pytest.skip(why)
  made = slurm_lib.Slurm(tmp_path_factory.mktemp("slurm"), env)
  yield made
  made.close()


@pytest.fixture
def slurm(cluster):
  yield cluster
  cluster.end_jobs()


def submit(slurm, folder, *flags):
  """The number of the job."""
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


def test_slurm_requeues_what_was_preempted(slurm, undisturbed, tmp_path):
  quickstart, expected = undisturbed
  workdir, file = tmp_path / "run", tmp_path / "reached"
  change = reaches(quickstart, file)
  job = submit(slurm, tmp_path, *arguments(quickstart, workdir, change))
  until(file.exists, f"third of the steps: {logs(tmp_path)}")
  if quickstart == "digits":
    # A user, or the time that is nearly over: the script queues itself again.
    slurm.run("scancel", "--signal=TERM", job)
  else:
    # Slurm itself, for a job that is worth more: SIGTERM, and later SIGKILL.
    slurm.run("scontrol", "requeue", job)
  state = slurm.wait(job, LIMIT_SECS)
  assert state["JobState"] == "COMPLETED", logs(tmp_path)
  assert state["Restarts"] == "1"
  assert "preempted: saved step" in logs(tmp_path)
  assert_same(workdir, expected)


def test_slurm_does_not_requeue_a_mistake(slurm, tmp_path):
  flags = arguments("digits", tmp_path / "run", "lerning_rate=1")
  state = slurm.wait(submit(slurm, tmp_path, *flags), LIMIT_SECS)
  assert state["JobState"] == "FAILED" and state["ExitCode"] == "2:0"
  assert state["Restarts"] == "0"
