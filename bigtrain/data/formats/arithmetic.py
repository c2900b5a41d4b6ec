"""Additions of numbers below 100: "47+38=", with the answer "85"."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from bigtrain.arrays import hashing


def rows(split: str, preferences: bool = False) -> Iterator[tuple[str, Any]]:
  """Yields (place, row); "test" is every tenth row of a fixed random order."""
  del preferences  # There is no second answer.
  shuffled = hashing.permute(np.arange(10_000), 10_000, seed=0)
  for i, pair in enumerate(shuffled.tolist()):
    own_split = "train" if i % 10 else "test"
    if split in ("all", own_split):
      a, b = divmod(pair, 100)
      row = {"prompt": f"{a}+{b}=", "completion": str(a + b)}
      yield f"arithmetic, question {i}", row
