"""The root-mean-square norm, https://arxiv.org/abs/1910.07467."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class RMSNorm(nn.Module):
  """Norm over the last dimensions, with a parameter "scale" of their shape."""

  # Shape of the scale. Heads that a mesh repeats (see sharding.columns) share
  # their part of it.
  shape: tuple[int, ...]
  epsilon: float
  offset: float = 0.0  # Added to the scale, as Gemma does.
  scaled: bool = True  # Whether there is a scale.
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x_float32 = x.astype(jnp.float32)
    dims = range(-len(self.shape), 0)
    mean = jnp.mean(jnp.square(x_float32), axis=tuple(dims), keepdims=True)
    factor = jax.lax.rsqrt(mean + self.epsilon)
    if self.scaled:
      init = nn.initializers.constant(1.0 - self.offset)
      scale = repeated(self.param("scale", init, self.shape), x.shape)
      factor = factor * (self.offset + scale)
    return (x_float32 * factor).astype(self.dtype)


def repeated(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The scale of an input of this shape, whose heads a mesh may repeat."""
  for dim in range(-scale.ndim, 0):
    repeats = shape[dim] // scale.shape[dim]
    if repeats > 1:
      scale = jnp.repeat(scale, repeats, axis=dim)
  return scale
