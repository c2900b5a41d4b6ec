"""A data source that repeats a few examples made beforehand.

It imports numpy only, because PEFT's environment loads it too, and has none of
our packages.
"""

import zlib

import numpy as np

_EXAMPLES = 1_000_000  # Length of the source, so that no epoch ends.


class Pool:
  """The source.

  Args:
    arrays: {feature: values [number of examples, ...]}.
    name: what messages call an example.
  """

  def __init__(self, arrays: dict[str, np.ndarray], name: str):
    self._arrays = arrays
    self._name = name
    self._size = len(next(iter(arrays.values())))
    self.spec = {n: (x.dtype, x.shape[1:]) for n, x in arrays.items()}

  def __len__(self) -> int:
    return _EXAMPLES

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    rows = indices % self._size
    return {name: array[rows] for name, array in self._arrays.items()}

  def where(self, index: int) -> str:
    return f"{self._name} {index}"

  def fingerprint(self) -> str:
    parts = [array.tobytes() for array in self._arrays.values()]
    return f"{zlib.crc32(b''.join(parts)):08x}"
