"""The pixels of single pictures, by ops, outside of an input's engine."""

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import host_tensorflow, parse, registry

_FEATURES = ("image", "shapes")


class Picture(NamedTuple):
  """What a model sees of a picture."""

  # Float32 [height, width, 3], [tiles, height, width, 3], or patches [P,
  # values].
  pixels: np.ndarray
  shape: np.ndarray | None = None  # Int32 [2], rows and columns of patches.


class Pixels:
  """Makes the pixels of pictures that are bytes of files, or arrays.

  `pp` begins with the op after `decode`, which is for bytes alone.
  """

  def __init__(self, pp: str):
    self._op = registry.compose(parse.parse(pp))
    self._decode = registry.compose(parse.parse("decode(precise=True)"))
    if self._op.draws:
      raise ConfigError(
        f"pictures: pp={pp!r}: expected ops without randomness."
      )
    self._graphs: dict[bool, Any] = {}

  def __call__(self, pictures: Sequence[Any]) -> list[Picture]:
    if len(pictures) < 2:
      return [self._one(picture) for picture in pictures]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      return list(pool.map(self._one, pictures))

  def _one(self, picture: bytes | np.ndarray) -> Picture:
    is_encoded = isinstance(picture, bytes)
    try:
      if is_encoded or self._op.tensorflow:
        features = self._graph(is_encoded)(picture)
      else:
        draws = np.zeros(0, np.float32)
        features = self._op.fn({"image": picture}, draws)
      shape = features.get("shapes")
      return Picture(
        np.asarray(features["image"], np.float32),
        None if shape is None else np.asarray(shape, np.int32),
      )
    except ConfigError:
      raise
    except Exception as e:  # tensorflow's errors have no common class.
      raise DataError(f"a picture: {host_tensorflow.one_line(e)}") from e

  def _graph(self, is_encoded: bool) -> Any:
    if is_encoded not in self._graphs:
      tf = host_tensorflow.load()

      def fn(picture: Any) -> Any:
        features = {"image": picture}
        draws = tf.zeros([1])
        if is_encoded:
          features = self._decode.fn(features, draws)
        made = self._op.fn(features, draws)
        return {name: made[name] for name in _FEATURES if name in made}

      spec = tf.TensorSpec((None, None, 3), tf.uint8)
      if is_encoded:
        spec = tf.TensorSpec((), tf.string)
      self._graphs[is_encoded] = tf.function(fn, [spec], autograph=False)
    return self._graphs[is_encoded]


def fill(
  pictures: Sequence[Picture],
  image: np.ndarray,
  shapes: np.ndarray | None = None,
) -> None:
  """Writes the pictures of an example into its features, which are zeros.

  Args:
    image: [N, height, width, 3], of pictures or tiles; [N, P, values] of
      patches.
    shapes: [N, 2], of patches.
  """
  n = 0
  for picture in pictures:
    if shapes is not None:
      image[n, : len(picture.pixels)] = picture.pixels
      shapes[n] = picture.shape
      n += 1
    elif picture.pixels.ndim == 4:
      image[n : n + len(picture.pixels)] = picture.pixels
      n += len(picture.pixels)
    else:
      image[n] = picture.pixels
      n += 1


def features(
  rows: Sequence[Sequence[Picture]], round_to: int = 1
) -> dict[str, np.ndarray]:
  """The features of several examples: "image" and, of patches, "shapes".

  Raises DataError if pictures of one size are expected and are not.

  Args:
    round_to: numbers of patches and of tiles are multiples of it, so that a
      model is compiled for fewer shapes.
  """
  pictures = [picture for row in rows for picture in row]
  is_native = any(picture.shape is not None for picture in pictures)
  counts = [_num_places(row) for row in rows]
  most = max(counts)
  if is_native:
    longest = max(len(picture.pixels) for picture in pictures)
    longest += -longest % round_to
    sizes = {(longest, picture.pixels.shape[1]) for picture in pictures}
  else:
    sizes = {picture.pixels.shape[-3:] for picture in pictures}
  if len(sizes) > 1:
    raise DataError(
      f"images: expected one size after preprocessing, got {sorted(sizes)}."
    )
  size = sizes.pop()
  result = {"image": np.zeros((len(rows), most, *size), np.float32)}
  if is_native:
    result["shapes"] = np.zeros((len(rows), most, 2), np.int32)
  for b, row in enumerate(rows):
    fill(row, **{name: x[b] for name, x in result.items()})
  return result


def _num_places(pictures: Sequence[Picture]) -> int:
  """Number of pictures, where each tile counts as one."""
  return sum(len(x.pixels) if x.pixels.ndim == 4 else 1 for x in pictures)
