"""Fault 51: hosts are lost, and the others have their shards."""

import shutil
import signal

import pytest
from support.processes import exit_codes

from faults import soak
from faults.program import assert_same_run, steps

# Each process stands for a host: it reads its own files only.
_EACH = {4: "mesh={'replica': 2, 'fsdp': 2}", 2: "mesh={'replica': 2}"}


class _Hosts:
  """Jobs of several hosts in one workdir.

  Args:
    program: program.Program.
    folder: folder of the run and of the hosts' checkpoints.
    count: number of processes.
  """

  def __init__(self, program, folder, count):
    self._program = program
    self._count = count
    self.workdir = folder / "run"
    self.folder = folder / "hosts"
    self._reads = folder / "reads"

  def start(self, *changes, workdir=None, **options):
    """Starts a job; a hook may be given as hook=dict(...)."""
    if hook := options.pop("hook", None):
      changes = (*changes, f"hooks={dict(fault=hook)}")
    if workdir is None:
      workdir = self.workdir
      local = (f"local_ckpt_dir={self.folder}", "local_ckpt_steps=3")
      changes = (*changes, *local)
      options["fault"] = ("reads", str(self._reads), str(self.workdir))
    return self._program.start_job(
      workdir,
      _EACH[self._count],
      "ckpt_steps=10",
      *changes,
      each=[{}] * self._count,
      **options,
    )

  def kill(self, process, step, saved):
    """Runs until a process is killed before a step, and loses its files."""
    hook = dict(
      type="faults.one_process.KillWhenSaved",
      process=process,
      step=step,
      saved=saved,
      folder=str(self.folder),
    )
    job = self.start(hook=hook)
    codes = exit_codes(job)
    assert codes[process] == -signal.SIGKILL, job[process].text()
    assert set(codes) == {1, -signal.SIGKILL}, job[0].text()
    (own,) = self.folder.glob(f"*/{process}")
    shutil.rmtree(own)
    return job

  def bytes_read(self):
    """Bytes of arrays that were read from the workdir since the last call."""
    if not self._reads.exists():
      return 0
    sizes = map(int, self._reads.read_text().split())
    self._reads.unlink()
    return sum(sizes)

  def run_quietly(self, workdir):
    """A run that nobody disturbs, without local checkpoints."""
    job = self.start(workdir=workdir)
    assert exit_codes(job) == [0] * self._count, job[0].text()


@pytest.mark.slow
def test_a_lost_host_of_four(program, tmp_path):
  hosts = _Hosts(program, tmp_path, 4)
  hosts.run_quietly(tmp_path / "quiet")
  hosts.kill(1, step=20, saved=18)
  assert steps(hosts.workdir) == [10] and hosts.bytes_read() == 0
  job = hosts.start()
  assert exit_codes(job) == [0] * 4, job[0].text()
  for process in job:
    assert (
      "resumed from step 18 of this workdir, on the hosts" in process.text()
    )
  # Process 3 has the same half of the split arrays, and all others.
  assert "Received" in job[1].text() and "Received" not in job[3].text()
  assert hosts.bytes_read() == 0
  assert_same_run(hosts.workdir, tmp_path / "quiet", 24)
  assert not [*hosts.folder.iterdir()]


@pytest.mark.slow
def test_each_source_in_turn(program, tmp_path):
  hosts = _Hosts(program, tmp_path, 2)
  hosts.run_quietly(tmp_path / "quiet")
  hosts.kill(0, step=8, saved=6)
  term = dict(type="faults.one_process.Do", process=1, step=13, what="term")
  job = hosts.start(hook=term)
  assert exit_codes(job) == [75, 75], job[0].text()
  assert "resumed from step 6 of this workdir, on the hosts" in job[0].text()
  assert "Received" in job[0].text() and hosts.bytes_read() == 0
  # A preemption saves in the workdir, even right after a local checkpoint.
  saved = steps(hosts.workdir)[-1]
  assert saved >= 13
  job = hosts.kill(1, step=saved + 4, saved=saved // 3 * 3 + 3)
  assert f"resumed from step {saved} of this workdir, on" in job[0].text()
  assert hosts.bytes_read() == 0
  shutil.rmtree(hosts.folder)
  job = hosts.start()
  assert exit_codes(job) == [0, 0], job[0].text()
  newest = max(10, saved)
  assert f"resumed from step {newest} of this workdir." in job[0].text()
  assert hosts.bytes_read() > 0
  assert_same_run(hosts.workdir, tmp_path / "quiet", 24)


@pytest.mark.slow
def test_killed_at_random_times(program, tmp_path):
  soak.soak(program, tmp_path, kills=5, seed=3, local=3)
