"""Fault 46: two jobs in one workdir."""

import pytest
import tiny

from faults.program import assert_same_run


@pytest.mark.slow
def test_second_job_is_refused_and_a_dead_jobs_lease_is_taken_over(
  program, workdir, undisturbed, tmp_path
):
  flag = tmp_path / "steps"
  gate = dict(type="faults.waiting.Gate", step=9, flag=str(flag))
  first = program.start(workdir, f"hooks={dict(gate=gate)}")
  first.until_file(flag)
  # A thread writes the rows of earlier steps.
  evaluated = lambda: "val/acc" in tiny.rows(workdir).get(8, {})
  first.until(evaluated, "the row of step 8")
  rows = (workdir / "metrics.jsonl").read_bytes()
  second = program.run(workdir, code=2)
  assert second.last_line().startswith(f"error: {workdir}/lease.json: another")
  assert f"process {first.pid} on host " in second.last_line()
  assert "compiling" not in second.text()
  assert not first.ended()
  assert (workdir / "metrics.jsonl").read_bytes() == rows
  first.kill()
  third = program.run(workdir)
  assert f"taken over from process {first.pid}" in third.text()
  assert not (workdir / "lease.json").exists()
  assert_same_run(workdir, undisturbed, 24)
