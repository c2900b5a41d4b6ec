"""The pixels of single pictures, by ops, outside of an input's engine."""

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import host_tensorflow, parse, registry


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

  def __call__(self, pictures: Sequence[Any]) -> list[np.ndarray]:
    """Returns float32 [height, width, 3] of each picture."""
    if len(pictures) < 2:
      return [self._one(picture) for picture in pictures]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      return list(pool.map(self._one, pictures))

  def _one(self, picture: bytes | np.ndarray) -> np.ndarray:
    is_encoded = isinstance(picture, bytes)
    try:
      if is_encoded or self._op.tensorflow:
        image = self._graph(is_encoded)(picture).numpy()
      else:
        draws = np.zeros(0, np.float32)
        image = self._op.fn({"image": picture}, draws)["image"]
    except ConfigError:
      raise
    except Exception as e:  # tensorflow's errors have no common class.
      raise DataError(f"a picture: {host_tensorflow.one_line(e)}") from e
    return np.asarray(image, np.float32)

  def _graph(self, is_encoded: bool) -> Any:
    if is_encoded not in self._graphs:
      tf = host_tensorflow.load()

      def fn(picture: Any) -> Any:
        features = {"image": picture}
        draws = tf.zeros([1])
        if is_encoded:
          features = self._decode.fn(features, draws)
        return self._op.fn(features, draws)["image"]

      spec = tf.TensorSpec((None, None, 3), tf.uint8)
      if is_encoded:
        spec = tf.TensorSpec((), tf.string)
      self._graphs[is_encoded] = tf.function(fn, [spec], autograph=False)
    return self._graphs[is_encoded]
