import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from jax.sharding import NamedSharding, PartitionSpec
from saved_states import MESHES, like, path_of, same, save

from bigtrain import sharding
from bigtrain.checkpoints import checkpointer, folders, manifest, snapshot


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


# How arrays lie in files.


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
  array = manifest.describe(shape, dtype, shard)
  itemsize = jnp.dtype(dtype).itemsize
  for (split, size), chunk in zip(dims, array.chunk_shape):
    assert chunk >= 1
    # No chunk has parts of two shards.
    assert split == 1 or size == 0 or size % chunk == 0
  num_bytes = np.prod(array.chunk_shape, dtype=float) * itemsize
  assert array.chunk_bytes == num_bytes + 4
  assert num_bytes <= 8 * manifest.CHUNK_BYTES or 0 in shape
  if np.prod(shard, dtype=float) * itemsize <= manifest.CHUNK_BYTES:
    # Nothing is cut that need not be.
    assert array.chunk_shape == tuple(max(1, n) for n in shard)
  if 0 in shape:
    assert list(array.chunks()) == []
  elif np.prod(array.grid) < 1000:
    covered = sum(
      int(np.prod([s.stop - s.start for s in index]))
      for _, index in array.chunks()
    )
    assert covered == np.prod(shape)


def test_small_shards_share_a_file_and_large_ones_are_cut(workdir, monkeypatch):
  monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)
  monkeypatch.setattr(snapshot, "_SMALL_SHARD_BYTES", 1024)
  monkeypatch.setattr(snapshot, "_SHARED_FILE_BYTES", 2048)
  mesh = sharding.make_mesh(2, 4)

  def put(shape, *spec):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  state = {
    "rows": put((16, 8), "fsdp"),  # 512 bytes in all.
    "columns": put((4, 64), None, "fsdp"),  # 1 kB.
    "pairs": put((8, 112), ("replica", "fsdp")),  # 448 bytes a shard.
    "both": put((4, 8), "replica", "fsdp"),
    "large": put((64, 128), "fsdp"),  # 8 kB a shard.
    "uneven": put((7, 500)),  # 14 kB, not split.
  }
  saver = checkpointer.Checkpointer(workdir)
  saver.save(1, state)
  saver.close()
  arrays = folders.read_manifest(path_of(workdir, 1)).arrays
  chunks = {name: arrays[name].grid for name in arrays}
  assert chunks == {
    "rows": (1, 1),
    "columns": (1, 1),
    "pairs": (2, 1),
    "both": (2, 4),
    "large": (8, 1),
    "uneven": (4, 1),
  }
  for other in MESHES:
    mesh = sharding.make_mesh(*other)
    spec = {}
    for name, x in state.items():
      axes = PartitionSpec("fsdp" if x.shape[0] % 8 == 0 else None)
      place = NamedSharding(mesh, axes)
      spec[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    found, _ = checkpointer.restore(workdir, spec)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_the_copy_is_spread_over_the_devices_that_hold_the_state():
  mesh = sharding.make_mesh(8, 1)
  everywhere = NamedSharding(mesh, PartitionSpec())
  state = [(f"{i}", jax.device_put(np.ones(64), everywhere)) for i in range(16)]
  taken = snapshot.Snapshots()
  pieces, _ = taken.take(state)
  assert len(pieces) == 16  # Each array once.
  # Of each device two.
  assert sorted(n for _, n in taken._plan.sources) == sorted(2 * [*range(8)])
  taken.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_the_ways_of_accelerators(workdir, monkeypatch, pinned):
  # A CPU device has pinned memory too, so only its name is changed here.
  monkeypatch.setattr(snapshot, "_platform", lambda shard: "accelerator")
  if not pinned:
    kind = jax.devices()[0].addressable_memories()[0]
    monkeypatch.setattr(kind.__class__, "kind", "device", raising=True)
  save(workdir, 3)
  monkeypatch.undo()
  same(checkpointer.restore(workdir, like(1, 8))[0], 3)
