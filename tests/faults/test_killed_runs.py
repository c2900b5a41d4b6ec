"""Faults 1 to 7: kill -9 at any moment costs only time."""

import signal

import pytest
import tiny

from bigtrain.checkpoints import folders
from bigtrain.checkpoints.manifest import CheckpointError
from faults import soak
from faults.program import assert_same_run, assert_same_state, steps

# Each fault gets a process of its own, which resumes from the one before, all
# in one workdir: the fault, with the number of the save or removal that it
# hits; the signal; a lower bound of the newest step afterwards; and the kind of
# leftovers.
MOMENTS = (
  (("kill", "begin", "2"), signal.SIGKILL, 2, None),
  (("kill", "metadata written", "2"), signal.SIGKILL, 4, "tmp"),
  (("chunk", "2"), signal.SIGXFSZ, 6, "tmp"),
  (("kill", "data written", "2"), signal.SIGKILL, 8, "tmp"),
  (("kill", "manifest written", "2"), signal.SIGKILL, 10, "tmp"),
  (("kill", "committed", "2"), signal.SIGKILL, 14, None),
  (("kill", "renamed for removal", "1"), signal.SIGKILL, 16, "del"),
  (("removal", "2"), signal.SIGKILL, 18, "del"),
)


def leftovers(workdir):
  return folders.listing(str(workdir)).leftovers


def assert_rows_up_to(workdir, other, step):
  """The rows up to the newest checkpoint have survived the kill."""
  rows = tiny.rows(workdir)
  for row_step, expected in tiny.rows(other).items():
    if row_step > step:
      break
    has_row = row_step in rows
    assert has_row or "loss" not in expected, f"no row of step {row_step}"
    for name, value in rows.get(row_step, {}).items():
      assert expected[name] == value, (row_step, name)


@pytest.mark.slow
def test_killed_at_each_moment_of_a_save(program, workdir, undisturbed):
  before = []
  for fault, number, least, kind in MOMENTS:
    process = program.start(workdir, fault=fault)
    assert process.wait() == -number, f"{fault}:\n{process.text()}"
    assert set(before).isdisjoint(leftovers(workdir)), fault
    before = leftovers(workdir)
    has_kind = any(f".{kind or 'tmp'}-" in path for path in before)
    assert has_kind == (kind is not None), (fault, before)
    for path in before:
      with pytest.raises(CheckpointError, match="remains of an unfinished"):
        tiny.arrays(path)
    newest = steps(workdir)[-1]
    assert newest >= least, fault
    assert_same_state(workdir, undisturbed, newest)
    assert_rows_up_to(workdir, undisturbed, newest)
    if fault[0] == "chunk":
      sizes = [size for path in before for _, size in folders.files_below(path)]
      assert 100_000 in sizes, "no file was cut"
  program.run(workdir)
  assert leftovers(workdir) == [] and not list(workdir.glob("stacks-*"))
  assert steps(workdir) == [22, 24]
  assert_same_run(workdir, undisturbed, 24)


@pytest.mark.slow
@pytest.mark.parametrize("devices, replica", [(1, 1), (4, 2)])
def test_killed_at_random_times(program, tmp_path, devices, replica):
  options = dict(seed=devices + replica, devices=devices, replica=replica)
  soak.soak(program, tmp_path, kills=5, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
  "fault",
  [
    ("kill", "metadata written", "2"),
    ("chunk", "2"),
    ("kill", "manifest written", "2"),
  ],
)
def test_same_step_is_saved_on_another_number_of_devices(
  program, workdir, undisturbed, fault
):
  assert program.start(workdir, fault=fault).wait() < 0
  assert steps(workdir) == [2] and len(leftovers(workdir)) == 1
  program.run(workdir, "stop_at_steps=6", devices=4)
  assert steps(workdir) == [4, 6] and leftovers(workdir) == []
  program.run(workdir, "stop_at_steps=8")
  assert steps(workdir) == [6, 8]
  rows, expected = tiny.rows(workdir), tiny.rows(undisturbed)
  for step in (3, 6):
    for name, value in expected[step].items():
      if name.startswith("id_"):
        assert rows[step][name] == value
      else:
        assert rows[step][name] == pytest.approx(value, rel=1e-4), name
