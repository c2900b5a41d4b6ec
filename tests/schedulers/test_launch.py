"""The launch scripts under real launchers: two nodes of Slurm, mpirun.

Two shortened quickstarts are interrupted in several ways and resumed. Their
results must have the same bits as an undisturbed run.
"""

import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest
import tiny
from support import processes
from support.processes import LIMIT_SECS, ROOT

from bigtrain.checkpoints import folders

LAUNCH = ROOT / "launch"

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
  """Change: slows down steps, and creates `file` after a third of them."""
  step = QUICKSTARTS[quickstart][1] // 3
  hook = dict(type="schedulers.test_launch.Slowly", step=step, file=str(file))
  return f"hooks={dict(slowly=hook)}"


def signals_itself(quickstart):
  """Change: process 1 gets SIGTERM after a third of the steps."""
  step = QUICKSTARTS[quickstart][1] // 3
  hook = dict(type="faults.one_process.Do", process=1, step=step, what="term")
  return f"hooks={dict(signal=hook)}"


class Slowly:
  """A hook that gives a test time to send a signal."""

  def __init__(self, step, file):
    self._step = step
    self._file = pathlib.Path(file)

  def before_step(self, step):
    """Creates the file at its step; sleeps, except after a resume."""
    if step < 2 * self._step:
      if not self._file.exists() or step > self._step:
        time.sleep(0.1)
    if step == self._step:
      self._file.touch()


@pytest.fixture(scope="module", params=list(QUICKSTARTS))
def undisturbed(request, env, tmp_path_factory):
  """(quickstart, workdir of a run of two processes by launch/local.sh)."""
  folder = tmp_path_factory.mktemp(request.param)
  ended = processes.run(
    [LAUNCH / "local.sh", "2", *arguments(request.param, folder / "run")],
    env={**env, "LOGS": str(folder)},
  )
  assert ended.returncode == 0, ended.stderr
  return request.param, folder / "run"


@pytest.fixture
def start(env, tmp_path):
  """Starts a command; ends it with all its processes at the end."""
  logs = {"LOGS": str(tmp_path / "logs")}
  with processes.Processes(tmp_path) as started:

    def call(*command):
      return started.start(command, env={**env, **logs}, group=True)

    yield call


def head(script):
  """The first words of a command line for two processes."""
  if script == "local":
    return [str(LAUNCH / "local.sh"), "2"]
  if not shutil.which("mpirun"):
    pytest.skip("mpirun is not installed; `make test-cluster` installs it")
  command = [str(LAUNCH / "mpi.sh"), "-np", "2", "--oversubscribe"]
  return [*command, "--allow-run-as-root", "--"]


def until(condition, what):
  deadline = time.monotonic() + LIMIT_SECS
  while not condition():
    assert time.monotonic() < deadline, f"no {what}"
    time.sleep(0.05)


def assert_same(workdir, other):
  step = list(folders.listing(str(other)).checkpoints)[-1]
  assert folders.steps(str(workdir))[-1] == step
  tiny.assert_same(tiny.arrays(workdir, step), tiny.arrays(other, step))
  assert tiny.rows(workdir) == tiny.rows(other)


@pytest.mark.parametrize("script", ["local", "mpi"])
def test_a_signal_saves_and_the_rest_is_the_same(
  script, start, undisturbed, tmp_path
):
  quickstart, expected = undisturbed
  total = QUICKSTARTS[quickstart][1]
  workdir, file = tmp_path / "run", tmp_path / "reached"
  # Either a process of the job gets the signal, or the script.
  by_hook = (quickstart, script) in (("digits", "mpi"), ("language", "local"))
  change = signals_itself if by_hook else lambda q: reaches(q, file)
  flags = arguments(quickstart, workdir, change(quickstart))
  job = start(*head(script), *flags)
  if not by_hook:
    job.until_file(file)
    job.send(signal.SIGTERM)
  assert job.wait() == 75, job.text()
  (saved,) = folders.steps(str(workdir))
  assert total // 3 <= saved < total
  job = start(*head(script), *flags)
  assert job.wait() == 0, job.text()
  assert_same(workdir, expected)


@pytest.mark.parametrize("script", ["local", "mpi"])
def test_a_mistake_is_reported_and_exits_with_2(script, start, tmp_path):
  flags = arguments("digits", tmp_path / "run", "lerning_rate=1")
  job = start(*head(script), *flags)
  assert job.wait() == 2, job.text()
  assert "config.lerning_rate" in job.text()


@pytest.mark.skipif(
  not shutil.which("shellcheck"), reason="shellcheck is not installed"
)
def test_shellcheck_of_the_scripts():
  scripts = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]
  scripts += [*pathlib.Path(__file__).parent.glob("*.sh")]
  ended = subprocess.run(
    ["shellcheck", *scripts], capture_output=True, text=True, check=False
  )
  assert len(scripts) == 5 and ended.returncode == 0, ended.stdout


def submit(slurm, folder, *flags):
  """Submits a job; returns its number."""
  output = slurm.run(
    "sbatch",
    "--time=10",
    f"--output={folder}/%x-%j.log",
    f"--chdir={folder}",
    str(LAUNCH / "slurm.sbatch"),
    *flags,
  )
  return re.fullmatch(r"Submitted batch job (\d+)", output)[1]


def logs(folder):
  return "\n".join(p.read_text() for p in sorted(folder.glob("*.log")))


def test_slurm_requeues_a_preempted_job(slurm, undisturbed, tmp_path):
  quickstart, expected = undisturbed
  workdir, file = tmp_path / "run", tmp_path / "reached"
  change = reaches(quickstart, file)
  job = submit(slurm, tmp_path, *arguments(quickstart, workdir, change))
  until(file.exists, f"third of the steps: {logs(tmp_path)}")
  if quickstart == "digits":
    # As by a user or before the time limit: the script requeues the job.
    slurm.run("scancel", "--signal=TERM", job)
  else:
    # As by a job with a higher priority: SIGTERM, later SIGKILL.
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
