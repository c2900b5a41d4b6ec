"""Random views of the images of a batch: crops, flips, contrast.

They are made on the devices, from the key of each example. So they depend only
on the step, and not on the mesh or the number of microbatches.

Legend: B batch, V views, H height, W width, C channels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.arrays.types import Batch
from bigtrain.config.errors import ConfigError


def crops(
  keys_B: jax.Array,
  image: jax.Array,
  number: int,
  size: int,
  area: Sequence[float],
  *,
  aspect: Sequence[float] = (3 / 4, 4 / 3),
  flip: bool = True,
  contrast: float = 0.0,
) -> jax.Array:
  """Random crops (B, V, size, size, C) of images (B, H, W, C).

  Args:
    keys_B: key of each example.
    number: V.
    area: smallest and largest share of the image's area.
    aspect: smallest and largest ratio of width to height.
    flip: whether half of the views are mirrored.
    contrast: largest relative change of contrast, and largest shift of the
      values, of each view.
  """
  height, width, channels = image.shape[1:]

  def view(key: jax.Array, x: jax.Array) -> jax.Array:
    keys = jax.random.split(key, 6)
    share = jax.random.uniform(keys[0], minval=area[0], maxval=area[1])
    low, high = jnp.log(jnp.asarray(aspect))
    ratio = jnp.exp(jax.random.uniform(keys[1], minval=low, maxval=high))
    # Sides of the crop, in pixels.
    sides = jnp.sqrt(share * height * width * jnp.stack([1 / ratio, ratio]))
    most = jnp.asarray([height, width], jnp.float32)
    sides = jnp.minimum(sides, most)
    first = jax.random.uniform(keys[2], (2,)) * (most - sides)
    scale = size / sides
    result = jax.image.scale_and_translate(
      x, (size, size, channels), (0, 1), scale, -first * scale, "linear"
    )
    if flip:
      mirrored = jax.random.bernoulli(keys[3])
      result = jnp.where(mirrored, result[:, ::-1], result)
    if contrast:
      change = jax.random.uniform(
        keys[4], (2,), minval=-contrast, maxval=contrast
      )
      result = result * (1 + change[0]) + change[1]
    return result

  def views(key: jax.Array, x: jax.Array) -> jax.Array:
    return jax.vmap(view, in_axes=(0, None))(jax.random.split(key, number), x)

  return jax.vmap(views)(keys_B, image.astype(jnp.float32))


def folded(keys_B: jax.Array, number: int) -> jax.Array:
  """Different keys, for another use."""
  return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, number)


def two(
  batch: Batch, size: int | None, area: Sequence[float], **options: Any
) -> jax.Array:
  """Two views of each image, (B, 2, ...): a batch's "views", or new ones."""
  if "views" in batch:
    ready = batch["views"]
    if ready.shape[1] != 2:
      raise ConfigError(
        "config.input: expected 2 views of each image, got 'views' with "
        f"{ready.shape[1]}."
      )
    return ready
  image = batch["image"]
  keys_B, side = batch["_keys"], image.shape[1]
  return crops(keys_B, image, 2, size or side, area, **options)


def example(batch: Batch) -> jax.Array:
  """Images as large as those of a batch, to initialise or evaluate a model."""
  if "image" not in batch and "views" in batch:
    return batch["views"][:, 0]
  return batch["image"]
