"""Random variables of a model, drawn without the model's own init.

To compile an init takes longer than to compile the model: XLA makes a kernel
for each array of random numbers. Here numpy draws them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import trees


def of(model, *args, std=0.3, seed=0, **kwargs):
  """Variables for model.apply(variables, *args, **kwargs), on the host.

  Floating-point numbers are normal with the deviation `std` around 1 for
  scales, and 0 for others: the initial scales and biases of a model would hide
  errors. Counters are zero.
  """
  init = functools.partial(model.init, **kwargs)
  shapes = jax.eval_shape(init, jax.random.key(0), *args)
  rng = np.random.default_rng(seed)

  def draw(name, x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return np.zeros(x.shape, x.dtype)
    mean = 1.0 if name.endswith("scale") else 0.0
    return (mean + std * rng.normal(size=x.shape)).astype(x.dtype)

  return trees.map_with_names(draw, shapes)
