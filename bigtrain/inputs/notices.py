"""Notices about the data of an input, each of which is logged once."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from bigtrain.config.errors import DataError
from bigtrain.inputs.engine import Part
from bigtrain.pp import picture_files

# Pictures of each source whose EXIF data are checked: number of places, and of
# neighbours at each place, because some formats read neighbours at once.
_NUM_PLACES, _NUM_NEIGHBOURS = 8, 32


def log_turned(parts: Sequence[Part], path: str) -> None:
  """Warns of pictures that decode(exif=True) would turn."""
  if jax.process_index():
    return
  for part in parts:
    if part.drawn:  # The same source again.
      continue
    readers = [op for op in part.ops if op.ignores_exif]
    spec = getattr(part.source, "spec", {})
    names = {op.reads[0] for op in readers} & {*spec}
    names = {name for name in names if spec[name] == (bytes, ())}
    for name in sorted(names):
      # A damaged example is not an error here: the engine may skip it.
      with contextlib.suppress(DataError, OSError, ValueError):
        if message := picture_files.would_turn(_sample(part.source, name)):
          logging.warning("%s: %s", part.key or path, message)


def _sample(source: Any, name: str) -> Iterator[tuple[str, int]]:
  size = len(source)
  starts = np.linspace(0, max(size - _NUM_NEIGHBOURS, 0), _NUM_PLACES)
  indices = np.unique(
    starts.astype(np.int64)[:, None] + np.arange(_NUM_NEIGHBOURS)
  )
  for some in np.array_split(indices[indices < size], _NUM_PLACES):
    if some.size:
      for index, encoded in zip(some, source.read(some)[name]):
        yield source.where(index), picture_files.orientation(encoded)
