"""A Slurm cluster, and the end of daemons and jobs on SIGTERM."""

import signal
import sys

import pytest
from support import processes

from schedulers import slurm as slurm_lib


def pytest_sessionstart():
  """Makes SIGTERM act like Ctrl-C, so that fixtures are torn down."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def env():
  """Environment of launch scripts."""
  return processes.environment(PYTHON=sys.executable)


@pytest.fixture(scope="session")
def cluster(env, tmp_path_factory):
  """A Slurm cluster of two nodes."""
  if reason := slurm_lib.missing():
    pytest.skip(reason)
  slurm = slurm_lib.Slurm(tmp_path_factory.mktemp("slurm"), env)
  yield slurm
  slurm.close()


@pytest.fixture
def slurm(cluster):
  """The cluster, without jobs at the end of the test."""
  yield cluster
  cluster.end_jobs()
