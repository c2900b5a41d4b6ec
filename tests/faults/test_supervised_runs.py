"""Fault 56, and runs that the supervisor starts again."""

import os
import pathlib
import signal
import sys
import time

import pytest

from bigtrain.reports import log_entries
from faults.program import assert_same_run, steps

SUPERVISE = (sys.executable, "-m", "bigtrain.tools.supervise")
SUPERVISE += ("--wait_secs=0.1", "--failures=2", "--")
PACE = f"hooks={dict(pace=dict(type='faults.waiting.Pace', secs=0.05))}"


def child_of(process):
  """PID of the program that a supervisor runs; 0 without one."""
  pid = process.pid
  children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
  return int((children.split() or [0])[0])


def until_row(process, workdir, step):
  def has_row():
    rows = log_entries.read(str(workdir))
    return bool(rows) and rows[-1]["step"] >= step

  process.until(has_row, f"a row of step {step}")


@pytest.mark.slow
def test_killed_programs_are_started_again(program, workdir, undisturbed):
  process = program.start(workdir, PACE, under=SUPERVISE)
  for step in (5, 12):
    until_row(process, workdir, step)
    os.kill(child_of(process), signal.SIGKILL)
  assert process.wait() == 0, process.text()
  lines = process.lines("supervise: start ")
  assert len(lines) == 2 and all("ended with code 137" in x for x in lines)
  assert_same_run(workdir, undisturbed, 24)


@pytest.mark.slow
def test_a_killed_supervisor_leaves_a_saved_run(program, workdir, undisturbed):
  process = program.start(workdir, PACE, under=SUPERVISE)
  until_row(process, workdir, 5)
  pid = child_of(process)
  process.kill()
  deadline = time.monotonic() + 60
  while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
    time.sleep(0.05)
  assert "preempted: saved step" in process.last_line()
  assert steps(workdir)[-1] >= 5
  program.run(workdir)
  assert_same_run(workdir, undisturbed, 24)


@pytest.mark.slow
def test_a_failure_at_each_start_ends_it(program, workdir):
  fault = ("kill", "begin", "1")
  process = program.start(workdir, fault=fault, under=SUPERVISE)
  assert process.wait() == 137
  assert process.last_line().startswith(
    "supervise: giving up: 2 start(s) in a row made no progress beyond step "
  )
