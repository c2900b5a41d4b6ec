"""Faults 13 to 17: damage to the files of a checkpoint."""

import os
import pathlib
import shutil

import numpy as np
import pytest
from support.saved_states import like, path_of, save

from bigtrain.checkpoints import integrity, restore
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def delete(path):
  os.remove(path)


def truncate(path):
  with open(path, "r+b") as file:
    file.truncate(os.path.getsize(path) // 2)


def extend(path):
  with open(path, "ab") as file:
    file.write(b"x")


def flip_a_bit(path):
  with open(path, "r+b") as file:
    content = bytearray(file.read())
    content[len(content) // 3] ^= 16
    file.seek(0)
    file.write(content)


@pytest.mark.parametrize("damage", [delete, truncate, extend, flip_a_bit])
@pytest.mark.parametrize(
  "array, file", [("params/dense/kernel", "c.0.0"), ("opt/seen", "zarr.json")]
)
def test_errors_name_the_damaged_array_and_file(workdir, damage, array, file):
  save(workdir, 1)
  path = path_of(workdir, 1, array, file)
  damage(path)
  (problem,) = integrity.verify(path_of(workdir, 1))
  assert problem.array == array and problem.path == path
  with pytest.raises(DamagedError) as e:
    restore.restore(workdir, like())
  assert repr(array) in str(e.value) and path in str(e.value)


def test_errors_name_a_missing_array(workdir):
  save(workdir, 1)
  shutil.rmtree(path_of(workdir, 1, "opt/mu"))
  (problem,) = integrity.verify(path_of(workdir, 1))
  assert problem.array == "opt/mu/dense" and problem.what == "missing"
  with pytest.raises(DamagedError, match=r"array 'opt/mu/dense': .* missing"):
    restore.restore(workdir, like())


def test_a_flipped_bit_in_any_file_is_detected(workdir):
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
      assert integrity.verify(path_of(workdir, 1)), (path, bit)
      with pytest.raises(CheckpointError):
        restore.restore(workdir, like())
    path.write_bytes(content)
  assert integrity.verify(path_of(workdir, 1)) == []
