"""Shared by the fault tests: data, a compilation cache, one undisturbed run."""

import fcntl

import pytest

from faults import program as program_lib


@pytest.fixture(scope="session")
def shared(session_folder):
  """The folder of data and caches, shared by all workers of the session."""
  folder = session_folder / "faults"
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def undisturbed(shared):
  """Workdir of a finished run, with the checkpoints of all even steps.

  The first worker that needs it makes it, which fills the compilation cache.
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
  """Starts the program; ends its processes at the end of the test."""
  starter = program_lib.Program(shared)
  yield starter
  starter.close()


@pytest.fixture
def workdir(tmp_path):
  """A folder that does not exist yet."""
  return tmp_path / "run"
