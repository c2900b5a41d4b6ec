"""Checksums on the host and on the devices, and a flip before a write."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.saved_states import like, path_of, save

from bigtrain import sharding
from bigtrain.checkpoints import (
  checksums,
  device_checksums,
  integrity,
  restore,
  snapshot,
)
from bigtrain.checkpoints.manifest import DamagedError

CASES = (
  ((16, 24), "float32", ("fsdp",)),
  ((16, 24), "bfloat16", (None, ("replica", "fsdp"))),
  ((16,), "int8", ()),
  ((), "int32", ()),
  ((8, 4, 3, 8), "float16", (None, "fsdp", None, "replica")),
  ((40_000,), "float32", ("fsdp",)),
  ((7, 9), "bool", ()),
  ((4, 4), "complex64", ("fsdp",)),
  ((0, 4), "float32", ()),
  ((8,), "float8_e4m3fn", ("fsdp",)),
)


def by_definition(values):
  size = min(values.dtype.itemsize, 4)
  words = np.frombuffer(values.tobytes(), f"u{size}").tolist()
  weighted = sum(i * word for i, word in enumerate(words, 1))
  return sum(words) % 2**32, weighted % 2**32


@pytest.mark.parametrize("shape, dtype, spec", CASES)
def test_parts_on_devices_add_up_to_the_definition(shape, dtype, spec):
  dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  values = (3 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
  place = NamedSharding(sharding.make_mesh(2, 4), PartitionSpec(*spec))
  x = jax.device_put(values, place)
  sums = device_checksums.start([("x", x)])()["x"]
  compiled = device_checksums.start([("x", x)], compiled=True)()["x"]
  assert sums == compiled and len(sums) == 8
  by_place = {str(s.index): sums[s.device] for s in x.addressable_shards}
  assert checksums.add(by_place.values()) == by_definition(values)


def test_a_copy_to_host_memory_that_goes_wrong_is_found(tmp_path, monkeypatch):
  workdir = str(tmp_path / "run")
  copy_to_host = snapshot._copy_to_host

  def copy_and_flip(shards):
    first, *rest = copy_to_host(shards)
    first = np.array(first)
    first.reshape(-1).view(np.uint8)[0] ^= 1
    return [first, *rest]

  monkeypatch.setattr(snapshot, "_copy_to_host", copy_and_flip)
  save(workdir, 1)
  monkeypatch.undo()
  (problem,) = integrity.verify(path_of(workdir, 1))
  assert "not those that the devices had" in problem.what


@pytest.mark.parametrize("devices", ["cpu", "accelerator"])
def test_a_bit_that_flips_in_host_memory_before_the_write_is_found(
  tmp_path, monkeypatch, devices
):
  if devices == "accelerator":  # CPU devices have pinned memory, too.
    compiled = functools.partial(device_checksums.start, compiled=True)
    monkeypatch.setattr(device_checksums, "start", compiled)
  workdir = str(tmp_path / "run")
  take = snapshot.Snapshots.take
  save(workdir, 1)
  assert integrity.verify(path_of(workdir, 1)) == []

  def take_and_flip(self, named):
    pieces, arrays, sums = take(self, named)
    piece = next(piece for piece in pieces if np.ndim(piece.data) == 2)
    data = np.array(piece.data)
    data.view(np.uint8)[0, 0] ^= 4
    pieces[pieces.index(piece)] = piece._replace(data=data)
    return pieces, arrays, sums

  monkeypatch.setattr(snapshot.Snapshots, "take", take_and_flip)
  save(workdir, 2)
  (problem,) = integrity.verify(path_of(workdir, 2))
  assert "not those that the devices had" in problem.what and problem.array
  with pytest.raises(
    DamagedError, match=f"array '{problem.array}': its values"
  ):
    restore.restore(workdir, like())
