"""kill -9 costs only time in runs with teachers, centres and queues."""

import signal

import pytest
import tiny

from faults.program import HERE, assert_same_run, assert_same_state, steps

CONFIG = HERE / "teachers_config.py"
MOMENTS = {
  "dinov2": (
    ("kill", "metadata written", "2"),
    ("kill", "committed", "1"),
  ),
  "moco_v3": (("kill", "manifest written", "3"),),
}
ARRAYS = {
  "dinov2": (
    "tasks/dino/teacher/class_head/Dense_0/kernel",
    "tasks/dino/centre/patch",
    "tasks/dino/gram/teacher/cls",
    "tasks/dino/gram/copies",
    "tasks/queue/queue_QC",
  ),
  "moco_v3": ("tasks/teacher/projector/Dense_0/kernel",),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MOMENTS])
def test_a_killed_run_has_the_bits_of_an_undisturbed_one(
  program, tmp_path, kind
):
  config = f"{CONFIG}:data={program.data},kind={kind}"
  quiet, killed = tmp_path / "quiet", tmp_path / "killed"
  program.run(quiet, "keep_ckpts=9", config=config)
  for fault in MOMENTS[kind]:
    process = program.start(killed, fault=fault, config=config)
    assert process.wait() == -signal.SIGKILL, f"{fault}:\n{process.text()}"
    assert_same_state(killed, quiet, steps(killed)[-1])
  program.run(killed, config=config)
  assert_same_run(killed, quiet, 12)
  # The state of the tasks has changed since the first checkpoint.
  first, last = tiny.arrays(quiet, 2), tiny.arrays(quiet, 12)
  for name in ARRAYS[kind]:
    assert (first[name] != last[name]).any(), name
