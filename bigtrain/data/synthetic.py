"""Random examples with declared types and shapes, for benchmarks without data.

  dict(type="synthetic", features={"tokens": "int32[1024] < 50257",
                                   "targets": "int32[1024] < 50257"})
  dict(type="synthetic", features={"image": "jpeg[375,500,3]",
                                   "label": "int64 < 1000"})

A feature is KIND[SHAPE] < BOUND. KIND is a numpy dtype, `text` (a few words as
bytes) or `jpeg` (an encoded image of that shape). Scalars have no [SHAPE], and
a size of `?` varies between examples. BOUND is the exclusive upper bound of
integers, such as a vocabulary size.

An example depends only on its number and the seed.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.data.formats import files
from bigtrain.pp import host_tensorflow

_FEATURE = re.compile(
  r"\s*(?P<kind>\w+)\s*(?:\[(?P<shape>[\d\s,?]*)\])?\s*(?:<\s*(?P<bound>\d+))?\s*"
)
_INTEGERS = [f"{kind}{n}" for kind in ("uint", "int") for n in (8, 16, 32, 64)]
_TYPES = ("bool", "float16", "float32", "float64", *_INTEGERS)
_MAX_SIZE = 3  # Maximum of a size that varies.
_NUM_PICTURES = 16  # Different JPEGs; all of them take as long to decode.
_WORDS = b"a the of on in dog cat tree house river red blue old small".split()


class Feature(NamedTuple):
  """The declaration of a feature."""

  kind: str  # "text", "jpeg" or a numpy dtype.
  shape: tuple[int | None, ...]  # None for a size that varies.
  bound: int | None  # Exclusive upper bound of integers.

  @property
  def spec(self) -> tuple[Any, tuple[int | None, ...]]:
    if self.kind == "jpeg":
      return bytes, ()
    return bytes if self.kind == "text" else np.dtype(self.kind), self.shape


def parse(text: str, key: str) -> Feature:
  match = _FEATURE.fullmatch(text) if isinstance(text, str) else None
  if match is None:
    raise ConfigError(
      f"{key}={text!r}: expected KIND[SHAPE] < BOUND, such as 'int32[1024] < "
      "50257', 'float32' or 'jpeg[375,500,3]'."
    )
  kind, bound = match["kind"], match["bound"]
  check_choice(f"{key}={text!r}: kind", kind, (*_TYPES, "text", "jpeg"))
  sizes = [s.strip() for s in (match["shape"] or "").split(",") if s.strip()]
  shape = tuple(None if s == "?" else int(s) for s in sizes)
  if kind == "jpeg" and (len(shape) != 3 or None in shape):
    raise ConfigError(f"{key}={text!r}: expected jpeg[height,width,channels].")
  if bound is not None and (np.dtype(kind).kind not in "iu" or bound == "0"):
    raise ConfigError(f"{key}={text!r}: only integers have a (positive) bound.")
  return Feature(kind, shape, int(bound) if bound else None)


class Source:
  """Random examples.

  Args:
    features: {name: "KIND[SHAPE] < BOUND"}.
    num_examples: number of examples.
    seed: seed of the examples.
  """

  def __init__(
    self,
    features: Mapping[str, str],
    *,
    num_examples: int = 1_000_000,
    seed: int = 0,
  ):
    if not isinstance(features, Mapping) or not features:
      raise ConfigError(f"synthetic: features={features!r}: expected a dict.")
    self._features = {
      name: parse(text, f"synthetic: features.{name}")
      for name, text in features.items()
    }
    self._length = check_number(
      "synthetic: num_examples", num_examples, least=1, whole=True
    )
    self._seed = seed
    self.spec = {name: f.spec for name, f in self._features.items()}
    self.vocab_sizes = {
      name: f.bound for name, f in self._features.items() if f.bound
    }

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    return {
      name: _values(feature, hashing.stream(self._seed, k), indices)
      for k, (name, feature) in enumerate(self._features.items())
    }

  def where(self, index: int) -> str:
    return f"synthetic example {int(index)}"

  def fingerprint(self) -> str:
    parts = [(name, *feature) for name, feature in self._features.items()]
    return files.digest("synthetic", self._length, self._seed, *parts)


def _values(feature: Feature, seed: int, indices: np.ndarray) -> np.ndarray:
  if feature.kind == "jpeg":
    pictures = _pictures(*feature.shape)
    return files.objects(
      [pictures[i % _NUM_PICTURES] for i in indices.tolist()]
    )
  if None not in feature.shape:
    return _uniform(feature, seed, indices, feature.shape)
  values = []
  for i in indices:
    u = hashing.uniforms(seed, 1, i[None], len(feature.shape))[0]
    shape = tuple(
      1 + int(x * _MAX_SIZE) if size is None else size
      for x, size in zip(u, feature.shape)
    )
    values.append(_uniform(feature, seed, i[None], shape)[0])
  return files.objects(values)


def _uniform(
  feature: Feature, seed: int, indices: np.ndarray, shape: tuple[Any, ...]
) -> np.ndarray:
  size = int(np.prod(shape, dtype=np.int64))
  if feature.kind == "text":
    u = hashing.uniforms(seed, 0, indices, size * 8).reshape(-1, 8)
    texts = [b" ".join(_WORDS[int(x * len(_WORDS))] for x in row) for row in u]
    return files.objects(texts).reshape(len(indices), *shape)
  u = hashing.uniforms(seed, 0, indices, size).reshape(len(indices), *shape)
  dtype = np.dtype(feature.kind)
  if dtype.kind == "f":
    return u.astype(dtype)
  if dtype.kind == "b":
    return u < 0.5
  bound = feature.bound or (256 if dtype == np.uint8 else 2)
  return (u.astype(np.float64) * bound).astype(dtype)


@functools.cache
def _pictures(height: int, width: int, channels: int) -> list[bytes]:
  """Returns JPEGs of coloured clouds, about the file size of photographs."""
  tf = host_tensorflow.load()
  rng = np.random.default_rng(0)
  pictures = []
  for _ in range(_NUM_PICTURES):
    image = np.zeros((height, width, channels))
    for cells in (4, 16, 64):
      coarse = rng.uniform(size=(cells + 1, cells + 1, channels))
      rows = np.linspace(0, cells, height).astype(int)
      columns = np.linspace(0, cells, width).astype(int)
      image += coarse[rows][:, columns] / cells**0.5
    image = 255 * image / image.max()
    pictures.append(tf.io.encode_jpeg(image.astype(np.uint8)).numpy())
  return pictures
