"""Flows from noise to images: paths, velocities, and their integration.

A path is a straight line, z = t x + (1 - t) e, from noise e at time t = 0 to an
image x at t = 1 (rectified flow, arXiv 2209.03003; flow matching, 2210.02747).
Its velocity is dz/dt = x - e = (x - z) / (1 - t).

Legend: B batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# (z, t) -> velocity; t is a scalar.
Velocity = Callable[[jax.Array, jax.Array], jax.Array]

TIMES = ("logit_normal", "uniform")
SAMPLERS = ("euler", "heun")


def times(keys_B: jax.Array, kind: str, mean: float, std: float) -> jax.Array:
  """Draws a time for each example: uniform, or sigmoid(normal)."""
  if kind == "uniform":
    return jax.vmap(jax.random.uniform)(keys_B)
  return jax.nn.sigmoid(mean + std * jax.vmap(jax.random.normal)(keys_B))


def noise(keys_B: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Standard normal noise (B, *shape), from the key of each example."""
  return jax.vmap(lambda key: jax.random.normal(key, shape))(keys_B)


def between(noise: jax.Array, image: jax.Array, time_B: jax.Array) -> jax.Array:
  """The point of the path at a time."""
  t = time_B.reshape(-1, *[1] * (image.ndim - 1))
  return t * image + (1 - t) * noise


def velocity_to(
  image: jax.Array, z: jax.Array, time_B: jax.Array, least_noise: float
) -> jax.Array:
  """The velocity that leads from z at a time to an image.

  Near t = 1 the division would magnify every error, so 1 - t is replaced by
  `least_noise` if it is smaller.
  """
  t = time_B.reshape(-1, *[1] * (image.ndim - 1))
  return (image - z) / jnp.maximum(1 - t, least_noise)


def guided(
  with_class: Velocity,
  without_class: Velocity,
  scale: float,
  interval: tuple[float, float],
) -> Velocity:
  """Classifier-free guidance (arXiv 2207.12598) within an interval of times.

  Within it the velocity is v0 + scale * (v1 - v0), where v1 is the velocity
  with the class and v0 without; elsewhere it is v1 (arXiv 2404.07724). The
  interval is open, except that it contains 0 if it begins there.
  """
  if scale == 1:
    return with_class
  low, high = interval

  def velocity(z: jax.Array, t: jax.Array) -> jax.Array:
    v1 = with_class(z, t)

    def push() -> jax.Array:
      v0 = without_class(z, t)
      return v0 + scale * (v1 - v0)

    inside = (t < high) & ((t > low) | (low == 0))
    return jax.lax.cond(inside, push, lambda: v1)

  return velocity


def integrate(
  velocity: Velocity, z: jax.Array, steps: int, sampler: str
) -> jax.Array:
  """Follows a velocity from t = 0 to 1, in steps of equal length.

  "euler" computes it once per step. "heun" averages the velocities at both ends
  of a step, except in the last step, at whose end there is no noise.
  """
  ends = jnp.linspace(0.0, 1.0, steps + 1)

  def step(z: jax.Array, ends_2: jax.Array, heun: bool) -> jax.Array:
    t, next_t = ends_2
    v = velocity(z, t)
    if heun:
      v = (v + velocity(z + (next_t - t) * v, next_t)) / 2
    return z + (next_t - t) * v

  pairs = jnp.stack([ends[:-1], ends[1:]], axis=1)
  heun = sampler == "heun"
  z, _ = jax.lax.scan(
    lambda z, ends_2: (step(z, ends_2, heun), None), z, pairs[:-1]
  )
  return step(z, pairs[-1], heun=False)
