"""Faults 10, 24, 26 and 32 to 36: the processes of a job end together."""

import re
import signal

import pytest
import tiny
from support import processes
from support.processes import exit_codes

from bigtrain.checkpoints import integrity
from faults import program as program_lib
from faults import tiny_tokens
from faults.program import path_of, steps

# Time limit from the fault to the end of every process; for a busy machine.
BOUND_SECS = 20


def acts(what, process=1, step=9):
  """Change: a hook that acts on one process before a step."""
  hook = dict(
    type="faults.one_process.Do", process=process, step=step, what=what
  )
  return f"hooks={dict(fault=hook)}"


def last_lines(job):
  return [process.last_line() for process in job]


@pytest.mark.slow
def test_signal_to_one_process_then_other_process_counts(
  program, workdir, undisturbed
):
  # Fault 26: SIGTERM reaches process 1 alone.
  job = program.start_job(workdir, acts("term", step=6))
  assert exit_codes(job) == [75, 75], job[0].text() + job[1].text()
  (line,) = set(last_lines(job))
  saved = int(re.fullmatch(r"preempted: saved step (\d+) of 24", line)[1])
  assert saved >= 6 and steps(workdir)[-1] == saved
  assert integrity.verify(str(path_of(workdir, saved))) == []
  # Fault 24: 2, then 1, then 4 processes.
  program.run(
    workdir, acts("term", 0, 14), f"keep_ckpts={saved}", code=75, devices=2
  )
  assert steps(workdir)[-1] == 14
  job = program.start_job(workdir, each=[{}] * 4)
  assert exit_codes(job) == [0] * 4, job[0].text()
  program_lib.assert_same_numbers(tiny.rows(workdir), tiny.rows(undisturbed))


@pytest.mark.slow
def test_packed_documents_on_other_process_counts(program, tmp_path):
  tiny_tokens.write(tmp_path)
  config = f"{tiny_tokens.__file__}:data={tmp_path}"
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  program.run(whole, config=config)
  for count, devices, stop in ((2, 1, 2), (1, 2, 4), (4, 1, 6)):
    job = program.start_job(
      parts,
      f"stop_at_steps={stop}",
      each=[{}] * count,
      config=config,
      devices=devices,
    )
    assert exit_codes(job) == [0] * count, job[0].text()
    assert steps(parts)[-1] == stop
  program_lib.assert_same_numbers(tiny.rows(parts), tiny.rows(whole))


@pytest.mark.slow
def test_different_data_on_one_process(program, workdir):
  job = program.start_job(workdir, "evals.val.data.type=faults.own_data")
  assert exit_codes(job) == [2, 2], job[0].text()
  for line in last_lines(job):
    assert "differ in the data of config.evals.val" in line, line
    assert re.search(r"process 1 \(.*\) has 8 examples", line), line


@pytest.mark.slow
def test_late_and_surplus_processes(program, workdir):
  port = processes.free_port()
  first, late, surplus = (
    processes.job_flags(port, 2, index) for index in (0, 1, 1)
  )
  waits = acts("wait", step=4)
  job = [program.start(workdir, waits, flags=first)]
  job[0].until(lambda: processes.listens(port), f"port {port}")
  job.append(program.start(workdir, waits, flags=late))
  job[0].until_log_has("Step 0 of 24")
  # A surplus process fails to join; the job goes on.
  soon = "cluster={'join_secs': 4}"
  third = program.start(workdir, waits, soon, flags=surplus)
  assert third.wait(60) == 1, third.text()
  assert f"process 1: no process 0 at 127.0.0.1:{port}" in third.last_line()
  assert exit_codes(job) == [0, 0], job[0].text()


