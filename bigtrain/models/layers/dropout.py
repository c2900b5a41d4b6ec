"""Dropout whose rate may be an argument of the program, see step/hparams.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import trees


class Dropout(nn.Module):
  """Zeroes values and scales the others by 1 / (1 - rate).

  As flax's nn.Dropout, which takes no array as a rate, with the same bits.

  Attributes:
    rate: probability of a zero, below 1. A constant 0 draws nothing.
  """

  rate: jax.Array | float

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    """Returns `x`, with zeros in training; draws from the rng "dropout"."""
    if not train or not trees.is_on(self.rate):
      return x
    mask = keep(self.make_rng("dropout"), self.rate, x.shape)
    return jnp.where(mask, scaled(x, self.rate), 0)


def keep(
  key: jax.Array, rate: jax.Array | float, shape: tuple[int, ...]
) -> jax.Array:
  """Draws a bool mask, False with probability `rate`."""
  return jax.random.bernoulli(key, _kept_share(rate), shape)


def scaled(x: jax.Array, rate: jax.Array | float) -> jax.Array:
  """Returns x / (1 - rate), computed in the dtype of `x`."""
  return x / _kept_share(rate).astype(x.dtype)


def _kept_share(rate: jax.Array | float) -> jax.Array:
  """1 - rate in float32, the same for a constant and for an argument."""
  return 1.0 - jnp.asarray(rate, jnp.float32)
