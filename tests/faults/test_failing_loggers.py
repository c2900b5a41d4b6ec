"""Fault 59: loggers that fail or hang."""

import pytest

from bigtrain.reports import log_entries
from faults.program import assert_same_run


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["fails", "hangs"])
def test_a_logger_never_ends_the_run(program, workdir, undisturbed, problem):
  changes = ["wandb={'project': 'p'}"]
  if problem == "fails":  # And so does TensorBoard.
    workdir.mkdir()
    (workdir / "tensorboard").write_text("a file in place of the folder")
    changes.append("tensorboard=True")
  process = program.run(workdir, *changes, fault=("logger", problem))
  verb = "failed" if problem == "fails" else "hangs"
  message = f"W&B {verb} and is off from now on; metrics.jsonl is still written"
  assert process.text().count(message) == 1
  assert process.text().count("TensorBoard failed") == (problem == "fails")
  assert process.text().count("Traceback") == 0
  assert_same_run(workdir, undisturbed, 24)
  steps = [row["step"] for row in log_entries.read(str(workdir))]
  rows = log_entries.read(str(undisturbed))
  assert steps == [row["step"] for row in rows]
