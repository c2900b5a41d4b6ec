"""Mixup and CutMix: applies a model to blends of two examples of a batch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays.types import Variables
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.losses import forward


class Mix(NamedTuple):
  """A blend of each image with its neighbour in the batch.

  Mixup (arXiv 1710.09412) blends all pixels. CutMix (arXiv 1905.04899) puts a
  box of the neighbour into the image. The box has the area 1 - share before it
  is clipped.
  """

  share: jax.Array  # Of the image itself; in mixup at least 0.5.
  # Center of the box, in fractions of the image; None without CutMix.
  center_2: jax.Array | None = None
  is_cut: jax.Array | bool = False  # Whether this is CutMix.

  def weights(self, image: jax.Array) -> jax.Array:
    """An image's share of its blended pixels: (H, W, 1), or () for mixup."""
    if self.center_2 is None:
      return self.share
    half = jnp.sqrt(1 - self.share) / 2
    y_H, x_W = (
      jnp.abs((jnp.arange(n) + 0.5) / n - center) < half
      for n, center in zip(image.shape[1:3], self.center_2)
    )
    outside_HW = 1.0 - (y_H[:, None] & x_W)
    return jnp.where(self.is_cut, outside_HW, self.share)[..., None]

  def images(self, image: jax.Array) -> jax.Array:
    """Blends images (B, H, W, C), in the same way at any resolution."""
    weight = self.weights(image)
    mixed = weight * image + (1 - weight) * jnp.roll(image, 1, axis=0)
    return mixed.astype(image.dtype)

  def losses(
    self, image: jax.Array, labels: jax.Array, loss: Callable[..., jax.Array]
  ) -> jax.Array:
    """The loss of blended labels, for a loss that is linear in the labels."""
    share = jnp.mean(self.weights(image))
    neighbours = jnp.roll(labels, 1, axis=0)
    return share * loss(labels) + (1 - share) * loss(neighbours)


def apply(
  model: Any,
  variables: Variables,
  inputs: Mapping[str, Any],
  rng: jax.Array | None,
  options: tuple[float, float, float],
  train: bool,
) -> tuple[Any, Any, Mix | None, Variables]:
  """Applies a model to images, which are blended in training.

  Args:
    options: mixup_alpha, cutmix_alpha and cutmix_prob; alphas of 0 turn it off.

  Returns:
    (output, the images that the model saw, their blend or None, new mutable
    collections).
  """
  mixup_alpha, cutmix_alpha, cutmix_prob = options
  check_number("config.loss.mixup_alpha", mixup_alpha, least=0)
  check_number("config.loss.cutmix_alpha", cutmix_alpha, least=0)
  check_number("config.loss.cutmix_prob", cutmix_prob, least=0, most=1)
  image: Any = inputs.get("image")
  if not train:
    out, mutable = forward.apply(model, variables, None, False, **inputs)
    return out, image, None, mutable
  assert rng is not None
  mixup_rng, dropout_rng = jax.random.split(rng)
  mix = None
  if mixup_alpha or cutmix_alpha:
    if image is None or "shapes" in inputs:
      raise ConfigError(
        f"config.loss.mixup_alpha={mixup_alpha}, cutmix_alpha={cutmix_alpha}: "
        "texts, and images of several shapes, cannot be blended."
      )
    mix = draw(mixup_rng, mixup_alpha, cutmix_alpha, cutmix_prob)
    image = mix.images(image)
    inputs = {**inputs, "image": image}
  out, mutable = forward.apply(model, variables, dropout_rng, True, **inputs)
  return out, image, mix, mutable


def draw(
  rng: jax.Array, alpha: float, cutmix_alpha: float, cutmix_prob: float
) -> Mix:
  """Draws the blend of a batch."""
  gammas = jax.vmap(jax.random.loggamma, (0, None))

  def beta(key: jax.Array, a: float) -> jax.Array:
    """Beta(a, a), as the shares of two draws from Gamma(a).

    jax.random.beta draws from the same distribution, with 1,300 more
    instructions.
    """
    return jax.nn.softmax(gammas(jax.random.split(key), a))

  if not cutmix_alpha:
    return Mix(jnp.max(beta(rng, alpha)))
  keys = jax.random.split(rng, 4)
  share = beta(keys[0], cutmix_alpha)[0]
  center_2 = jax.random.uniform(keys[1], (2,))
  if not alpha:
    return Mix(share, center_2, True)
  is_cut = jax.random.bernoulli(keys[2], cutmix_prob)
  mixed = jnp.max(beta(keys[3], alpha))
  return Mix(jnp.where(is_cut, share, mixed), center_2, is_cut)
