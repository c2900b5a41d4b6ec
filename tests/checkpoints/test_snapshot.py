import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.saved_states import MESHES, like, path_of, same, save

from bigtrain import sharding
from bigtrain.checkpoints import (
  checkpointer,
  device_checksums,
  folders,
  manifest,
  restore,
  snapshot,
)


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def test_small_shards_share_a_file_and_large_ones_are_cut(workdir, monkeypatch):
  monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)
  monkeypatch.setattr(snapshot, "_SMALL_SHARD_BYTES", 1024)
  monkeypatch.setattr(snapshot, "_SHARED_FILE_BYTES", 2048)
  mesh = sharding.make_mesh(2, 4)

  def put(shape, *spec):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  state = {
    "rows": put((16, 8), "fsdp"),  # 512 bytes in total.
    "columns": put((4, 64), None, "fsdp"),  # 1 kB.
    "pairs": put((8, 112), ("replica", "fsdp")),  # 448 bytes per shard.
    "both": put((4, 8), "replica", "fsdp"),
    "large": put((64, 128), "fsdp"),  # 8 kB per shard.
    "uneven": put((7, 500)),  # 14 kB, replicated.
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
    restored, _ = restore.restore(workdir, spec)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_all_devices_with_a_replica_share_the_work():
  mesh = sharding.make_mesh(8, 1)
  everywhere = NamedSharding(mesh, PartitionSpec())
  state = [(f"{i}", jax.device_put(np.ones(64), everywhere)) for i in range(16)]
  snapshots = snapshot.Snapshots()
  pieces, _, _ = snapshots.take(state)
  assert len(pieces) == 16  # Each array once.
  # Two from each device.
  shard_numbers = [n for _, n in snapshots._plan.sources]
  assert sorted(shard_numbers) == sorted(2 * [*range(8)])


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_of_accelerators_are_restored(workdir, monkeypatch, pinned):
  # CPU devices have pinned memory too, so only who sums is changed.
  compiled = functools.partial(device_checksums.start, compiled=True)
  monkeypatch.setattr(device_checksums, "start", compiled)
  if not pinned:
    kind = jax.devices()[0].addressable_memories()[0]
    monkeypatch.setattr(kind.__class__, "kind", "device", raising=True)
  save(workdir, 3)
  monkeypatch.undo()
  same(restore.restore(workdir, like(1, 8))[0], 3)
