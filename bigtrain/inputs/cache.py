"""Raw records kept in memory, when there is memory for them."""

import os
import threading
from typing import Any

import numpy as np
from absl import logging

from bigtrain import hashing
from bigtrain.settings import ConfigError, DataError

_NUM_SAMPLED = 256
# A bytes object beside its content, and the reference to it.
_OBJECT_BYTES = 41
_CGROUPS = (  # (limit, use) of version 2 and version 1.
  ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
  (
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes",
  ),
)


def available_bytes() -> int | None:
  """Memory that this process may still take, or None if nothing tells."""
  found = []
  if os.path.exists("/proc/meminfo"):
    with open("/proc/meminfo") as f:
      rows = dict(line.split(":", 1) for line in f)
    if "MemAvailable" in rows:
      found.append(int(rows["MemAvailable"].split()[0]) * 1024)
  for limit, use in _CGROUPS:
    if os.path.exists(limit) and os.path.exists(use):
      with open(limit) as f_limit, open(use) as f_use:
        most = f_limit.read().strip()
        if most.isdigit():  # "max" is no limit.
          found.append(max(0, int(most) - int(f_use.read())))
  return min(found) if found else None


def readable(size: float) -> str:
  """1234567 as "1.2 MB"."""
  for unit in ("B", "kB", "MB", "GB"):
    if size < 1000:
      return f"{size:.3g} {unit}"
    size /= 1000
  return f"{size:.3g} TB"


class CachedSource:
  """A source whose records stay in memory once they have been read.

  Args:
    source: what is read from.
    key: the config key that asked for it, for messages.

  Raises:
    ConfigError: the estimate, which is logged before, exceeds the memory.
  """

  def __init__(self, source: Any, key: str):
    self._source = source
    self.spec = source.spec
    if hasattr(source, "parse"):
      self.parse = source.parse
    size = self._estimate()
    free = available_bytes()
    told = "unknown" if free is None else readable(free)
    logging.info(
      "%s: %d records take about %s of memory, of which %s are available.",
      key,
      len(source),
      readable(size),
      told,
    )
    if free is not None and size > free:
      raise ConfigError(
        f"{key}='raw': the records take about {readable(size)} of memory, but "
        f"{told} are available; use cache='none'."
      )
    self._lock = threading.Lock()
    self._have = np.zeros(len(source), bool)
    self._kept: dict[str, np.ndarray] = {}

  def _estimate(self) -> int:
    """Bytes of all records, from a sample of them."""
    sample = hashing.permute(
      np.arange(min(_NUM_SAMPLED, len(self._source))), len(self._source), 0
    )
    total, found = 0, 0
    for index in sample:
      try:
        row = self._source.read(np.asarray([index]))
      except DataError:  # Told when the turn of this record comes.
        continue
      found += 1
      total += sum(_row_bytes(array[0], array.dtype) for array in row.values())
    return int(total / max(found, 1) * len(self._source))

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """As the source does."""
    new = np.unique(indices[~self._have[indices]])
    if new.size:
      rows = self._source.read(new)
      with self._lock:
        for name, array in rows.items():
          if name not in self._kept:
            shape = (len(self), *array.shape[1:])
            self._kept[name] = np.empty(shape, array.dtype)
          self._kept[name][new] = array
        # Set last: another thread may be looking.
        self._have[new] = True
    return {name: array[indices] for name, array in self._kept.items()}

  def where(self, index: int) -> str:
    """As the source does."""
    return self._source.where(index)

  def fingerprint(self) -> str:
    """That of the source: caching does not change the data."""
    return self._source.fingerprint()


def _row_bytes(value: Any, dtype: np.dtype) -> int:
  if dtype.kind != "O":
    return value.nbytes
  if isinstance(value, np.ndarray) and value.dtype.kind == "O":
    return sum(_OBJECT_BYTES + len(item) for item in value.ravel())
  size = value.nbytes if isinstance(value, np.ndarray) else len(value)
  return _OBJECT_BYTES + size
