"""Examples that are taken out of a batch on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding

B, C = 64, 24
RNG = np.random.default_rng(0)
TREE = {
  "image": RNG.normal(size=(B, 3, 2)).astype(np.float32),
  "ids": np.arange(B, dtype=np.int32),
  "mask": RNG.integers(2, size=B) > 0,
}
CHOICES = {
  "anywhere": np.sort(RNG.permutation(B)[:C]),
  "all at the start": np.arange(C),
  "all at the end": np.arange(B - C, B),
  "both ends": np.r_[0 : C // 2, B - C // 2 : B],
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
  "sizes",
  [dict(replica=2, fsdp=4), dict(fsdp=4, tensor=2), dict(fsdp=2, pipeline=4)],
)
def test_chosen_examples_are_those_of_an_index(name, sizes):
  mesh = sharding.make_mesh(**sizes)
  chosen = CHOICES[name]
  with jax.set_mesh(mesh):
    tree = jax.device_put(TREE, sharding.batch(mesh))
    taken = jax.jit(sharding.take)(tree, jnp.asarray(chosen))
    everywhere = jax.jit(sharding.take_everywhere)(
      tree["image"], jnp.asarray(chosen)
    )
  for key, x in TREE.items():
    np.testing.assert_array_equal(taken[key], x[chosen])
    assert taken[key].dtype == x.dtype
    assert taken[key].sharding.is_equivalent_to(sharding.batch(mesh), x.ndim)
  np.testing.assert_array_equal(everywhere, TREE["image"][chosen])
  assert everywhere.sharding.is_fully_replicated


def test_no_device_gathers_the_batch():
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  with jax.set_mesh(mesh):
    tree = jax.device_put(TREE, sharding.batch(mesh))
    compiled = jax.jit(sharding.take).lower(tree, jnp.arange(C)).compile()
  text = compiled.as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text
  assert f"f32[{B},3,2]" not in text
  assert f"f32[{C},3,2]" not in text
