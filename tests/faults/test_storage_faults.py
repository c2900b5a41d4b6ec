"""Faults 8, 9, 11, 12 and 18: full, slow, read-only and unreadable storage."""

import os
import shutil
import subprocess
import time

import pytest
import tiny
from support import disks

from bigtrain.checkpoints import integrity
from bigtrain.reports import log_entries
from faults.program import assert_same_run, path_of, steps


@pytest.fixture
def disk(workdir):
  """(workdir on a disk with room for one checkpoint, whether it is mounted).

  Without the right to mount, the test limits the size of files instead.
  """
  workdir.mkdir()
  mounted = disks.mount(workdir, "1m")
  yield workdir, mounted
  if mounted:
    disks.unmount(workdir)


@pytest.mark.slow
def test_a_full_disk(program, disk, undisturbed):
  workdir, mounted = disk
  no_room = "No space left on device" if mounted else "File too large"

  def fill(step, number, *changes):
    fault = () if mounted else ("limit", str(number))
    process = program.start(workdir, *changes, fault=fault)
    assert process.wait() == 1, process.text()
    assert "Finished" not in process.text()
    failed = f"the checkpoint of step {step} was not saved: "
    assert failed in process.text() and no_room in process.text()
    assert process.last_line().startswith("error: ")
    assert no_room in process.last_line()
    if mounted:  # One line says which disk it is and how full.
      assert process.last_line().endswith("bytes free)")
      assert str(workdir) in process.last_line()
      assert "Traceback" not in process.text()
    assert steps(workdir) == [2]
    assert integrity.verify(str(path_of(workdir, 2))) == []
    assert os.listdir(workdir / "checkpoints") == ["00000002"]

  fill(4, 2, "stop_at_steps=4")  # Fault 9: the very last save.
  fill(4, 1)
  if mounted:
    disks.mount(workdir, "100m", "remount")
  program.run(workdir)
  assert_same_run(workdir, undisturbed, 24)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["data written", "renamed for removal"])
def test_slow_storage(program, workdir, undisturbed, tmp_path, point):
  log = tmp_path / "points"
  process = program.start(workdir, fault=("slow", point, "0.5", str(log)))
  folder = workdir / "checkpoints"
  most_writing, most_there = 0, 0
  while not process.ended():
    names = os.listdir(folder) if folder.is_dir() else []
    # The write probe at the start is named like an attempt of step 0.
    writing = [n for n in names if ".tmp-" in n and int(n[:8])]
    most_writing = max(most_writing, len(writing))
    most_there = max(most_there, len(names))
    time.sleep(0.01)
  assert process.wait() == 0, process.text()
  points = log.read_text().split("\n")
  saves = [p for p in points if p in ("begin", "committed")]
  assert saves == ["begin", "committed"] * 12
  assert most_writing == 1
  # Two are kept, one or two are being removed, and one is being written.
  assert most_there <= 6, "the disk fills up"
  rows = log_entries.read(str(workdir))
  stalls = [row.get("ckpt_stall_secs", 0) for row in rows]
  assert max(stalls) > 0.3, "nothing waited for the storage"
  assert_same_run(workdir, undisturbed, 24)


# Permissions, as a user other than root.


def run_unprivileged(program, workdir, code):
  return program.run(workdir, fault=("unprivileged",), code=code)


def test_a_read_only_workdir(program, workdir):
  workdir.mkdir()
  workdir.chmod(0o555)
  process = run_unprivileged(program, workdir, code=2)
  expected = f"error: --workdir={workdir}: cannot write there: Permission "
  assert process.last_line().startswith(expected), process.text()
  assert "compiling" not in process.text()
  assert os.listdir(workdir) == []


@pytest.fixture
def trained(workdir, undisturbed):
  """A workdir with the checkpoints of steps 2 and 4."""
  for step in (2, 4):
    shutil.copytree(path_of(undisturbed, step), path_of(workdir, step))
  yield workdir
  subprocess.check_call(["chmod", "-R", "u+rwX", str(workdir)])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "00000004", "00000004/manifest.json"])
def test_unreadable_checkpoints_do_not_start_a_fresh_run(
  program, trained, undisturbed, part
):
  path = trained / "checkpoints" / part
  path.chmod(0o300)
  process = run_unprivileged(program, trained, code=1)
  expected = (
    f"error: CheckpointError: {path}: cannot be read: Permission denied"
  )
  assert process.last_line().startswith(expected), process.text()
  assert "from scratch" not in process.text()
  path.chmod(0o700)
  assert steps(trained) == [2, 4]
  tiny.assert_same(tiny.arrays(trained, 4), tiny.arrays(undisturbed, 4))


@pytest.mark.slow
def test_an_unreadable_array(program, trained):
  folder = path_of(trained, 4, "params/first/kernel")
  (chunk,) = (p for p in folder.rglob("c*") if p.is_file())
  chunk.chmod(0)
  last = run_unprivileged(program, trained, code=1).last_line()
  assert last.startswith("error: CheckpointError"), last
  assert "array 'params/first/kernel': PERMISSION_DENIED" in last
  assert str(chunk) in last
