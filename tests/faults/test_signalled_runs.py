"""Faults 27 to 30: signals at any time end the run within a time limit."""

import json
import pathlib
import signal
import time

import pytest

from bigtrain.checkpoints import integrity
from faults.program import (
  assert_same_run,
  assert_same_state,
  path_of,
  steps,
)

# Schedulers allow at least this much time before SIGKILL.
GRACE_SECS = 30


def gate(step, flag):
  """A hook that waits before a step."""
  hook = dict(type="faults.waiting.Gate", step=step, flag=str(flag))
  return f"hooks={dict(gate=hook)}"


def go(flag):
  pathlib.Path(f"{flag}.go").touch()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["importing", "compiling"])
def test_signal_before_the_first_step(program, workdir, moment):
  process = program.start(workdir, cached=False)
  if moment == "importing":
    process.until_catches(signal.SIGTERM)
  else:
    process.until_log_has("compiling")
  process.send(signal.SIGTERM)
  assert process.wait(GRACE_SECS) == 75, process.text()
  assert process.last_line().startswith("preempted: ")
  assert "Traceback" not in process.text()
  # All checkpoints, if there are any, are complete.
  for step in steps(workdir):
    assert integrity.verify(str(path_of(workdir, step))) == []


@pytest.mark.slow
def test_signal_while_waiting_for_another_machines_lease(program, workdir):
  workdir.mkdir()
  holder = dict(
    token="ab",
    host="far",
    pid=1,
    machine="another boot",
    process_start=1,
    since="today",
    expires=time.time() + 3600,
  )
  (workdir / "lease.json").write_text(json.dumps(holder))
  process = program.start(workdir)
  process.until_log_has("waiting to see if it is renewed")
  process.send(signal.SIGTERM)
  assert process.wait(GRACE_SECS) == 75, process.text()
  assert process.last_line() == "preempted: SIGTERM received"
  assert json.loads((workdir / "lease.json").read_text()) == holder


@pytest.mark.slow
def test_signal_in_a_save_and_in_a_step(
  program, workdir, undisturbed, tmp_path
):
  # Fault 28: the save that is in progress is completed.
  flag = tmp_path / "saves"
  fault = ("hold", "data written", "2", str(flag))
  process = program.start(workdir, "keep_ckpts=9", fault=fault)
  process.until_file(flag)
  process.send(signal.SIGTERM)
  process.until_log_has("SIGTERM: will finish the step, save and exit with 75")
  assert steps(workdir) == [2]
  go(flag)
  assert process.wait(GRACE_SECS) == 75, process.text()
  assert 4 in steps(workdir)
  newest = steps(workdir)[-1]
  assert process.last_line() == f"preempted: saved step {newest} of 24"
  # Fault 30: a single process ends after the step.
  flag = tmp_path / "steps"
  process = program.start(workdir, gate(13, flag))
  process.until_file(flag)
  process.send(signal.SIGUSR1)
  process.until_log_has("SIGUSR1: will finish the step")
  go(flag)
  assert process.wait(GRACE_SECS) == 75, process.text()
  assert process.last_line() == "preempted: saved step 13 of 24"
  assert steps(workdir)[-1] == 13
  program.run(workdir)
  assert_same_run(workdir, undisturbed, 24)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("second", "code"),
  [
    (signal.SIGTERM, 75),
    (signal.SIGINT, 130),
  ],
)
def test_second_signal_exits_at_once(
  program, workdir, undisturbed, tmp_path, second, code
):
  flag = tmp_path / "steps"
  process = program.start(workdir, gate(9, flag))
  process.until_file(flag)
  process.until_file(path_of(workdir, 8))
  process.send(signal.SIGTERM)
  process.until_log_has("SIGTERM: will finish the step")
  process.send(second)  # The step never ends.
  assert process.wait(5) == code, process.text()
  assert "the last checkpoint is intact" in process.last_line()
  assert steps(workdir)[-1] == 8
  assert_same_state(workdir, undisturbed, 8)
