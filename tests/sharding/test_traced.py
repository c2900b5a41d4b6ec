"""Layouts that models ask for while they are traced."""

import jax
import jax.numpy as jnp
import pytest

from bigtrain import sharding


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
