"""Faults 1 to 9: a save that is killed or fails."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
from checkpoints import save_and_die
from support import disks
from support.saved_states import (
  MESHES,
  host_state,
  like,
  make_state,
  one_device,
  path_of,
  same,
  save,
)

from bigtrain.checkpoints import checkpointer, folders, integrity, restore
from bigtrain.checkpoints.manifest import CheckpointError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """Folder with a workdir for each moment at which a run was killed."""
  root = tmp_path_factory.mktemp("killed")
  moments = [
    *save_and_die.POINTS,
    save_and_die.IN_A_CHUNK,
    save_and_die.IN_REMOVAL,
  ]
  done = subprocess.run(
    [
      sys.executable,
      str(ROOT / "tests/checkpoints/save_and_die.py"),
      str(root),
      *moments,
    ],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split("\n")[:-1] == [f"{m} 9" for m in moments]
  return root


@pytest.mark.parametrize("moment", save_and_die.POINTS)
def test_killed_at(killed, moment):
  workdir = str(killed / moment)
  committed = moment in ("committed", "renamed for removal")
  _check_killed(workdir, expected=30 if committed else 20)


def test_killed_in_a_chunk(killed):
  workdir = str(killed / save_and_die.IN_A_CHUNK)
  (leftover,) = folders.listing(workdir).leftovers
  assert any("__lock" in name for name, _ in folders.files_below(leftover))
  _check_killed(workdir, expected=20)


def test_killed_in_removal(killed):
  _check_killed(str(killed / save_and_die.IN_REMOVAL), expected=30)


def _check_killed(workdir, expected):
  assert folders.newest(workdir) == expected
  for leftover in folders.listing(workdir).leftovers:
    with pytest.raises(CheckpointError, match=r"unfinished|not a checkpoint"):
      restore.restore(leftover, like())
  state, manifest = restore.resume(workdir, like(1, 8))
  assert manifest.step == expected
  assert manifest.host_state == host_state(expected)
  same(state, expected)
  assert folders.listing(workdir).leftovers == []
  # Fault 7: a run on other devices reaches the same step again.
  save(workdir, 30, like=one_device())
  same(restore.restore(workdir, like(8, 1), step=30)[0], 30)
  for step in folders.steps(workdir):
    assert integrity.verify(path_of(workdir, step)) == []
  save(workdir, 40)
  assert folders.steps(workdir) == [30, 40]


@pytest.mark.parametrize("point", ["begin", "data written", "manifest written"])
def test_a_failed_save_raises_and_leaves_older_checkpoints_alone(
  workdir, monkeypatch, point
):
  save(workdir, 1)

  def fail(name):
    if name == point:
      raise OSError(5, "Input/output error", "/dev/x")

  monkeypatch.setattr(checkpointer, "_point", fail)
  state = make_state(like(), 2)
  saver = checkpointer.Checkpointer(workdir)
  saver.save(2, state)
  with pytest.raises(CheckpointError, match="step 2 was not saved: /dev/x"):
    saver.wait()
  for method in (saver.check, saver.wait, lambda: saver.save(3, state)):
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
      method()
  with pytest.raises(CheckpointError, match="Input/output error"):
    saver.close()
  assert os.listdir(folders.folder(workdir)) == ["00000001"]
  same(restore.restore(workdir, like())[0], 1)


def test_the_guard_can_prevent_the_commit(workdir):
  def lost():
    raise RuntimeError("the lease is lost")

  saver = checkpointer.Checkpointer(workdir, guard=lost)
  saver.save(1, make_state(like(), 1))
  with pytest.raises(CheckpointError, match="the lease is lost"):
    saver.close()
  assert folders.newest(workdir) is None


_FILL_THE_DISK = """
import sys, time
import jax.numpy as jnp
from bigtrain.checkpoints import checkpointer
saver = checkpointer.Checkpointer(sys.argv[1])
saver.save(1, {"x": jnp.ones((2**10, 2**8))}, block=True)
print("saved", flush=True)
if sys.argv[2] == "limit":
  import resource
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
saver.save(2, {"x": jnp.ones((2**10, 2**12))})
try:
  while True:
    saver.check()
    time.sleep(0.01)
finally:
  print("noticed", flush=True)
  saver.close()  # As main does: a thread at work may abort a process's end.
"""


def test_a_full_disk(tmp_path):
  # Root mounts a small disk; other users limit the size of files.
  workdir = tmp_path / "disk"
  workdir.mkdir()
  mounted = disks.mount(workdir, "4m")
  try:
    done = subprocess.run(
      [
        sys.executable,
        "-c",
        _FILL_THE_DISK,
        str(workdir),
        "mounted" if mounted else "limit",
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.split() == ["saved", "noticed"]
    last = done.stderr.strip().splitlines()[-1]
    assert "the checkpoint of step 2 was not saved" in last
    assert ("No space left" if mounted else "File too large") in last
    assert os.listdir(folders.folder(workdir)) == ["00000001"]
    assert integrity.verify(path_of(str(workdir), 1)) == []
  finally:
    if mounted:
      disks.unmount(workdir)


# Several processes.


def test_two_processes_save_restore_and_fail_together(two_processes):
  part = two_processes("checkpoints.save_together.run")
  workdir = str(part.folder / "run")
  for i, events in enumerate(part.results):
    saved, restored, refused, failed = events
    assert (saved, restored) == ("saved", "restored 1")
    assert refused.startswith("refused array 'x' is damaged")
    assert failed.startswith("failed the checkpoint of step 2 was not saved: ")
    assert "/a/chunk: No space left on device" in failed
    if i == 0:
      assert f"process 1 on host {socket.gethostname()}" in failed
  assert integrity.verify(path_of(workdir, 1)) == []
  for mesh in MESHES:
    restored, manifest = restore.restore(workdir, like(*mesh))
    same(restored, 1)
  assert manifest.writer["processes"] == 2
  # Each process wrote only its own chunks, each of them once.
  assert manifest.arrays["params/wide"].grid == (2, 1)
  # The next start removes the leftovers of the failed save.
  assert len(folders.listing(workdir).leftovers) == 1
  restore.resume(workdir, like())
  assert os.listdir(folders.folder(workdir)) == ["00000001"]
