"""Turns new pictures and texts into features, with the ops of the run.

Legend: B batch, H height, W width, C channels, L length.
"""

import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.files import paths
from bigtrain.inference.ops import Chain
from bigtrain.pp import host_tensorflow, registry


class Pictures:
  """Makes images of a batch from files, bytes and arrays."""

  def __init__(self, chain: Chain, data: Mapping[str, Any]):
    self.chain = chain
    known = data.get("features", {}).get(chain.feature)
    # Of an image after the ops; None if the run did not save it.
    self.shape = None if known is None else tuple(known[1])
    self._op = registry.compose(chain.needs.ops)
    # [dtype, shape, lowest, highest] of the run's own pictures.
    self._known = data.get("raw", {}).get(chain.raw)
    self._encoded = bool(self._known and self._known[0] == "bytes") or any(
      registry.base_name(op) == "decode" and chain.raw in op.reads
      for op in chain.needs.ops
    )
    self._in_graph: Any = None

  def __call__(self, pictures: Sequence[Any]) -> np.ndarray:
    """Makes images [B, ...] of what `Predictor.predict` takes, on all cores."""
    self._prepare()
    if len(pictures) == 1:
      return self._one(pictures[0])[None]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      return np.stack(list(pool.map(self._one, pictures)))

  def _prepare(self) -> None:
    """Makes the graph of ops that need tensorflow, before threads do."""
    if self._op.tensorflow and self._in_graph is None:
      tf = host_tensorflow.load()
      draws = tf.zeros([max(self._op.draws, 1)])

      def fn(raw: Any) -> Any:
        return self._op.fn({self.chain.raw: raw}, draws)[self.chain.feature]

      self._in_graph = tf.function(fn, autograph=False)

  def _one(self, picture: Any) -> np.ndarray:
    where = picture if isinstance(picture, str | os.PathLike) else "a picture"
    try:
      raw = self._raw(picture)
      if self._in_graph is not None:
        image = self._in_graph(host_tensorflow.load().constant(raw)).numpy()
      else:
        draws = np.zeros(self._op.draws, np.float32)
        features = self._op.fn({self.chain.raw: raw}, draws)
        image = np.asarray(features[self.chain.feature])
      if self.shape is not None and image.shape != self.shape:
        raise DataError(
          f"{_size(image.shape)} after {self.chain.key}, but the model takes "
          f"{_size(self.shape)}; give pp=..., such as "
          f"{_resizing(self.shape)!r}."
        )
      return image
    except DataError as e:
      raise DataError(f"{os.fspath(where)}: {e}") from e
    except ConfigError:
      raise
    except Exception as e:  # tensorflow's errors have no common class.
      message = host_tensorflow.one_line(e)
      raise DataError(f"{os.fspath(where)}: {message}") from e

  def _raw(self, picture: Any) -> bytes | np.ndarray:
    if isinstance(picture, str | os.PathLike):
      try:
        picture = paths.read_bytes(paths.absolute(picture))
      except OSError as e:
        raise DataError(f"{e.strerror}.") from e
    if isinstance(picture, bytes | bytearray):
      encoded = bytes(picture)
      if self._encoded:
        return encoded
      decode = host_tensorflow.load().io.decode_image
      channels = self._known[1][-1] if self._known else 3
      image = decode(encoded, channels=channels, expand_animations=False)
      return self._checked(image.numpy())
    if hasattr(picture, "convert") and picture.mode not in ("L", "RGB"):
      picture = picture.convert("RGB")  # Of PIL.
    array = np.asarray(picture)
    if array.ndim == 2:
      array = array[:, :, None]
    if array.ndim != 3 or array.dtype.kind not in "uif":
      raise DataError(
        "expected a path, the bytes of a file, or an array [height, width, "
        f"channels], got {type(picture).__name__} {array.dtype}{array.shape}."
      )
    return _as_png(array) if self._encoded else self._checked(array)

  def _checked(self, array: np.ndarray) -> np.ndarray:
    if self._known is None:
      return array
    dtype, shape, *limits = self._known
    if any(n not in (None, size) for n, size in zip(shape, array.shape)):
      raise DataError(
        f"{_size(array.shape)}, but the run's pictures are {_size(shape)} and "
        f"{self.chain.key} does not resize: give pp=..., such as "
        f"{_resizing(shape)!r}."
      )
    if limits:
      low, high = limits
      room = high - low
      if array.min() < low - room or array.max() > high + room:
        raise DataError(
          f"values from {array.min():g} to {array.max():g}, but the run's "
          f"pictures have {low:g} to {high:g}: scale them, or give pp=..., "
          f"such as {_resizing(shape)!r}."
        )
    if array.dtype.kind == "f" and np.dtype(dtype).kind != "f":
      raise DataError(f"expected {dtype}, as in the run, got {array.dtype}.")
    return array.astype(dtype)


def _size(shape: Sequence[int]) -> str:
  return "x".join("?" if n is None else str(n) for n in shape)


def _resizing(shape: Sequence[int]) -> str:
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
  """Makes tokens [B, L] from texts."""

  def __init__(self, chain: Chain):
    self.chain = chain
    self._op = registry.compose(chain.needs.ops)
    first = [op for op in chain.needs.ops if chain.raw in op.reads][:1]
    # An image's captions are a list in the data, from which `choice` draws.
    self._as_list = [registry.base_name(op) for op in first] == ["choice"]

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    draws = np.zeros(self._op.draws, np.float32)
    rows = []
    for text in texts:
      raw: Any = text.encode()
      if self._as_list:
        raw = np.asarray([raw], object)
      features = self._op.fn({self.chain.raw: raw}, draws)
      rows.append(np.asarray(features[self.chain.feature], np.int32))
    return np.stack(rows)