@pytest.mark.slow
def test_signal_during_evaluation_and_before_the_first_step(
  program, workdir, tmp_path
):
  flag = tmp_path / "evaluates"
  slow = dict(
    type="faults.one_process", pred="logits", log_steps=8, flag=str(flag)
  )
  job = program.start_job(workdir, f"evals.slow={slow}")
  job[0].until_file(flag)
  job[1].send(signal.SIGTERM)
  assert exit_codes(job, 60) == [75, 75], job[0].text()
  assert set(last_lines(job)) == {"preempted: saved step 8 of 24"}
  job = program.start_job(workdir, f"evals.slow={slow}", cached=False)
  job[0].until_log_has("Step 8 of 24, resumed")
  job[0].send(signal.SIGUSR1)
  assert exit_codes(job, 60) == [75, 75], job[1].text()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_killed_process(program, workdir, process):
  job = program.start_job(workdir, acts("kill", process))
  assert job[process].wait() == -signal.SIGKILL
  other = job[1 - process]
  assert other.wait(BOUND_SECS) == 1, other.text()
  assert f"process {process} " in other.last_line()
  assert "disconnected without an error" in other.last_line()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_stopped_process(program, workdir, process):
  job = program.start_job(
    workdir, acts("stop", process), "cluster={'heartbeat_secs': 5}"
  )
  other = job[1 - process]
  assert other.wait() == 1, other.text()
  line = other.last_line()
  assert f"process {process} " in line and "no heartbeat for 5 s" in line
  job[process].send(signal.SIGCONT)
  assert job[process].wait(BOUND_SECS) == 1, job[process].text()


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_exception_in_one_process(program, workdir, process):
  job = program.start_job(workdir, acts("raise", process))
  job[process].until_log_has("KeyError")
  assert exit_codes(job, BOUND_SECS) == [1, 1]
  for line in last_lines(job):
    assert re.fullmatch(
      rf"error: process {process} \(host .*\): KeyError: 'of my own making'",
      line,
    ), line


@pytest.mark.slow
def test_hung_process(program, workdir):
  job = program.start_job(workdir, acts("hang"), "watchdog={'step_secs': 6}")
  assert exit_codes(job) == [1, 1]
  for process in job:
    line = process.last_line()
    assert re.search(r"the laggard is process 1 \(host .*\), at step 9 ", line)
    # Each wrote the stacks of its own threads.
    assert list(workdir.glob(f"stacks-*-{process.pid}.txt"))
  (stacks,) = workdir.glob(f"stacks-*-{job[1].pid}.txt")
  assert "one_process.py" in stacks.read_text()


@pytest.mark.slow
def test_different_config_on_one_process(program, workdir):
  job = program.start_job(workdir, each=[{}, {"changes": ["lr=0.002"]}])
  assert exit_codes(job) == [2, 2]
  for line in last_lines(job):
    assert "process 1 has config.lr=0.002" in line
    assert "process 0 has config.lr=0.001" in line
  assert not workdir.exists()


@pytest.mark.slow
def test_missing_process(program, workdir):
  job = program.start_job(
    workdir, "cluster={'join_secs': 5}", each=[{}, {}, {"starts": False}]
  )
  assert exit_codes(job, 60) == [1, 1]
  for line in last_lines(job):
    assert "1 of 3 processes did not join within 5 s" in line, line
    assert line.endswith("(config.cluster.join_secs): 2"), line


@pytest.mark.slow
def test_unexpected_number_of_devices(program, workdir):
  job = program.start_job(workdir, "expect_devices=4")
  assert exit_codes(job) == [2, 2]
  assert "config.expect_devices=4: the job has 2" in job[0].last_line()


@pytest.mark.slow
@pytest.mark.parametrize("has_room_for_its_log", [True, False])
def test_full_disk_of_one_process(program, workdir, has_room_for_its_log):
  # Fault 10.
  fault = "limit", "2", "20000" if has_room_for_its_log else "4000"
  job = program.start_job(workdir, each=[{}, {"fault": fault}])
  assert exit_codes(job) == [1, 1], job[0].text()
  for line in last_lines(job)[: 2 if has_room_for_its_log else 1]:
    assert "process 1" in line, line


@pytest.mark.slow
def test_straggler_is_logged(program, workdir):
  job = program.start_job(
    workdir, acts("wait", step=4), "cluster={'straggler_secs': 2}"
  )
  assert exit_codes(job) == [0, 0]
  straggler = r"straggler: process 1 \(host .*\) spends 0\.3"
  assert re.search(straggler, job[0].text())
  assert "host seconds per step, by process: 1: 0.3" in job[0].text()
