import logging
import os
import shutil
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.array_serialization import serialization
from support.saved_states import (
  MESHES,
  host_state,
  like,
  one_device,
  path_of,
  same,
  save,
)

from bigtrain.arrays import trees
from bigtrain.checkpoints import folders, integrity, manifest, restore
from bigtrain.checkpoints.manifest import DamagedError


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


@pytest.mark.parametrize("saved", MESHES)
def test_restores_bit_equal_under_any_mesh(workdir, saved):
  save(workdir, 7, like=like(*saved), config_digest="abc")
  for mesh in MESHES:
    state, manifest = restore.restore(workdir, like(*mesh))
    same(state, 7)
    jax.tree.map(
      lambda x, s: x.sharding == s.sharding or 1 / 0,
      state,
      like(*mesh),
    )
  same(restore.restore(path_of(workdir, 7), one_device())[0], 7)
  assert (manifest.step, manifest.host_state) == (7, host_state(7))
  assert manifest.config_digest == "abc"
  assert integrity.verify(path_of(workdir, 7)) == []


def test_jax_array_serialization_reads_the_files(workdir):
  save(workdir, 7)
  names, wanted = zip(*trees.flatten_with_names(like(1, 8)))
  specs = []
  for name in names:
    spec = serialization.get_tensorstore_spec(path_of(workdir, 7, name))
    specs.append({**spec, "driver": "zarr3", "fill_missing_data_reads": False})
  arrays = serialization.run_deserialization(
    [x.sharding for x in wanted], specs
  )
  same(trees.from_flat(dict(zip(names, arrays))), 7)


def test_all_differences_from_the_model_are_listed(workdir):
  """Fault 20."""
  save(workdir, 1)
  other = dict(trees.flatten_with_names(like()))
  new = other.pop("opt/seen")
  other["opt/new"] = new
  other["params/wide"] = other["opt/mu/dense"]
  other["step"] = jax.ShapeDtypeStruct((), jnp.uint32, sharding=new.sharding)
  with pytest.raises(restore.MismatchError) as e:
    restore.resume(workdir, trees.from_flat(other), fallback=True)
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


def test_damage_to_the_newest_checkpoint_is_never_a_fresh_start(
  workdir, caplog
):
  save(workdir, 1, 2)
  chunk = path_of(workdir, 2, "params/dense/bias/c.0")
  with open(chunk, "r+b") as file:
    content = bytearray(file.read())
    content[len(content) // 3] ^= 16
    file.seek(0)
    file.write(content)
  with pytest.raises(DamagedError) as e:
    restore.resume(workdir, like())
  assert "params/dense/bias" in str(e.value)
  assert "config.ckpt_fallback=True" in str(e.value)
  with caplog.at_level(logging.ERROR):
    state, manifest = restore.resume(workdir, like(), fallback=True)
  assert manifest.step == 1 and "params/dense/bias" in caplog.text
  same(state, 1)
  os.remove(path_of(workdir, 1, "manifest.json"))
  for fallback in (True, False):
    with pytest.raises(DamagedError):
      restore.resume(workdir, like(), fallback=fallback)
  shutil.rmtree(path_of(workdir, 2))
  with pytest.raises(DamagedError, match="not a checkpoint: it has no manif"):
    restore.resume(workdir, like(), fallback=True)
  assert folders.steps(workdir) == [1]


def test_other_factors_of_adafactor_are_explained():
  def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  old = {"opt/0/v_row/query/kernel": spec(3, 2, 8), "opt/0/count": spec()}
  saved = {n: manifest.Array.describe(x.shape, x.dtype) for n, x in old.items()}
  new = {**old, "opt/0/v_row/query/kernel": spec(3, 8)}
  with pytest.raises(restore.MismatchError, match="view='parameters'"):
    restore.check_fits("run", types.SimpleNamespace(arrays=saved), new)
