"""Convolutions of patches, against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.models.layers import patches


@pytest.mark.parametrize(("shape", "side"), [((9, 10, 3), 4), ((6, 4, 5), 2)])
def test_a_product_of_patches_is_the_convolution(shape, side):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (2, *shape))  # Whose last pixels may not fit.
  layer = patches.conv(7, side, bias_init=jax.nn.initializers.normal())
  params = layer.init(keys[1], x)["params"]
  grid = (shape[0] // side, shape[1] // side)
  dy = jax.random.normal(keys[2], (2, *grid, 7))

  def convolution(params, x):
    y = jax.lax.conv_general_dilated(
      x,
      params["kernel"],
      (side, side),
      "VALID",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + params["bias"]

  product = lambda params, x: layer.apply({"params": params}, x)
  outputs = []
  for fn in (product, convolution):
    y, back = jax.vjp(fn, params, x)
    outputs.append((y, back(dy)))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
  jax.tree.map(close, *outputs)
  assert "conv" not in str(jax.make_jaxpr(product)(params, jnp.asarray(x)))
