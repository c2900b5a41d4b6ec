""".ci/run gives slow tests a time from which none begins."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

FILE = pathlib.Path(__file__).parent / "arrays" / "test_trees.py"


@pytest.mark.slow
def test_tests_that_begin_too_late_are_counted():
  ended = pytest_run("--co", "-q")
  number = int(ended.stdout.splitlines()[-1].split()[0])
  ended = pytest_run("-n1", "--dist=worksteal", BIGTRAIN_TESTS_UNTIL="1")
  assert ended.returncode == 0, ended.stdout
  *_, left_out, summary = ended.stdout.splitlines()
  assert left_out.startswith(f"SKIPPED [{number}] tests/conftest.py")
  assert left_out.endswith("left out for lack of time")
  assert f" {number} skipped in " in summary and "passed" not in summary


def test_tests_that_begin_in_time_run():
  ended = pytest_run(BIGTRAIN_TESTS_UNTIL=str(time.time() + 3600))
  assert ended.returncode == 0, ended.stdout
  assert "passed" in ended.stdout and "left out" not in ended.stdout


def pytest_run(*options, **variables):
  return subprocess.run(
    [sys.executable, "-m", "pytest", *options, FILE],
    env={**os.environ, **variables},
    cwd=FILE.parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
