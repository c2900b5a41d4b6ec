"""Mixup: a model is applied to blends of two examples of a batch."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.losses import forward
from bigtrain.settings import ConfigError
from bigtrain.types import Variables


def apply(
  model: Any,
  variables: Variables,
  inputs: Mapping[str, Any],
  rng: jax.Array | None,
  alpha: float,
  train: bool,
) -> tuple[Any, Any, jax.Array | None, Variables]:
  """Applies a model to images that are blended in training, unless alpha is 0.

  Returns:
    (output, images that it saw, share of each image in its blend or None
    without mixup, new mutable collections).
  """
  image: Any = inputs.get("image")
  if not train:
    out, mutable = forward.apply(model, variables, None, False, **inputs)
    return out, image, None, mutable
  assert rng is not None
  mixup_rng, dropout_rng = jax.random.split(rng)
  share = None
  if alpha and (image is None or "shapes" in inputs):
    raise ConfigError(
      f"config.loss.mixup_alpha={alpha}: texts, and images of several shapes, "
      "cannot be blended."
    )
  if alpha:
    image, share = mixup(mixup_rng, image, alpha)
    inputs = {**inputs, "image": image}
  out, mutable = forward.apply(model, variables, dropout_rng, True, **inputs)
  return out, image, share, mutable


def mixup(
  rng: jax.Array, image: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array]:
  """Blends neighbours by one weight, at least 0.5 (arXiv 1710.09412)."""
  # Beta(alpha, alpha), as shares of two draws from Gamma(alpha).
  # jax.random.beta draws the same, in a program of 1,300 instructions more.
  draw = lambda key: jax.random.loggamma(key, alpha)
  both = jax.nn.softmax(jax.vmap(draw)(jax.random.split(rng)))
  weight = jnp.max(both)
  mixed = weight * image + (1 - weight) * jnp.roll(image, 1, axis=0)
  return mixed.astype(image.dtype), weight
