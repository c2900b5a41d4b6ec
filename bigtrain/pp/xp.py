"""Functions that work on both numpy arrays and tensors.

A value that is not a numpy or Python value is a tensor, and only then is
tensorflow imported.

Legend: B batch, H height, W width, C channels; `...` stands for B or nothing.
"""

from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp.host_tensorflow import tf

_HOST_TYPES = (np.ndarray, np.generic, bytes, str, bool, int, float)


def on_host(x: Any) -> bool:
  return isinstance(x, _HOST_TYPES)


def rank(x: Any) -> int:
  return np.ndim(x) if on_host(x) else len(x.shape)


def cast(x: Any, dtype: str) -> Any:
  """Casts `x` to a dtype given by its numpy name; truncates floats."""
  if on_host(x):
    return np.asarray(x).astype(dtype, copy=False)
  return tf.cast(x, dtype)


def clip(x: Any, low: Any, high: Any) -> Any:
  return (np.clip if on_host(x) else tf.clip_by_value)(x, low, high)


def minimum(x: Any, y: Any) -> Any:
  return min(x, y) if on_host(x) and on_host(y) else tf.minimum(x, y)


def reduce_all(x: Any) -> Any:
  return np.all(x) if on_host(x) else tf.reduce_all(x)


def reduce_any(x: Any, axis: int) -> Any:
  return (np.any if on_host(x) else tf.reduce_any)(x, axis=axis)


def library(x: Any) -> Any:
  return np if on_host(x) else tf


def image_size(image: Any) -> tuple[Any, Any]:
  """Returns (height, width) of an image [..., H, W, C], tensors if unknown."""
  height, width = image.shape[-3], image.shape[-2]
  if height is None or width is None:
    shape = tf.shape(image)
    # Counted from the left, because a tensor is never a batch here.
    height = shape[0] if height is None else height
    width = shape[1] if width is None else width
  return height, width


def checked(value: Any, condition: Any, message: str, *shown: Any) -> Any:
  """Returns `value` if the condition holds; else an error with `shown` values.

  The message must have no quotes, because tensorflow escapes them.
  """
  if on_host(condition):
    if not condition:
      raise DataError(f"{message}: {', '.join(map(str, shown))}.")
    return value
  check = tf.debugging.Assert(condition, [f"{message}:", *shown])
  with tf.control_dependencies([check]):
    return tf.identity(value)


def require_kind(x: Any, kinds: str, op: str, expected: str) -> None:
  """Checks that numpy's `dtype.kind` of `x` is one of the letters `kinds`."""
  if on_host(x):
    kind = np.asarray(x).dtype.kind
  else:  # numpy has no bfloat16, and would call its kind void.
    as_numpy = np.dtype(x.dtype.as_numpy_dtype)
    kind = "f" if x.dtype.is_floating else as_numpy.kind
  if kind not in kinds:
    raise ConfigError(
      f"preprocessing op {op!r} expects {expected}, got {_describe(x)}."
    )


def _describe(x: Any) -> str:
  if isinstance(x, bytes | str):
    return f"{type(x).__name__} of length {len(x)}"
  dtype = x.dtype.name if hasattr(x, "dtype") else type(x).__name__
  return f"{dtype} {tuple(x.shape) if rank(x) else 'scalar'}"


def require_image(image: Any, u: Any, op: str) -> None:
  """Checks that `image` is [H, W, C], or [B, H, W, C] if `u` is [B, draws]."""
  require_kind(image, "biuf", op, "an image of numbers (after 'decode')")
  lead = rank(u) - 1
  known = on_host(image) or image.shape.rank is not None
  if known and rank(image) == 3 + lead:
    return
  shape = tuple(image.shape[lead:]) if known else "unknown"
  raise ConfigError(
    f"preprocessing op {op!r} expects an image [height, width, channels], got "
    f"shape {shape}; reshape((h, w, c)) adds an axis."
  )


def flip_width(image: Any, flip: Any) -> Any:
  """Mirrors an image [..., H, W, C] left to right if `flip` [...] is true."""
  if on_host(image):
    if np.ndim(flip):
      return np.where(flip[:, None, None, None], image[:, :, ::-1], image)
    return image[:, ::-1] if flip else image
  return tf.cond(flip, lambda: tf.reverse(image, [1]), lambda: image)


def cut(image: Any, top: Any, left: Any, height: Any, width: Any) -> Any:
  """Cuts a window out of an image [..., H, W, C]; top and left are [...]."""
  if not on_host(image):
    window = tf.slice(image, [top, left, 0], [height, width, -1])
    static = [s if isinstance(s, int) else None for s in (height, width)]
    window.set_shape([*static, image.shape[-1]])
    return window
  if np.ndim(top):
    return gather(
      image,
      top[:, None] + np.arange(height, dtype=np.int32),
      left[:, None] + np.arange(width, dtype=np.int32),
    )
  return image[..., top : top + height, left : left + width, :]


def gather(image: Any, rows: Any, columns: Any) -> Any:
  """Gathers image[row, column] for rows [..., h] and columns [..., w]."""
  if not on_host(image):
    return tf.gather(tf.gather(image, rows, axis=0), columns, axis=1)
  if rows.ndim == 2:
    b = np.arange(len(image))[:, None, None]
    return image[b, rows[:, :, None], columns[:, None, :]]
  return image[rows[:, None], columns]
