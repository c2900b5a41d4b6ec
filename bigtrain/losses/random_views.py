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
from bigtrain.config.errors import ConfigError, check_number


def crops(
  keys_B: jax.Array,
  image: jax.Array,
  number: int,
  size: int,
  area: Sequence[float],
  *,
  aspect: Sequence[float] = (3 / 4, 4 / 3),
  flip: bool | None = None,
  contrast: float | None = None,
) -> jax.Array:
  """Random crops (B, V, size, size, C) of images (B, H, W, C).

  Args:
    keys_B: key of each example.
    number: V.
    area: smallest and largest share of the image's area.
    aspect: smallest and largest ratio of width to height.
    flip: whether half of the views are mirrored; by default they are.
    contrast: largest relative change of contrast, and largest shift of the
      values, of each view; 0.4 by default.
  """
  height, width, channels = image.shape[1:]
  flip = True if flip is None else flip
  contrast = 0.4 if contrast is None else contrast
  check_number("config.loss.contrast", contrast, least=0, below=1)

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


def shares(
  name: str,
  given: Sequence[float] | None,
  default: Sequence[float] = (),
  *,
  may_be_none: bool = False,
) -> Sequence[float]:
  """Smallest and largest share of an image, an option of the loss.

  Args:
    may_be_none: whether the smallest share may be 0.
  """
  if given is None:
    return default
  numbers = isinstance(given, list | tuple) and len(given) == 2
  if (
    not numbers
    or not 0 <= given[0] <= given[1] <= 1
    or (given[0] == 0 and not may_be_none)
  ):
    above = "from" if may_be_none else "above"
    raise ConfigError(
      f"config.loss.{name}: expected two ascending shares {above} 0 to 1, got "
      f"{given!r}."
    )
  return given


def check_unused(feature: str, **options: Any) -> None:
  """Raises ConfigError for options of views, if the input makes the views."""
  for name, value in options.items():
    if value is not None:
      raise ConfigError(
        f"config.loss.{name}={value!r}: has no effect, because config.input.pp "
        f"makes the feature {feature!r}; expected None, and other ops there."
      )


def two(
  batch: Batch, size: int | None, area: Sequence[float] | None, **options: Any
) -> jax.Array:
  """Two views of each image, (B, 2, ...): a batch's "views", or new ones."""
  if "views" in batch:
    check_unused("views", view_size=size, view_area=area, **options)
    ready = batch["views"]
    if ready.shape[1] != 2:
      raise ConfigError(
        "config.input: expected 2 views of each image, got 'views' with "
        f"{ready.shape[1]}."
      )
    return ready
  image = batch["image"]
  keys_B, side = batch["_keys"], image.shape[1]
  area = shares("view_area", area, (0.08, 1.0))
  return crops(keys_B, image, 2, size or side, area, **options)


def example(batch: Batch) -> jax.Array:
  """Images as large as those of a batch, to initialise or evaluate a model."""
  if "image" not in batch and "views" in batch:
    return batch["views"][:, 0]
  return batch["image"]
