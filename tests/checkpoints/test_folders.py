"""Faults 18, 19 and 48: what else may be in a folder of checkpoints."""

import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from support.saved_states import like, path_of, save

from bigtrain.checkpoints import folders, integrity, restore
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError
from bigtrain.config.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def test_only_a_missing_or_empty_folder_is_a_fresh_start(workdir):
  assert restore.resume(workdir, like()) is None
  os.makedirs(folders.folder(workdir))
  assert restore.resume(workdir, like()) is None
  os.rmdir(folders.folder(workdir))
  pathlib.Path(folders.folder(workdir)).write_text("")
  with pytest.raises(CheckpointError, match="Not a directory"):
    restore.resume(workdir, like())


def test_strays_are_ignored_with_a_warning(workdir, caplog):
  save(workdir, 5)
  folder = pathlib.Path(folders.folder(workdir))
  (folder / "00000099").mkdir()
  (folder / "00000098").mkdir()
  (folder / "00000098" / "notes.txt").write_text("mine")
  (folder / "100").mkdir()
  (folder / "00000097").write_text("a file")
  (folder / ".nfs000").write_text("")
  (folder / "backup").symlink_to("/")
  with caplog.at_level(logging.WARNING):
    _, manifest = restore.resume(workdir, like())
  assert manifest.step == 5 and folders.steps(workdir) == [5]
  for name in ("00000099", "00000098", "100", "00000097", ".nfs000", "backup"):
    assert f"{folder / name}: ignored" in caplog.text
    assert os.path.lexists(folder / name)
  shutil.rmtree(folder / "00000005")
  assert restore.resume(workdir, like()) is None


_AS_ANOTHER_USER = """
import os, sys
from bigtrain.checkpoints import folders
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.config.errors import ConfigError
if not os.getuid():
  os.setuid(65534)
try:
  print(eval(sys.argv[1], {"w": sys.argv[2], **globals()}))
except (CheckpointError, ConfigError) as e:
  print(f"{type(e).__name__}: {e}")
"""


@pytest.fixture
def open_workdir():
  """A workdir that another user can reach."""
  path = tempfile.mkdtemp()
  os.chmod(path, 0o755)
  yield path
  shutil.rmtree(path)


def as_another_user(expression, workdir):
  """What an expression evaluates to without root's rights, as text."""
  done = subprocess.run(
    [sys.executable, "-c", _AS_ANOTHER_USER, expression, workdir],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.parametrize("part", ["checkpoints", "00000003", "manifest.json"])
def test_unreadable_checkpoints_are_no_fresh_start(open_workdir, part):
  save(open_workdir, 3)
  path = {
    "checkpoints": folders.folder(open_workdir),
    "00000003": path_of(open_workdir, 3),
    "manifest.json": path_of(open_workdir, 3, "manifest.json"),
  }[part]
  assert as_another_user("folders.newest(w)", open_workdir) == "3\n"
  os.chmod(path, 0)
  output = as_another_user(
    "folders.read_manifest(folders.find(w))"
    if part == "manifest.json"
    else "folders.newest(w)",
    open_workdir,
  )
  os.chmod(path, 0o755)
  assert output.startswith("CheckpointError"), output
  assert "Permission denied" in output and path in output


def test_a_read_only_workdir_is_refused(open_workdir):
  if not os.getuid():
    output = as_another_user("folders.check_writable(w)", open_workdir)
  else:
    os.chmod(open_workdir, 0o555)
    output = as_another_user("folders.check_writable(w)", open_workdir)
    os.chmod(open_workdir, 0o755)
  message = f"ConfigError: --workdir={open_workdir}: cannot write"
  assert output.startswith(message)
  folders.check_writable(open_workdir)
  assert os.listdir(folders.folder(open_workdir)) == []
  with pytest.raises(ConfigError, match="'g3'; expected a folder, gs://"):
    folders.check_writable("g3://bucket/run")


def test_links_are_not_followed(workdir, tmp_path):
  save(workdir, 1)
  outside = tmp_path / "outside"
  outside.mkdir()
  (outside / "precious").write_text("x")
  folder = folders.folder(workdir)
  link = os.path.join(folder, "00000001.tmp-ab12-0")
  os.symlink(outside, link)
  with pytest.raises(CheckpointError, match="symbolic link"):
    folders.clean(workdir)
  os.remove(link)
  # Removing a directory removes the links in it, not their targets.
  os.mkdir(link)
  os.symlink(outside, os.path.join(link, "params"))
  folders.clean(workdir)
  assert os.listdir(folder) == ["00000001"]

  for inside in ("params/dense", "params/dense/kernel", "opt/seen/c"):
    path = path_of(workdir, 1, inside)
    os.rename(path, outside / "moved")
    os.symlink(outside / "moved", path)
    with pytest.raises(DamagedError, match="symbolic link"):
      restore.restore(workdir, like())
    assert "symbolic link" in str(integrity.verify(path_of(workdir, 1))[0])
    os.remove(path)
    os.rename(outside / "moved", path)
  assert integrity.verify(path_of(workdir, 1)) == []

  os.rename(path_of(workdir, 1), outside / "moved")
  os.symlink(outside / "moved", path_of(workdir, 1))
  with pytest.raises(CheckpointError, match="symbolic link"):
    folders.newest(workdir)
  os.remove(path_of(workdir, 1))
  os.rename(folder, outside / "checkpoints")
  os.symlink(outside / "checkpoints", folder)
  with pytest.raises(CheckpointError, match="symbolic link"):
    folders.newest(workdir)
  assert (outside / "precious").read_text() == "x"
