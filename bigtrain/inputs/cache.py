"""A cache of raw records in host memory."""

import pathlib
import re
import threading
from typing import Any

import numpy as np
from absl import logging

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.files import disk

# Records that are read to estimate the size of all.
_NUM_SAMPLED = 256
# Size of a bytes object without its content, plus the reference to it.
_OBJECT_BYTES = 41
# Files with a container's (limit, usage), in version 2 and 1 of cgroups.
_CGROUPS = (
  ("memory.max", "memory.current"),
  ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes() -> int | None:
  """Returns the memory that this process may still use; None if unknown."""
  limits = []
  meminfo = pathlib.Path("/proc/meminfo")
  if meminfo.exists():
    for size in re.findall(r"MemAvailable:\s*(\d+)", meminfo.read_text()):
      limits.append(int(size) * 1024)
  for names in _CGROUPS:
    limit, usage = (pathlib.Path("/sys/fs/cgroup", name) for name in names)
    if limit.exists() and usage.exists():
      most = limit.read_text().strip()
      if most.isdigit():  # "max" means no limit.
        limits.append(max(0, int(most) - int(usage.read_text())))
  return min(limits) if limits else None


def fits(size: int, what: str, share: float) -> bool:
  """Returns whether `size` bytes fit into a share of the free memory."""
  free = available_bytes()
  free_text = "unknown" if free is None else disk.size(free)
  message = "%s take about %s of memory, of which %s are available."
  logging.debug(message, what, disk.size(size), free_text)
  return free is None or size <= free * share


class CachedSource:
  """Wraps a source and keeps each record in memory after its first read."""

  def __init__(self, source: Any, key: str):
    self._source = source
    size = self._estimate()
    if not fits(size, f"{key}: {len(source)} records", 1.0):
      raise ConfigError(
        f"{key}='raw': the records take about {disk.size(size)} of memory, but "
        f"{disk.size(available_bytes() or 0)} are available; use cache='none'."
      )
    self._lock = threading.Lock()
    self._is_cached = np.zeros(len(source), bool)
    self._records: dict[str, np.ndarray] = {}

  def __getattr__(self, name: str) -> Any:
    # Private names are never delegated: copying and unpickling look them up
    # before `_source` exists.
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._source, name)

  def _estimate(self) -> int:
    """Returns the size of all records in bytes, from a random sample."""
    sample = np.arange(min(_NUM_SAMPLED, len(self)))
    total_bytes, num_read = 0, 0
    for index in hashing.permute(sample, len(self), 0):
      try:
        record = self._source.read(np.asarray([index]))
      except DataError:  # Reported when a batch needs this record.
        continue
      num_read += 1
      total_bytes += sum(_num_bytes(x[0], x.dtype) for x in record.values())
    return int(total_bytes / max(num_read, 1) * len(self))

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    new = np.unique(indices[~self._is_cached[indices]])
    if new.size:
      records = self._source.read(new)
      with self._lock:
        for name, array in records.items():
          if name not in self._records:
            shape = (len(self), *array.shape[1:])
            self._records[name] = np.empty(shape, array.dtype)
          self._records[name][new] = array
        # Set last: other threads read without the lock.
        self._is_cached[new] = True
    return {name: array[indices] for name, array in self._records.items()}


def _num_bytes(value: Any, dtype: np.dtype) -> int:
  if dtype.kind != "O":
    return value.nbytes
  if isinstance(value, np.ndarray) and value.dtype.kind == "O":
    return sum(_OBJECT_BYTES + len(item) for item in value.ravel())
  size = value.nbytes if isinstance(value, np.ndarray) else len(value)
  return _OBJECT_BYTES + size
