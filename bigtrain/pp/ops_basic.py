"""Basic ops. They run on numpy arrays, on batches of them, and on tensors.

Legend: B batch, H height, W width, C channels; `...` stands for B or nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.pp import registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.registry import Op

_DTYPES = (
  "bool",
  *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
  *(f"float{bits}" for bits in (16, 32, 64)),
)

Size = int | tuple[int, int]


def pair(size: Size, name: str = "size") -> tuple[int, int]:
  """Returns a size as (height, width)."""
  height, width = (size, size) if isinstance(size, int) else size
  if height < 1 or width < 1:
    raise ConfigError(f"argument {name!r} is {size!r}, expected at least 1.")
  return height, width


# Makes an op that maps one feature by fn(feature, u), also on batches.
dual = functools.partial(registry.on_feature, batched=True)


@registry.register("value_range")
def value_range(
  vmin: float = -1,
  vmax: float = 1,
  in_min: float = 0,
  in_max: float = 255,
  clip: bool = False,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Maps [in_min, in_max] linearly to [vmin, vmax], as float32.

  Args:
    vmin, vmax: low and high end of the output.
    in_min, in_max: low and high end of the input.
    clip: whether to clip results to [vmin, vmax].
  """
  if vmin >= vmax or in_min >= in_max:
    raise ConfigError(
      f"expected vmin < vmax and in_min < in_max, got vmin={vmin}, "
      f"vmax={vmax}, in_min={in_min}, in_max={in_max}."
    )
  # Dividing by `unit` (127.5 from bytes to [-1, 1]) gives both ends exactly;
  # multiplying by its inverse would not.
  unit = np.float32((in_max - in_min) / (vmax - vmin))
  low, high = np.float32(vmin), np.float32(vmax)
  origin = np.float32(in_min)

  def fn(x, u):
    xp.require_kind(x, "biuf", "value_range", "numbers (after 'decode')")
    x = xp.cast(x, "float32")
    x = (x - origin if in_min else x) / unit
    x = x + low if vmin else x
    return xp.clip(x, low, high) if clip else x

  return dual(fn, key, key_result)


