"""Turns new pictures and texts into features, with the ops of the run.

Legend: B batch, H height, W width, C channels, L length.
"""

import concurrent.futures
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.files import paths
from bigtrain.inference.ops import Chain
from bigtrain.pp import host_tensorflow, ops_image, picture_files, registry


class Pictures:
  """Turns files, bytes and arrays into a batch of images.

  `data` is the run's description of its data, with which pictures are compared:
  a model of 28 x 28 gray digits should refuse a photo, and not guess.
  """

  def __init__(self, chain: Chain, data: Mapping[str, Any]):
    self.chain = chain
    known = data.get("features", {}).get("image")
    # Shape of an image after the ops; None if the run did not save it.
    self.shape = None if known is None else tuple(known[1])
    if self.shape is not None and "shapes" in chain.features:
      self.shape = (None, *self.shape[1:])  # Any number of patches.
    self._op = registry.compose(chain.needs.ops)
    # [dtype, shape, lowest, highest] of the run's own pictures.
    self._raw_spec = data.get("raw", {}).get(chain.raw)
    # Whether the ops begin with the bytes of a file, and not with pixels.
    was_encoded = bool(self._raw_spec and self._raw_spec[0] == "bytes")
    self._is_encoded = was_encoded or any(
      registry.base_name(op) == "decode" and chain.raw in op.reads
      for op in chain.needs.ops
    )
    # Whether files are decoded as they are stored, and what EXIF says of those
    # of this batch: (name, orientation).
    self._ignores_exif = not self._is_encoded or any(
      op.ignores_exif for op in chain.needs.ops
    )
    self._orientations: list[tuple[str, int]] = []
    self._graph: Any = None  # Of ops that need tensorflow.

  def __call__(self, pictures: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns the features [B, ...] of pictures, decoded on all cores.

    These are "image", and "shapes" if the ops make patches.

    `Predictor.predict` says what a picture can be.
    """
    self._prepare()
    try:
      if len(pictures) == 1:
        rows = [self._one(pictures[0])]
      else:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
          rows = list(pool.map(self._one, pictures))
    finally:
      self._log_turned()
    names = self.chain.features
    return {name: np.stack([row[name] for row in rows]) for name in names}

  def _prepare(self) -> None:
    """Makes the graph of ops that need tensorflow, before the threads start."""
    if self._op.tensorflow and self._graph is None:
      tf = host_tensorflow.load()
      draws = tf.zeros([max(self._op.draws, 1)])

      def fn(raw: Any) -> Any:
        made = self._op.fn({self.chain.raw: raw}, draws)
        return {name: made[name] for name in self.chain.features}

      self._graph = tf.function(fn, autograph=False)

  def _log_turned(self) -> None:
    """Warns once of files that decode(exif=True) would turn."""
    if message := picture_files.would_turn(self._orientations):
      logging.warning("%s: %s", self.chain.key, message)
      self._ignores_exif = False
    self._orientations.clear()

  def _one(self, picture: Any) -> dict[str, np.ndarray]:
    where = picture if isinstance(picture, str | os.PathLike) else "a picture"
    try:
      raw = self._raw(picture)
      if self._graph is not None:
        made = self._graph(host_tensorflow.load().constant(raw))
      else:
        draws = np.zeros(self._op.draws, np.float32)
        made = self._op.fn({self.chain.raw: raw}, draws)
      features = {name: np.asarray(made[name]) for name in self.chain.features}
      shape = features["image"].shape
      if self.shape is not None and not _fits(shape, self.shape):
        raise DataError(
          f"{_size(shape)} after {self.chain.key}, but the model takes "
          f"{_size(self.shape)}; give pp=..., such as "
          f"{_resizing(self.shape)!r}."
        )
      return features
    except DataError as e:
      raise DataError(f"{os.fspath(where)}: {e}") from e
    except ConfigError:
      raise
    except Exception as e:  # tensorflow's errors have no common class.
      message = host_tensorflow.one_line(e)
      raise DataError(f"{os.fspath(where)}: {message}") from e

  def _raw(self, picture: Any) -> bytes | np.ndarray:
    """The first op's input: the bytes of a file, or pixels [H, W, C]."""
    name = "a picture"
    if isinstance(picture, str | os.PathLike):
      name = os.fspath(picture)
      try:
        picture = paths.read_bytes(paths.absolute(picture))
      except OSError as e:
        raise DataError(f"{e.strerror}.") from e
    if isinstance(picture, bytes | bytearray):
      encoded = bytes(picture)
      if self._ignores_exif:
        value = picture_files.orientation(encoded)
        self._orientations.append((name, value))
      if self._is_encoded:
        return encoded
      channels = self._raw_spec[1][-1] if self._raw_spec else 3
      decoding = ops_image.Decoding(channels)
      tensor = host_tensorflow.load().constant(encoded)
      return self._checked(ops_image.decoded(tensor, decoding).numpy())
    is_pil = hasattr(picture, "convert")
    if is_pil and picture.mode not in ("L", "RGB"):
      picture = picture.convert("RGB")
    array = np.asarray(picture)
    if array.ndim == 2:
      array = array[:, :, None]
    if array.ndim != 3 or array.dtype.kind not in "uif":
      raise DataError(
        "expected a path, the bytes of a file, or an array [height, width, "
        f"channels], got {type(picture).__name__} {array.dtype}{array.shape}."
      )
    return _as_png(array) if self._is_encoded else self._checked(array)

  def _checked(self, array: np.ndarray) -> np.ndarray:
    """Refuses pixels that are unlike the pixels of the run's pictures."""
    if self._raw_spec is None:
      return array
    dtype, shape, *limits = self._raw_spec
    if any(n not in (None, size) for n, size in zip(shape, array.shape)):
      raise DataError(
        f"{_size(array.shape)}, but {self.chain.key} is for the run's "
        f"pictures, which are {_size(shape)}: give pp=..., such as "
        f"{_resizing(self.shape or shape)!r}."
      )
    if limits:
      low, high = limits
      # Values may exceed those of the run's sample, but not by another scale,
      # such as 0 to 255 in place of 0 to 1.
      room = high - low
      if array.min() < low - room or array.max() > high + room:
        raise DataError(
          f"values from {array.min():g} to {array.max():g}, but the run's "
          f"pictures have {low:g} to {high:g}: scale them, or give pp=..., "
          f"such as {_resizing(self.shape or shape)!r}."
        )
    if array.dtype.kind == "f" and np.dtype(dtype).kind != "f":
      raise DataError(f"expected {dtype}, as in the run, got {array.dtype}.")
    return array.astype(dtype)


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
  """Whether an image has the expected shape, where None is any size."""
  return len(shape) == len(expected) and all(
    n in (None, size) for n, size in zip(expected, shape)
  )


def _size(shape: Sequence[int | None]) -> str:
  return "x".join("?" if n is None else str(n) for n in shape)


def _resizing(shape: Sequence[int]) -> str:
  """Ops that make such images, for a hint."""
  if len(shape) == 2:
    side = math.isqrt(shape[1] // 3)
    return f"decode|value_range(-1,1)|naflex({side}, 256)"
  height, width, channels = shape
  decode = "decode" if channels == 3 else f"decode(channels={channels})"
  return f"{decode}|resize(({height}, {width}))|value_range(-1,1)"


def _as_png(array: np.ndarray) -> bytes:
  if array.dtype != np.uint8 or array.shape[-1] not in (1, 3):
    raise DataError(
      "expected an array of uint8 with values 0 to 255 and 1 or 3 channels, "
      f"got {array.dtype} {_size(array.shape)}."
    )
  return host_tensorflow.load().io.encode_png(array).numpy()


class Texts:
  """Turns texts into tokens [B, L]."""

  def __init__(self, chain: Chain):
    self.chain = chain
    self._op = registry.compose(chain.needs.ops)
    readers = [op for op in chain.needs.ops if chain.raw in op.reads]
    # The data may have a list of captions, of which the op `choice` draws one.
    self._as_list = bool(readers) and (
      registry.base_name(readers[0]) == "choice"
    )

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    draws = np.zeros(self._op.draws, np.float32)
    (name,) = self.chain.features
    rows = []
    for text in texts:
      raw: Any = text.encode()
      if self._as_list:
        raw = np.asarray([raw], object)
      features = self._op.fn({self.chain.raw: raw}, draws)
      rows.append(np.asarray(features[name], np.int32))
    return np.stack(rows)
