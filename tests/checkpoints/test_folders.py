import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest
from saved_states import like, path_of, save

from bigtrain import trees
from bigtrain.checkpoints import checkpointer, folders, manifest
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError
from bigtrain.settings import ConfigError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


# Faults 18 to 20: what is there besides, or cannot be read, or does not fit.


def test_only_proven_absence_is_a_fresh_start(workdir):
  assert checkpointer.resume(workdir, like()) is None
  os.makedirs(folders.folder(workdir))
  assert checkpointer.resume(workdir, like()) is None
  os.rmdir(folders.folder(workdir))
  pathlib.Path(folders.folder(workdir)).write_text("")
  with pytest.raises(CheckpointError, match="Not a directory"):
    checkpointer.resume(workdir, like())


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
    _, told = checkpointer.resume(workdir, like())
  assert told.step == 5 and checkpointer.steps(workdir) == [5]
  for name in ("00000099", "00000098", "100", "00000097", ".nfs000", "backup"):
    assert f"{folder / name}: ignored" in caplog.text
    assert os.path.lexists(folder / name)
  shutil.rmtree(folder / "00000005")
  assert checkpointer.resume(workdir, like()) is None


_AS_NOBODY = """
import os, sys
from bigtrain import checkpoint, storage
from bigtrain.manifest import CheckpointError
from bigtrain.settings import ConfigError
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


def as_nobody(expression, workdir):
  done = subprocess.run(
    [sys.executable, "-c", _AS_NOBODY, expression, workdir],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.parametrize("part", ["checkpoints", "00000003", "manifest.json"])
def test_what_may_not_be_read_is_no_fresh_start(open_workdir, part):
  save(open_workdir, 3)
  path = {
    "checkpoints": folders.folder(open_workdir),
    "00000003": path_of(open_workdir, 3),
    "manifest.json": path_of(open_workdir, 3, "manifest.json"),
  }[part]
  assert as_nobody("checkpoint.newest(w)", open_workdir) == "3\n"
  os.chmod(path, 0)
  said = as_nobody(
    "storage.read_manifest(storage.find(w))"
    if part == "manifest.json"
    else "checkpoint.newest(w)",
    open_workdir,
  )
  os.chmod(path, 0o755)
  assert said.startswith("CheckpointError"), said
  assert "Permission denied" in said and path in said


def test_a_read_only_workdir_is_refused(open_workdir):
  if not os.getuid():
    said = as_nobody("checkpoint.check_writable(w)", open_workdir)
  else:
    os.chmod(open_workdir, 0o555)
    said = as_nobody("checkpoint.check_writable(w)", open_workdir)
    os.chmod(open_workdir, 0o755)
  assert said.startswith(f"ConfigError: --workdir={open_workdir}: cannot write")
  checkpointer.check_writable(open_workdir)
  assert os.listdir(folders.folder(open_workdir)) == []
  with pytest.raises(ConfigError, match="'g3'; expected a folder, gs://"):
    checkpointer.check_writable("g3://bucket/run")


def test_every_difference_to_the_model_is_listed(workdir):
  save(workdir, 1)
  other = dict(trees.flatten_with_names(like()))
  new = other.pop("opt/seen")
  other["opt/new"] = new
  other["params/wide"] = other["opt/mu/dense"]
  other["step"] = jax.ShapeDtypeStruct((), jnp.uint32, sharding=new.sharding)
  with pytest.raises(checkpointer.MismatchError) as e:
    checkpointer.resume(workdir, trees.from_flat(other), fallback=True)
  text = str(e.value)
  for line in (
    "missing: opt/new: expected uint32[], found nothing",
    "extra: opt/seen: expected nothing, found uint32[]",
    "shape: params/wide: expected float16[3,32], found float32[8,40]",
    "dtype: step: expected uint32[], found int32[]",
  ):
    assert line in text
  last = text.splitlines()[-1]
  assert path_of(workdir, 1) in last and "1 missing, 1 shape" in last


# Fault 48: nothing outside of the workdir.


def test_links_are_not_followed(workdir, tmp_path):
  save(workdir, 1)
  outside = tmp_path / "outside"
  outside.mkdir()
  (outside / "precious").write_text("x")
  folder = folders.folder(workdir)
  link = os.path.join(folder, "00000001.tmp-ab12-0")
  os.symlink(outside, link)
  with pytest.raises(CheckpointError, match="symbolic link"):
    checkpointer.clean(workdir)
  os.remove(link)
  # A link inside of what is removed is removed, and not what it points to.
  os.mkdir(link)
  os.symlink(outside, os.path.join(link, "params"))
  checkpointer.clean(workdir)
  assert os.listdir(folder) == ["00000001"]

  for inside in ("params/dense", "params/dense/kernel", "opt/seen/c"):
    path = path_of(workdir, 1, inside)
    os.rename(path, outside / "moved")
    os.symlink(outside / "moved", path)
    with pytest.raises(DamagedError, match="symbolic link"):
      checkpointer.restore(workdir, like())
    assert "symbolic link" in str(checkpointer.verify(path_of(workdir, 1))[0])
    os.remove(path)
    os.rename(outside / "moved", path)
  assert checkpointer.verify(path_of(workdir, 1)) == []

  os.rename(path_of(workdir, 1), outside / "moved")
  os.symlink(outside / "moved", path_of(workdir, 1))
  with pytest.raises(CheckpointError, match="symbolic link"):
    checkpointer.newest(workdir)
  os.remove(path_of(workdir, 1))
  os.rename(folder, outside / "checkpoints")
  os.symlink(outside / "checkpoints", folder)
  with pytest.raises(CheckpointError, match="symbolic link"):
    checkpointer.newest(workdir)
  assert (outside / "precious").read_text() == "x"


def test_names_in_a_manifest_are_checked_too(workdir):
  save(workdir, 1)
  path = pathlib.Path(path_of(workdir, 1, "manifest.json"))
  content = json.loads(path.read_text())
  del content["sha256"]
  content["arrays"]["../../x"] = content["arrays"].pop("step")
  content["sha256"] = manifest._digest(content)
  path.write_text(json.dumps(content))
  with pytest.raises(DamagedError, match=r"array name '\.\./\.\./x'"):
    checkpointer.restore(workdir, like())
