import json
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from support.saved_states import like, path_of, save

from bigtrain.checkpoints import integrity, manifest, restore
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def edit(path, change):
  """Changes the content of a manifest, with a digest that matches."""
  content = json.loads(pathlib.Path(path).read_text())
  del content["sha256"]
  change(content)
  content["sha256"] = manifest._digest(content)
  pathlib.Path(path).write_text(json.dumps(content))


@settings(max_examples=200, deadline=None)
@given(
  strategies.lists(
    strategies.tuples(
      strategies.integers(1, 4), strategies.sampled_from([0, 1, 3, 8, 50257])
    ),
    max_size=3,
  ),
  strategies.sampled_from([jnp.float32, jnp.bfloat16, jnp.bool_]),
)
def test_chunks_tile_the_shards(dims, dtype):
  shape = [split * size for split, size in dims]
  shard = [size for _, size in dims]
  array = manifest.Array.describe(shape, dtype, shard)
  itemsize = jnp.dtype(dtype).itemsize
  for (split, size), chunk in zip(dims, array.chunk_shape):
    assert chunk >= 1
    # No chunk contains parts of two shards.
    assert split == 1 or size == 0 or size % chunk == 0
  num_bytes = np.prod(array.chunk_shape, dtype=float) * itemsize
  assert array.chunk_bytes == num_bytes + 4
  assert num_bytes <= 8 * manifest.CHUNK_BYTES or 0 in shape
  if np.prod(shard, dtype=float) * itemsize <= manifest.CHUNK_BYTES:
    # A shard that is small enough is not cut.
    assert array.chunk_shape == tuple(max(1, n) for n in shard)
  if 0 in shape:
    assert list(array.chunks()) == []
  elif np.prod(array.grid) < 1000:
    covered = sum(
      int(np.prod([s.stop - s.start for s in index]))
      for _, index in array.chunks()
    )
    assert covered == np.prod(shape)


def test_a_manifest_of_another_step_or_version_is_refused(workdir):
  save(workdir, 1)
  os.rename(path_of(workdir, 1), path_of(workdir, 3))
  with pytest.raises(DamagedError, match="of step 1, in the directory of"):
    restore.restore(workdir, like())
  path = path_of(workdir, 3, "manifest.json")
  edit(path, lambda content: content.update(version=2))
  with pytest.raises(CheckpointError, match="format version 2"):
    restore.restore(workdir, like())


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
def test_impossible_arrays_are_refused(workdir, changed):
  save(workdir, 1)
  edit(
    path_of(workdir, 1, "manifest.json"),
    lambda content: content["arrays"]["params/dense/kernel"].update(changed),
  )
  with pytest.raises(DamagedError, match="'params/dense/kernel': cannot be"):
    restore.restore(workdir, like())


@pytest.mark.parametrize(
  "old, new", [("16, 24", "24, 16"), ('"at": 1', '"at": 3')]
)
def test_an_edited_manifest_is_refused(workdir, old, new):
  save(workdir, 1)
  path = pathlib.Path(path_of(workdir, 1, "manifest.json"))
  text = path.read_text()
  assert text.count(old) >= 1
  path.write_text(text.replace(old, new))
  with pytest.raises(DamagedError, match="its digest does not match"):
    restore.restore(workdir, like())
  (problem,) = integrity.verify(path_of(workdir, 1))
  assert problem.path == str(path)


def test_unsafe_names_in_a_manifest_are_refused(workdir):
  """Fault 48."""
  save(workdir, 1)

  def move_step(content):
    content["arrays"]["../../x"] = content["arrays"].pop("step")

  edit(path_of(workdir, 1, "manifest.json"), move_step)
  with pytest.raises(DamagedError, match=r"array name '\.\./\.\./x'"):
    restore.restore(workdir, like())
