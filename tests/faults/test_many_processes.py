"""Faults 10, 24, 26 and 32 to 36: a job of several processes ends as one."""

import re
import signal
import time

import pytest
import tiny

from bigtrain.checkpoints import checkpointer
from faults import program as program_lib
from faults import tiny_tokens
from faults.program import path_of, steps

# From the fault to the end of every process; most of it is for a busy machine.
BOUND_SECS = 20


def does(what, process=1, step=9):
  """Changes: a hook that does it on one process before a step."""
  hook = dict(
    type="faults.one_process.Do", process=process, step=step, what=what
  )
  return f"hooks={dict(fault=hook)}"


def codes(job, secs=program_lib.LIMIT_SECS):
  """Exit codes; waits for all processes."""
  deadline = time.monotonic() + secs
  return [p.wait(max(0.1, deadline - time.monotonic())) for p in job]


def last_lines(job):
  return [process.last_line() for process in job]


@pytest.mark.slow
def test_a_signal_to_one_and_other_numbers_of_processes(
  program, workdir, undisturbed
):
  # Fault 26: SIGTERM reaches process 1 alone.
  job = program.start_job(workdir, does("term", step=6))
  assert codes(job) == [75, 75], job[0].text() + job[1].text()
  (line,) = set(last_lines(job))
  saved = int(re.fullmatch(r"preempted: saved step (\d+) of 24", line)[1])
  assert saved >= 6 and steps(workdir)[-1] == saved
  assert checkpointer.verify(str(path_of(workdir, saved))) == []
  # Fault 24: 2, then 1, then 4 processes.
  program.run(
    workdir, does("term", 0, 14), f"keep_ckpts={saved}", code=75, devices=2
  )
  assert steps(workdir)[-1] == 14
  job = program.start_job(workdir, each=[{}] * 4)
  assert codes(job) == [0] * 4, job[0].text()
  program_lib.assert_same_numbers(tiny.rows(workdir), tiny.rows(undisturbed))


@pytest.mark.slow
def test_packed_documents_on_other_numbers_of_processes(program, tmp_path):
  tiny_tokens.write(tmp_path)
  config = f"{tiny_tokens.__file__}:data={tmp_path}"
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  program.run(whole, config=config)
  for processes, devices, stop in ((2, 1, 2), (1, 2, 4), (4, 1, 6)):
    job = program.start_job(
      parts,
      f"stop_at_steps={stop}",
      each=[{}] * processes,
      config=config,
      devices=devices,
    )
    assert codes(job) == [0] * processes, job[0].text()
    assert steps(parts)[-1] == stop
  program_lib.assert_same_numbers(tiny.rows(parts), tiny.rows(whole))


@pytest.mark.slow
def test_other_data_on_one(program, workdir):
  job = program.start_job(workdir, "evals.val.data.type=faults.own_data")
  assert codes(job) == [2, 2], job[0].text()
  for line in last_lines(job):
    assert "differ in the data of config.evals.val" in line, line
    assert re.search(r"process 1 \(.*\) has 8 examples", line), line


@pytest.mark.slow
def test_late_joiners(program, workdir):
  port = program_lib.free_port()
  first, late, extra = (
    program_lib.flags_of(port, 2, index) for index in (0, 1, 1)
  )
  waits = does("wait", step=4)
  job = [program.start(workdir, waits, flags=first)]
  job[0].until(lambda: program_lib.listens(port), f"port {port}")
  job.append(program.start(workdir, waits, flags=late))
  job[0].until_says("Step 0 of 24")
  # One too many: the job that it would join goes on.
  soon = "cluster={'join_secs': 4}"
  third = program.start(workdir, waits, soon, flags=extra)
  assert third.wait(60) == 1, third.text()
  assert f"process 1: no process 0 at 127.0.0.1:{port}" in third.last_line()
  assert codes(job) == [0, 0], job[0].text()


