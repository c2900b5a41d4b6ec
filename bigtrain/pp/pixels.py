"""Applies ops to single pictures, outside of an input's engine."""

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import picture_features
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import host_tensorflow, parse, registry


class Picture(NamedTuple):
  """A picture as a model's input."""

  # Float32 [height, width, 3], [tiles, height, width, 3], or patches [P,
  # values].
  pixels: np.ndarray
  # Int32 [2], rows and columns of patches; or [4], see picture_layouts.Views.
  shape: np.ndarray | None = None

  @property
  def num_places(self) -> int:
    """Number of pictures, where each tile counts as one."""
    return len(self.pixels) if self.pixels.ndim == 4 else 1


class Pixels:
  """Makes the pixels of pictures that are bytes of files, or arrays.

  `pp` begins with the op after `decode`, which applies only to bytes. If a row
  has several pictures, `pp_several` is used instead, if it is set.
  """

  def __init__(self, pp: str, pp_several: str = ""):
    self._several = Pixels(pp_several) if pp_several else self
    self._op = registry.compose(parse.parse(pp))
    # As transformers' processors, which put transparent pictures on white.
    decode = "decode(precise=True, background=255)"
    self._decode = registry.compose(parse.parse(decode))
    if self._op.draws:
      raise ConfigError(
        f"pictures: pp={pp!r}: expected ops without randomness."
      )
    self._graphs: dict[bool, Any] = {}

  def __call__(self, pictures: Sequence[Any]) -> list[Picture]:
    if len(pictures) < 2:
      return [self._one(picture) for picture in pictures]
    one = self._several._one
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      return list(pool.map(one, pictures))

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
        return picture_features.of(made)

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
    shapes: [N, 2], of patches; [N, 4], of views.
  """
  n = 0
  for picture in pictures:
    if shapes is not None:
      shapes[n] = picture.shape
    if picture.pixels.ndim == 4:
      image[n : n + len(picture.pixels)] = picture.pixels
    elif picture.pixels.ndim == 2:
      image[n, : len(picture.pixels)] = picture.pixels
    else:
      image[n] = picture.pixels
    n += picture.num_places


def features(
  rows: Sequence[Sequence[Picture]], round_to: int = 1
) -> dict[str, np.ndarray]:
  """The features of several examples: "image" and, if they have any, "shapes".

  Raises DataError if pictures of one size are expected and are not.

  Args:
    round_to: the numbers of patches and tiles are rounded up to multiples of
      it, so that a model is compiled for fewer shapes.
  """
  pictures = [picture for row in rows for picture in row]
  most = max(sum(picture.num_places for picture in row) for row in rows)
  if pictures[0].pixels.ndim == 2:
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
  shape = pictures[0].shape
  if shape is not None:
    result["shapes"] = np.zeros((len(rows), most, len(shape)), np.int32)
  for b, row in enumerate(rows):
    fill(row, **{name: x[b] for name, x in result.items()})
  return result