@registry.register("vgg_value_range")
def vgg_value_range(
  mean: tuple[float, ...] = (123.675, 116.28, 103.53),
  std: tuple[float, ...] = (58.395, 57.12, 57.375),
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Normalizes each channel to (image - mean) / std, as float32.

  The defaults are the RGB statistics of ImageNet.

  Args:
    mean, std: values for each channel, on the scale of the input: 0 to 255 for
      bytes.
  """
  if len(mean) != len(std) or min(std, default=0) <= 0:
    raise ConfigError(
      f"expected a positive std for each mean, got mean={mean}, std={std}."
    )
  mean_C, std_C = np.array(mean, np.float32), np.array(std, np.float32)

  def fn(x, u):
    xp.require_image(x, u, "vgg_value_range")
    if x.shape[-1] not in (len(mean_C), None):
      raise ConfigError(
        f"preprocessing op 'vgg_value_range' has {len(mean_C)} means, but "
        f"{key!r} has {x.shape[-1]} channels."
      )
    return (xp.cast(x, "float32") - mean_C) / std_C

  return dual(fn, key, key_result)


@registry.register("flip_lr")
def flip_lr(key: str = "image", key_result: str | None = None) -> Op:
  """Mirrors an image [..., H, W, C] left to right, with probability 1/2."""

  def fn(image, u):
    xp.require_image(image, u, "flip_lr")
    return xp.flip_width(image, u[..., 0] < 0.5)

  return dual(fn, key, key_result, draws=1)


def central_window(
  height: Any, width: Any, size: tuple[int, int] | None
) -> tuple[Any, Any, Any, Any]:
  """Returns (top, left, height, width) of the central window of an image.

  Without a size, that is the largest square. If a margin is odd, the window is
  half a pixel further up or left.
  """
  if size is None:
    side = xp.minimum(height, width)
    size = (side, side)
  else:
    height = _with_room(height, width, size, "central_crop")
  return (height - size[0]) // 2, (width - size[1]) // 2, *size


@registry.register("central_crop")
def central_crop(
  size: Size | None = None, key: str = "image", key_result: str | None = None
) -> Op:
  """Cuts out the central window of an image [..., H, W, C].

  Args:
    size: size of the window, one number or (height, width); None for the
      largest square.
  """
  window = None if size is None else pair(size)

  def fn(image, u):
    xp.require_image(image, u, "central_crop")
    return xp.cut(image, *central_window(*xp.image_size(image), window))

  return dual(fn, key, key_result)


def random_window(
  height: Any, width: Any, size: tuple[int, int], u: Any
) -> tuple[Any, Any, int, int]:
  """Returns (top, left, height, width) of a window at a random position."""
  height = _with_room(height, width, size, "random_crop")
  top = _integer(u[..., 0], height - size[0] + 1)
  left = _integer(u[..., 1], width - size[1] + 1)
  return top, left, *size


@registry.register("random_crop")
def random_crop(
  size: Size,
  pad: int = 0,
  pad_mode: Literal["constant", "edge", "reflect"] = "constant",
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Cuts out a window of fixed size at a random position of an image.

  Args:
    size: size of the window, one number or (height, width).
    pad: number of pixels to add on each side first.
    pad_mode: the added pixels are zeros, the nearest pixel or a mirror image.
  """
  window = pair(size)
  check_number("argument 'pad'", pad, least=0, whole=True)
  cannot_reflect = (
    f"preprocessing op random_crop cannot reflect {pad} pixels of an image of "
    "height and width"
  )

  def fn(image, u):
    xp.require_image(image, u, "random_crop")
    height, width = xp.image_size(image)
    sides = height + 2 * pad, width + 2 * pad
    top, left, h, w = random_window(sides[0], sides[1], window, u)
    if not pad:
      return xp.cut(image, top, left, h, w)
    # Gathers with indices beyond the edges instead of building the padded
    # image, most of which the crop would drop.
    rows = top[..., None] + np.arange(-pad, h - pad, dtype=np.int32)
    columns = left[..., None] + np.arange(-pad, w - pad, dtype=np.int32)
    if pad_mode == "reflect":
      fits = (height > pad) & (width > pad)
      height = xp.checked(height, fits, cannot_reflect, height, width)
      rows = height - 1 - abs(height - 1 - abs(rows))
      columns = width - 1 - abs(width - 1 - abs(columns))
      return xp.gather(image, rows, columns)
    inner_rows = xp.clip(rows, 0, height - 1)
    inner_columns = xp.clip(columns, 0, width - 1)
    crop = xp.gather(image, inner_rows, inner_columns)
    if pad_mode == "edge":
      return crop
    is_row, is_column = rows == inner_rows, columns == inner_columns
    inside = is_row[..., :, None, None] & is_column[..., None, :, None]
    return xp.library(inside).where(inside, crop, xp.cast(0, crop.dtype.name))

  return dual(fn, key, key_result, draws=2)


@registry.register("random_background")
def random_background(
  most: float = 255, key: str = "image", key_result: str | None = None
) -> Op:
  """Puts random pixels behind an image [..., H, W, C], as float32.

  Each value is the maximum of the image's value and a uniform random number
  between 0 and `most`: digits become those of "mnist-back-rand" (Larochelle et
  al. 2007, "An empirical evaluation of deep architectures on problems with many
  factors of variation").

  Args:
    most: largest value of the background.
  """
  check_number("argument 'most'", most, above=0)

  def on_host(image, u):
    # Two draws, because one has 24 bits.
    first, second = (np.asarray(u * 2.0**24, np.int64)[..., i] for i in (0, 1))
    seed = hashing.fold(hashing.fold(0, first), second)
    size = np.prod(image.shape[-3:], dtype=np.int64)
    words = hashing.fold(seed[..., None], np.arange(size)) >> np.uint64(40)
    noise = (words.astype(np.float32) * np.float32(most / 2**24)).reshape(
      image.shape
    )
    return np.maximum(image.astype(np.float32), noise)

  def fn(image, u):
    xp.require_image(image, u, "random_background")
    if xp.on_host(image):
      return on_host(image, u)
    result = tf.numpy_function(on_host, [image, u], tf.float32)
    return tf.ensure_shape(result, image.shape)

  return dual(fn, key, key_result, draws=2)


def _integer(u: Any, stop: Any) -> Any:
  """Maps uniform numbers in [0, 1) to integers in [0, stop)."""
  return xp.cast(u * xp.cast(stop, "float32"), "int32")


def _with_room(height: Any, width: Any, size: tuple[int, int], op: str) -> Any:
  """Returns the height if the window fits into the image; otherwise raises."""
  message = (
    f"preprocessing op {op} cannot cut {size[0]}x{size[1]} pixels out of an "
    "image of height and width"
  )
  has_room = (height >= size[0]) & (width >= size[1])
  return xp.checked(height, has_room, message, height, width)


@registry.register("reshape")
def reshape(
  shape: tuple[int, ...], key: str = "image", key_result: str | None = None
) -> Op:
  """Reshapes a feature, such as 64 numbers to (8, 8, 1).

  Args:
    shape: shape of one example; one dimension may be -1.
  """
  if min(shape, default=0) < -1 or shape.count(-1) > 1:
    raise ConfigError(
      f"argument 'shape' is {shape}, expected sizes; at most one may be -1."
    )

  def fn(x, u):
    lead = tuple(u.shape[:-1])
    try:
      return xp.library(x).reshape(x, lead + tuple(shape))
    except ValueError as e:
      raise ConfigError(
        f"preprocessing op 'reshape' cannot turn {key!r} of shape "
        f"{tuple(x.shape[len(lead) :])} into {tuple(shape)}."
      ) from e

  return dual(fn, key, key_result)._replace(origins={key_result or key: key})


@registry.register("cast")
def cast(dtype: str, key: str = "image", key_result: str | None = None) -> Op:
  """Casts a feature to another dtype.

  Args:
    dtype: numpy name, such as "float32" or "int32".
  """
  check_choice("argument 'dtype'", dtype, _DTYPES)

  def fn(x, u):
    xp.require_kind(x, "biuf", "cast", "numbers")
    return xp.cast(x, dtype)

  return dual(fn, key, key_result)._replace(origins={key_result or key: key})


@registry.register("keep")
def keep(*keys: str) -> Op:
  """Drops all features except these, which must exist."""

  def fn(features: registry.Features) -> registry.Features:
    return {key: features[key] for key in keys}

  return _select(keys, fn)


@registry.register("drop")
def drop(*keys: str) -> Op:
  """Drops these features, which must exist."""

  def fn(features: registry.Features) -> registry.Features:
    return {k: value for k, value in features.items() if k not in keys}

  return _select(keys, fn)


def _select(keys: tuple[str, ...], fn: Callable[[Any], Any]) -> Op:
  if not keys:
    raise ConfigError("expected the names of features, got none.")
  return Op(
    lambda features, u: fn(features), batched=True, reads=keys, origins={}
  )


@registry.register("stack")
def stack(*keys: str, key_result: str) -> Op:
  """Stacks features of equal shape on a new first axis, and drops them.

  It is used, for instance, for the views of an image in losses that compare
  them.
  """
  if not keys:
    raise ConfigError("expected the names of features, got none.")

  def fn(features: registry.Features, u: Any) -> registry.Features:
    parts = [features[key] for key in keys]
    others = {k: value for k, value in features.items() if k not in keys}
    stacked = xp.library(parts[0]).stack(parts, axis=xp.rank(u) - 1)
    return {**others, key_result: stacked}

  return Op(fn, batched=True, reads=keys, origins={key_result: None})


@registry.register("copy")
def copy(src: str, dst: str) -> Op:
  """Copies feature `src` to the name `dst`."""
  return dual(lambda x, u: x, src, dst)._replace(origins={dst: src})
