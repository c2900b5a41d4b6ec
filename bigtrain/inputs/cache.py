"""A cache of raw records in host memory."""

import os
import threading
from typing import Any

import numpy as np
from absl import logging

from bigtrain import hashing
from bigtrain.settings import ConfigError, DataError

_NUM_SAMPLED = 256
# Size of a bytes object without its content, plus the reference to it.
_OBJECT_BYTES = 41
_CGROUPS = (  # (limit, usage) in version 2 and version 1.
  ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
  (
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes",
  ),
)


def available_bytes() -> int | None:
  """Returns the memory this process may still allocate; None if unknown."""
  limits = []
  if os.path.exists("/proc/meminfo"):
    with open("/proc/meminfo") as f:
      rows = dict(line.split(":", 1) for line in f)
    if "MemAvailable" in rows:
      limits.append(int(rows["MemAvailable"].split()[0]) * 1024)
  for limit_file, usage_file in _CGROUPS:
    if os.path.exists(limit_file) and os.path.exists(usage_file):
      with open(limit_file) as f_limit, open(usage_file) as f_usage:
        limit = f_limit.read().strip()
        if limit.isdigit():  # "max" means no limit.
          limits.append(max(0, int(limit) - int(f_usage.read())))
  return min(limits) if limits else None


def readable(size: float) -> str:
  for unit in ("B", "kB", "MB", "GB"):
    if size < 1000:
      return f"{size:.3g} {unit}"
    size /= 1000
  return f"{size:.3g} TB"


def fits(size: int, what: str, share: float) -> bool:
  """Logs a size in bytes; whether it fits into a share of the free memory."""
  free = available_bytes()
  free_text = "unknown" if free is None else readable(free)
  message = "%s take about %s of memory, of which %s are available."
  logging.info(message, what, readable(size), free_text)
  return free is None or size <= free * share


class CachedSource:
  """Wraps a source and keeps each record in memory after its first read.

  A ConfigError tells that the estimated size exceeds the available memory.
  """

  def __init__(self, source: Any, key: str):
    self._source = source
    what = f"{key}: {len(source)} records"
    size = self._estimate()
    if not fits(size, what, 1.0):
      raise ConfigError(
        f"{key}='raw': the records take about {readable(size)} of memory, but "
        f"{readable(available_bytes() or 0)} are available; use cache='none'."
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
    sample = hashing.permute(
      np.arange(min(_NUM_SAMPLED, len(self._source))), len(self._source), 0
    )
    total_bytes, num_read = 0, 0
    for index in sample:
      try:
        row = self._source.read(np.asarray([index]))
      except DataError:  # Reported when a batch needs this record.
        continue
      num_read += 1
      total_bytes += sum(
        _row_bytes(array[0], array.dtype) for array in row.values()
      )
    return int(total_bytes / max(num_read, 1) * len(self._source))

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    new = np.unique(indices[~self._is_cached[indices]])
    if new.size:
      rows = self._source.read(new)
      with self._lock:
        for name, array in rows.items():
          if name not in self._records:
            shape = (len(self), *array.shape[1:])
            self._records[name] = np.empty(shape, array.dtype)
          self._records[name][new] = array
        # Set last: other threads read without the lock.
        self._is_cached[new] = True
    return {name: array[indices] for name, array in self._records.items()}


def _row_bytes(value: Any, dtype: np.dtype) -> int:
  if dtype.kind != "O":
    return value.nbytes
  if isinstance(value, np.ndarray) and value.dtype.kind == "O":
    return sum(_OBJECT_BYTES + len(item) for item in value.ravel())
  size = value.nbytes if isinstance(value, np.ndarray) else len(value)
  return _OBJECT_BYTES + size