@pytest.mark.slow
def test_a_signal_in_an_evaluation_and_before_the_first_step(
  program, workdir, tmp_path
):
  flag = tmp_path / "evaluates"
  slow = dict(
    type="faults.one_process", pred="logits", log_steps=8, flag=str(flag)
  )
  job = program.start_job(workdir, f"evals.slow={slow}")
  job[0].until_file(flag)
  job[1].send(signal.SIGTERM)
  assert codes(job, 60) == [75, 75], job[0].text()
  assert set(last_lines(job)) == {"preempted: saved step 8 of 24"}
  job = program.start_job(workdir, f"evals.slow={slow}", cached=False)
  job[0].until_says("Step 8 of 24, resumed")
  job[0].send(signal.SIGUSR1)
  assert codes(job, 60) == [75, 75], job[1].text()


@pytest.mark.parametrize(
  "process", [0, pytest.param(1, marks=pytest.mark.slow)]
)
def test_one_is_killed(program, workdir, process):
  job = program.start_job(workdir, does("kill", process))
  assert job[process].wait() == -signal.SIGKILL
  other = job[1 - process]
  assert other.wait(BOUND_SECS) == 1, other.text()
  assert f"process {process} " in other.last_line()
  assert "gone without a word" in other.last_line()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_one_is_stopped(program, workdir, process):
  job = program.start_job(
    workdir, does("stop", process), "cluster={'heartbeat_secs': 5}"
  )
  other = job[1 - process]
  assert other.wait() == 1, other.text()
  line = other.last_line()
  assert f"process {process} " in line and "not been heard of for 5 s" in line
  job[process].send(signal.SIGCONT)
  assert job[process].wait(BOUND_SECS) == 1, job[process].text()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_an_exception_in_one(program, workdir, process):
  job = program.start_job(workdir, does("raise", process))
  job[process].until_says("KeyError")
  assert codes(job, BOUND_SECS) == [1, 1]
  for line in last_lines(job):
    assert re.fullmatch(
      rf"error: process {process} \(host .*\): KeyError: 'of my own making'",
      line,
    ), line


def test_one_hangs(program, workdir):
  job = program.start_job(workdir, does("hang"), "watchdog={'step_secs': 6}")
  assert codes(job) == [1, 1]
  for process in job:
    line = process.last_line()
    assert re.search(r"the laggard is process 1 \(host .*\), at step 9 ", line)
    # Each wrote the stacks of its own threads.
    assert list(workdir.glob(f"stacks-*-{process.pid}.txt"))
  (stacks,) = workdir.glob(f"stacks-*-{job[1].pid}.txt")
  assert "one_process.py" in stacks.read_text()


@pytest.mark.slow
def test_a_config_that_differs_on_one(program, workdir):
  job = program.start_job(workdir, each=[{}, {"changes": ["lr=0.002"]}])
  assert codes(job) == [2, 2]
  for line in last_lines(job):
    assert "process 1 has config.lr=0.002" in line
    assert "process 0 has config.lr=0.001" in line
  assert not workdir.exists()


@pytest.mark.slow
def test_one_never_comes(program, workdir):
  job = program.start_job(
    workdir, "cluster={'join_secs': 5}", each=[{}, {}, {"starts": False}]
  )
  assert codes(job, 60) == [1, 1]
  for line in last_lines(job):
    assert "1 of 3 processes did not come within 5 s" in line, line
    assert line.endswith("(config.cluster.join_secs): 2"), line


@pytest.mark.slow
def test_not_as_many_as_expected(program, workdir):
  job = program.start_job(workdir, "expect_devices=4")
  assert codes(job) == [2, 2]
  assert "config.expect_devices=4: there are 2" in job[0].last_line()


@pytest.mark.slow
def test_the_disk_of_one_is_full(program, workdir):
  # Fault 10.
  job = program.start_job(workdir, each=[{}, {"fault": ("limit", "2", "5000")}])
  assert codes(job) == [1, 1], job[0].text()
  for line in last_lines(job):
    assert "process 1" in line, line


@pytest.mark.slow
def test_a_straggler_is_named(program, workdir):
  job = program.start_job(
    workdir, does("wait", step=4), "cluster={'straggler_secs': 2}"
  )
  assert codes(job) == [0, 0]
  said = r"straggler: process 1 \(host .*\) spends 0\.3"
  assert re.search(said, job[0].text())
  assert "seconds a step on the host, by process: 1: 0.3" in job[0].text()
