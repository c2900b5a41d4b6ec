"""What the fault tests share: data, a warm compilation cache, one good run."""

import fcntl
import os

import pytest

from faults import program as program_lib


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
  """A folder that all workers of a test session share."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent
  folder = folder / "faults"
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def undisturbed(shared):
  """Workdir of a run to the end, with the checkpoints of all even steps.

  The first worker that asks makes it, and so warms the compilation cache.
  """
  workdir = shared / "undisturbed"
  with open(shared / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (shared / "made").exists():
      program_lib.write_data(shared / "data")
      first = program_lib.Program(shared)
      try:
        first.run(workdir, "keep_ckpts=100")
      finally:
        first.close()
      (shared / "made").touch()
  return workdir


@pytest.fixture
def program(shared, undisturbed):
  """Starts the program; what it started is ended with the test."""
  starter = program_lib.Program(shared)
  yield starter
  starter.close()


@pytest.fixture
def workdir(tmp_path):
  """A folder that is not there yet."""
  return tmp_path / "run"
