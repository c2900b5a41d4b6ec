"""Batches on the mesh, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config.errors import ConfigError


def test_the_batch_is_split_over_both_axes():
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  x = jax.device_put(np.arange(16.0).reshape(16, 1), sharding.batch(mesh))
  rows = [int(s.data[0, 0]) for s in x.addressable_shards]
  assert sorted(rows) == [0, 2, 4, 6, 8, 10, 12, 14]
  assert sharding.replicated(mesh).shard_shape((16, 3)) == (16, 3)


def test_check_batch_names_the_nearest_sizes_that_divide():
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  sharding.check_batch(8, mesh, "config.input.batch_size")
  with pytest.raises(
    ConfigError,
    match=r"config\.input\.batch_size=20 does not divide among 8 devices "
    r"\(replica=2 x fsdp=4\); the nearest sizes that do: 16 and 24\.",
  ):
    sharding.check_batch(20, mesh, "config.input.batch_size")
  with pytest.raises(ConfigError, match=r"the nearest sizes that do: 8\."):
    sharding.check_batch(3, mesh, "config.input.batch_size")
  for wrong in (0, -8, 8.0, "8", None):
    with pytest.raises(ConfigError, match="expected a whole number at least 1"):
      sharding.check_batch(wrong, mesh, "config.input.batch_size")


def test_a_tensor_group_holds_the_same_rows():
  mesh = sharding.make_mesh(replica=2, fsdp=2, tensor=2)
  x = jax.device_put(np.arange(8.0), sharding.batch(mesh))
  rows = [int(s.data[0]) for s in x.addressable_shards]
  assert sorted(rows) == [0, 0, 2, 2, 4, 4, 6, 6]
  sharding.check_batch(4, mesh, "config.input.batch_size")
  with pytest.raises(
    ConfigError,
    match=r"=6 does not divide among 4 groups of devices "
    r"\(replica=2 x fsdp=2 x tensor=2\); the nearest sizes that do: 4 and 8\.",
  ):
    sharding.check_batch(6, mesh, "config.input.batch_size")


# While a program is traced.


@pytest.mark.parametrize(
  ("shape", "ways"), [((2, 8), 4), ((2, 7), 4), ((2, 1), 1), ((1, 8), 1)]
)
def test_a_stream_is_split_over_the_length(shape, ways):
  mesh = sharding.make_mesh(replica=2, fsdp=1, sequence=4)
  with jax.set_mesh(mesh):
    assert sharding.length_ways(*shape) == ways
    text = jax.jit(sharding.stream).lower(jnp.zeros((*shape, 3))).as_text()
  assert ('{"replica", "fsdp"}' in text) == (shape[0] == 2)
  assert ('{"sequence"}' in text) == (ways > 1)


def test_an_axis_of_one_device_changes_no_program():
  x = jnp.zeros((4, 8, 3))
  with jax.set_mesh(sharding.make_mesh(replica=2, fsdp=-1)):
    texts = [
      jax.jit(lambda x, fn=fn: fn(x)).lower(x).as_text()
      for fn in (sharding.stream, sharding.over_batch)
    ]
  assert texts[0] == texts[1]
