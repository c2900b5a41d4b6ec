"""The watchdog ends a run that hangs and reports where it hung."""

import re

import pytest

from faults.program import assert_same_state, steps


def watchdog(**limits):
  return f"watchdog={limits}"


def check(process, phase):
  """Checks exit code and last line; returns step and stacks of all threads."""
  assert process.wait() == 1, process.text()
  match = re.fullmatch(
    rf"error: hang: the phase '{phase}' at step (\d+) took more than [\d.]+ s "
    rf"\(config\.watchdog\.{phase}_secs\); the stacks of all threads are in "
    r"(.*)",
    process.last_line(),
  )
  assert match, process.text()
  with open(match[2]) as file:
    return int(match[1]), file.read()


@pytest.mark.slow
def test_hang_in_a_step(program, workdir, undisturbed):
  hook = dict(hang=dict(type="faults.waiting.Hang", step=6))
  process = program.start(workdir, watchdog(step_secs=15), f"hooks={hook}")
  step, stacks = check(process, "step")
  assert step == 6
  assert re.search(r"waiting\.py\", line \d+ in before_step", stacks), stacks
  newest = steps(workdir)[-1]
  assert_same_state(workdir, undisturbed, newest)


@pytest.mark.slow
def test_the_limit_of_a_step_is_learned_from_the_steps_before(program, workdir):
  hook = dict(hang=dict(type="faults.waiting.Hang", step=42))
  options = (watchdog(step_floor_secs=5), f"hooks={hook}", "total_steps=60")
  process = program.start(workdir, *options, "ckpt_steps=100", "log_steps=20")
  assert process.wait() == 1
  match = re.match(
    r"error: hang: the phase 'step' at step 42 took more than ([\d.]+) s \(the "
    r"median of the last (\d+) steps is ([\d.]+) s; see "
    r"config\.watchdog\.step_floor_secs\); the stacks",
    process.last_line(),
  )
  assert match, process.text()
  limit, number, median = map(float, match.groups())
  assert limit == pytest.approx(max(5, 20 * median), rel=0.02)
  assert 20 <= number <= 42


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "compile"])
def test_hang_before_the_first_step(program, workdir, phase):
  fault = ("hang", phase)
  limit = watchdog(**{f"{phase}_secs": 15})
  step, stacks = check(program.start(workdir, limit, fault=fault), phase)
  assert step == 0 and "in _sleep_forever" in stacks


@pytest.mark.slow
def test_hang_in_an_evaluation(program, workdir, tmp_path):
  slow = dict(
    type="faults.waiting",
    pred="logits",
    log_steps=8,
    flag=str(tmp_path / "evaluates"),
    hang=True,
  )
  limit = watchdog(evaluation_secs=20)
  process = program.start(workdir, limit, f"evals.slow={slow}")
  step, stacks = check(process, "evaluation")
  assert step == 8 and "in wait_here" in stacks


@pytest.mark.slow
def test_hang_in_a_save(program, workdir, tmp_path):
  fault = ("hold", "data written", "2", str(tmp_path / "saves"))
  process = program.start(workdir, watchdog(save_secs=15), fault=fault)
  step, stacks = check(process, "save")
  # The save of step 4 hangs, and the save of step 6 waits for it.
  assert step == 6 and "in wait_here" in stacks
  assert steps(workdir) == [2]
