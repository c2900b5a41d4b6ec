"""Initialisation of a stack: each kind of block is traced once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from bigtrain.models.layers import stack


@pytest.mark.parametrize("scan", [False, True])
def test_initialisation_does_not_run_the_layers(scan):
  traced = []

  class Block(nn.Module):
    bias: bool

    @nn.compact
    def __call__(self, x_BD, number, train):
      traced.append(self.bias)
      return nn.Dense(x_BD.shape[-1], use_bias=self.bias)(x_BD), None

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x_BD):
      kinds, depth = [True, False], 6
      options = dict(scan=scan, remat_policy="none")
      y_BD, _ = stack.run(self, Block, kinds, depth, x_BD, False, **options)
      return nn.Dense(3)(y_BD)

  x_BD = jnp.ones((2, 4))
  params = jax.eval_shape(Model().init, jax.random.key(0), x_BD)["params"]
  assert traced == [True, False]
  shape = (3, 4, 4) if scan else (4, 4)
  first = params["blocks"]["0"] if scan else params["blocks_0"]
  assert first["Dense_0"]["kernel"].shape == shape
