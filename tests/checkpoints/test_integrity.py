import json
import logging
import os
import pathlib
import shutil

import numpy as np
import pytest
from saved_states import like, path_of, same, save

from bigtrain.checkpoints import checkpointer, manifest
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


# Faults 13 to 17: damage.


def damage_deleted(path):
  os.remove(path)


def damage_cut(path):
  with open(path, "r+b") as file:
    file.truncate(os.path.getsize(path) // 2)


def damage_grown(path):
  with open(path, "ab") as file:
    file.write(b"x")


def damage_flipped(path):
  with open(path, "r+b") as file:
    content = bytearray(file.read())
    content[len(content) // 3] ^= 16
    file.seek(0)
    file.write(content)


@pytest.mark.parametrize(
  "damage", [damage_deleted, damage_cut, damage_grown, damage_flipped]
)
@pytest.mark.parametrize(
  "array, file", [("params/dense/kernel", "c.0.0"), ("opt/seen", "zarr.json")]
)
def test_damage_is_refused_naming_array_and_file(workdir, damage, array, file):
  save(workdir, 1)
  path = path_of(workdir, 1, array, file)
  damage(path)
  (problem,) = checkpointer.verify(path_of(workdir, 1))
  assert problem.array == array and problem.path == path
  with pytest.raises(DamagedError) as e:
    checkpointer.restore(workdir, like())
  assert repr(array) in str(e.value) and path in str(e.value)


def test_a_missing_array_is_named(workdir):
  save(workdir, 1)
  shutil.rmtree(path_of(workdir, 1, "opt/mu"))
  (problem,) = checkpointer.verify(path_of(workdir, 1))
  assert problem.array == "opt/mu/dense" and problem.what == "missing"
  with pytest.raises(DamagedError, match=r"array 'opt/mu/dense': .* missing"):
    checkpointer.restore(workdir, like())


def test_a_flipped_bit_anywhere_is_found(workdir):
  save(workdir, 1, like=like(1, 8))
  rng = np.random.default_rng(0)
  files = [
    p for p in pathlib.Path(path_of(workdir, 1)).rglob("*") if p.is_file()
  ]
  assert len(files) > 15
  for path in files:
    content = path.read_bytes()
    for bit in rng.integers(0, 8 * len(content), 3):
      flipped = bytearray(content)
      flipped[bit // 8] ^= 1 << (bit % 8)
      path.write_bytes(flipped)
      assert checkpointer.verify(path_of(workdir, 1)), (path, bit)
      with pytest.raises(CheckpointError):
        checkpointer.restore(workdir, like())
    path.write_bytes(content)
  assert checkpointer.verify(path_of(workdir, 1)) == []


def test_a_damaged_newest_is_loud_and_never_a_fresh_start(workdir, caplog):
  save(workdir, 1, 2)
  damage_flipped(path_of(workdir, 2, "params/dense/bias/c.0"))
  with pytest.raises(DamagedError) as e:
    checkpointer.resume(workdir, like())
  assert "params/dense/bias" in str(e.value)
  assert "config.ckpt_fallback=True" in str(e.value)
  with caplog.at_level(logging.ERROR):
    found, told = checkpointer.resume(workdir, like(), fallback=True)
  assert told.step == 1 and "params/dense/bias" in caplog.text
  same(found, 1)
  os.remove(path_of(workdir, 1, "manifest.json"))
  for fallback in (True, False):
    with pytest.raises(DamagedError):
      checkpointer.resume(workdir, like(), fallback=fallback)
  shutil.rmtree(path_of(workdir, 2))
  with pytest.raises(DamagedError, match="no checkpoint: it has no manifest"):
    checkpointer.resume(workdir, like(), fallback=True)


def test_a_manifest_of_another_step_or_version_is_refused(workdir):
  save(workdir, 1)
  os.rename(path_of(workdir, 1), path_of(workdir, 3))
  with pytest.raises(DamagedError, match="of step 1, in the directory of"):
    checkpointer.restore(workdir, like())
  path = path_of(workdir, 3, "manifest.json")
  content = json.loads(pathlib.Path(path).read_text())
  del content["sha256"]
  content["version"] = 2
  content["sha256"] = manifest._digest(content)
  pathlib.Path(path).write_text(json.dumps(content))
  with pytest.raises(CheckpointError, match="format version 2"):
    checkpointer.restore(workdir, like())


@pytest.mark.parametrize(
  "changed",
  [
    {"shape": [16, -24]},
    {"shape": [16]},
    {"chunk_shape": [0, 24]},
    {"chunk_shape": [1.5, 24]},
    {"dtype": "object"},
  ],
)
def test_a_manifest_that_makes_no_sense_is_refused(workdir, changed):
  save(workdir, 1)
  path = pathlib.Path(path_of(workdir, 1, "manifest.json"))
  content = json.loads(path.read_text())
  del content["sha256"]
  content["arrays"]["params/dense/kernel"] |= changed
  content["sha256"] = manifest._digest(content)
  path.write_text(json.dumps(content))
  with pytest.raises(DamagedError, match="'params/dense/kernel': cannot be"):
    checkpointer.restore(workdir, like())


@pytest.mark.parametrize(
  "old, new", [("16, 24", "24, 16"), ('"at": 1', '"at": 3')]
)
def test_a_manifest_that_was_edited_is_refused(workdir, old, new):
  save(workdir, 1)
  path = pathlib.Path(path_of(workdir, 1, "manifest.json"))
  text = path.read_text()
  assert text.count(old) >= 1
  path.write_text(text.replace(old, new))
  with pytest.raises(DamagedError, match="its digest does not fit"):
    checkpointer.restore(workdir, like())
  (problem,) = checkpointer.verify(path_of(workdir, 1))
  assert problem.path == str(path)
