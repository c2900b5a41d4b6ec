"""Parquet files, as sets of images and texts are published on the hub.

  dict(type="parquet", path="my_set/data/train-*.parquet",
       columns=("image", "caption"))

A column of numbers, strings or bytes is a feature, and so is one of lists of
them. An image column, a struct of `bytes` and `path`, is the bytes of the
image. The fields of any other struct are features of their own, under names
such as "captions/text".

A row is reached through its row group, which is the least that can be decoded
of a Parquet file. Those that were used last stay in memory, up to a bound.
Where a set is larger than that, reading it in random order decodes a group for
almost each example; `unpack_to` writes each group to disk once, in a format
whose rows can be reached directly.
"""

import collections
import concurrent.futures
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.data.formats import arrow_columns, files, slices
from bigtrain.settings import ConfigError, DataError


class Source:
  """The rows of one or more files, in the order of their names.

  Args:
    path: a file, a pattern such as "data/train-*.parquet", or a list of these.
    columns: only these columns; all of the first file if not given. What is
      not read is not decoded either.
    slice: such as "[:99%]".
    cache_bytes: of decoded row groups that stay in memory.
    unpack_to: a folder for row groups as Arrow files; as large as the decoded
      columns.

  Raises:
    ConfigError: no such file or column, a column that is no feature, or
      pyarrow is not installed.
    DataError: a file that is damaged or that differs from the first. No rows.
  """

  def __init__(
    self,
    path: str | Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    slice: str = "",
    cache_bytes: int = 1 << 30,
    unpack_to: str | None = None,
  ):
    arrow_columns.import_pyarrow()
    if isinstance(columns, str):
      raise ConfigError(
        f"parquet: columns={columns!r}: expected a list of names."
      )
    if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int):
      raise ConfigError(
        f"parquet: cache_bytes={cache_bytes!r}: expected a whole number."
      )
    patterns = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not patterns:
      raise ConfigError("parquet: path: expected at least one file.")
    self._paths = [p for pattern in patterns for p in _find(pattern)]
    found = files.offsets(self._paths, scan_row_groups)
    self._sizes = [int(starts[-1]) for starts in found]
    self._groups = [
      files.Shards(np.diff(starts[:-1]).tolist()) for starts in found
    ]
    self._shards = files.Shards([len(groups) for groups in self._groups])
    if not len(self._shards):
      raise DataError(f"parquet: {path}: there is no row in it.")
    self._start, stop = slices.bounds(
      slice, len(self._shards), "parquet: slice"
    )
    self._length = stop - self._start
    self._schema = _schema(self._paths[0])
    self._features = arrow_columns.find_features(
      self._schema, columns, self._paths[0]
    )
    self.spec = {n: (f.kind, f.shape) for n, f in self._features.items()}
    self._tables = _Tables(self._load, cache_bytes)
    self._unpack_to = unpack_to and os.path.expanduser(unpack_to)

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The features [B, ...]; bytes, and what varies in size, as objects."""
    num_rows = len(indices)
    batch = {}
    for name, (kind, shape) in self.spec.items():
      varies = None in shape
      dtype = object if varies or kind is bytes else kind
      batch[name] = np.empty((num_rows, *(() if varies else shape)), dtype)
    # One table at a time, and rows of the same one together: a batch in random
    # order would else hold as many row groups as rows.
    for i in np.argsort(indices):
      index = int(indices[i])
      file, group, row = self._position(index)
      table = self._tables.get((file, group))
      for name in batch:
        batch[name][i] = self._value(name, table, row, index)
    return batch

  def where(self, index: int) -> str:
    """File, row group and the row in it, each counted from 0."""
    file, group, row = self._position(index)
    return f"{self._paths[file]}, row group {group}, row {row}"

  def fingerprint(self) -> str:
    """Changes with the files' names and sizes, and with the choices."""
    names = [os.path.basename(path) for path in self._paths]
    return files.digest(
      "parquet",
      *names,
      *self._sizes,
      self._start,
      self._length,
      sorted(self.spec),
    )

  def _position(self, index: int) -> tuple[int, int, int]:
    """(file, row group, row of it) of an example."""
    (file,), rows = self._shards.locate(np.asarray([index + self._start]))
    (group,), (row,) = self._groups[file].locate(rows)
    return int(file), int(group), int(row)

  def _load(self, key: tuple[int, int]) -> tuple[Any, int]:
    """The table of a row group, decoded or mapped, and the memory it takes."""
    path, group = self._paths[key[0]], key[1]
    if self._unpack_to is None:
      table = self._decode(path, group)
      return table, table.nbytes
    name = files.digest(
      path, self._sizes[key[0]], os.stat(path).st_mtime_ns, group, self.spec
    )
    unpacked = os.path.join(self._unpack_to, f"{name}.arrow")
    if not os.path.exists(unpacked):
      _write_arrow(self._decode(path, group), unpacked)
    pa = arrow_columns.import_pyarrow()
    try:
      return pa.ipc.open_file(pa.memory_map(unpacked)).read_all(), 0
    except (pa.ArrowException, OSError) as e:
      raise DataError(
        f"{unpacked}: cannot be read: {_told(e)}. It was made of {path} and "
        "may be deleted."
      ) from e

  def _decode(self, path: str, group: int) -> Any:
    pa = arrow_columns.import_pyarrow()
    columns = list(dict.fromkeys(f.path[0] for f in self._features.values()))
    try:
      with pa.parquet.ParquetFile(
        path, memory_map=True, page_checksum_verification=True
      ) as file:
        self._check_schema(file.schema_arrow, columns, path)
        table = file.read_row_group(group, columns=columns)
      arrays = {
        name: arrow_columns.stored(table, feature)
        for name, feature in self._features.items()
      }
    except (pa.ArrowException, OSError) as e:
      raise DataError(
        f"{path}, row group {group}: cannot be read: {_told(e)}."
      ) from e
    return pa.table(arrays)

  def _check_schema(self, found: Any, columns: list[str], path: str) -> None:
    for name in columns:
      there = name in found.names
      have = found.field(name).type if there else "missing"
      want = self._schema.field(name).type
      if have != want:
        raise DataError(
          f"{path}: column {name!r} is {have}, but {want} in {self._paths[0]}."
        )

  def _value(self, name: str, table: Any, row: int, index: int) -> Any:
    """A feature of a row: bytes, or an array."""
    feature = self._features[name]
    value = table.column(name)[row].as_py()
    if feature.image and value is not None:
      value = self._image(value, index)
    holes = isinstance(value, list) and None in value
    if value is None or holes:
      raise DataError(
        f"{self.where(index)}: column {name!r} is null"
        f"{' in part' if holes else ''}."
      )
    if not feature.shape:
      return value if feature.kind is bytes else feature.kind.type(value)
    if feature.kind is not bytes:
      return np.asarray(value, feature.kind)
    texts = np.empty(len(value), object)
    texts[:] = value
    return texts

  def _image(self, value: dict[str, Any], index: int) -> bytes | None:
    """The bytes of an image, or of the file that stands for them."""
    if value["bytes"] is not None or value["path"] is None:
      return value["bytes"]
    folder = os.path.dirname(self._paths[self._position(index)[0]])
    path = os.path.join(folder, os.fsdecode(value["path"]))
    try:
      with open(path, "rb", buffering=0) as f:
        return f.read()
    except (OSError, ValueError) as e:
      raise DataError(
        f"{self.where(index)}: the image is not in the file, and neither is "
        f"it at {path}: {e}."
      ) from e


class _Tables:
  """Row groups that were used last. Threads that want the same one wait.

  Args:
    load: makes the table of a key; tells its size in memory, too.
    max_bytes: of all that are kept; the newest always is.
  """

  def __init__(
    self, load: Callable[[tuple[int, int]], tuple[Any, int]], max_bytes: int
  ):
    self._load = load
    self._max_bytes = max_bytes
    self._lock = threading.Lock()
    self._kept: collections.OrderedDict[
      tuple[int, int], concurrent.futures.Future[Any]
    ] = collections.OrderedDict()
    self._bytes: dict[tuple[int, int], int] = {}
    self._dropped: set[tuple[int, int]] = set()
    self._warned = False

  def get(self, key: tuple[int, int]) -> Any:
    """The table of a row group."""
    with self._lock:
      future = self._kept.get(key)
      ours = future is None
      if future is None:
        future = self._kept[key] = concurrent.futures.Future()
      self._kept.move_to_end(key)
    if not ours:
      return future.result()
    try:
      table, size = self._load(key)
    except BaseException as e:
      with self._lock:
        del self._kept[key]
      future.set_exception(e)
      raise
    future.set_result(table)
    self._keep(key, size)
    return table

  def _keep(self, key: tuple[int, int], size: int) -> None:
    """Counts a new table, and drops what has not been used for longest."""
    with self._lock:
      self._bytes[key] = size
      for old in [k for k in self._kept if k in self._bytes and k != key]:
        if sum(self._bytes.values()) <= self._max_bytes:
          break
        del self._kept[old], self._bytes[old]
        self._dropped.add(old)
      warn = key in self._dropped and not self._warned
      self._warned |= warn
    if warn:
      logging.warning(
        "parquet: row groups are decoded again and again, as not all of them "
        "fit into cache_bytes=%d. Raise it, or give unpack_to= a folder.",
        self._max_bytes,
      )


def scan_row_groups(path: str) -> np.ndarray:
  """Number of the first row of each row group, of rows, and the file's size."""
  pa = arrow_columns.import_pyarrow()
  try:
    size = os.path.getsize(path)
    metadata = pa.parquet.read_metadata(path)
    counts = [
      metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)
    ]
  except (pa.ArrowException, OSError) as e:
    raise DataError(f"{path}: not a Parquet file: {_told(e)}.") from e
  return np.asarray([0, *np.cumsum(counts, dtype=np.int64), size], np.int64)


def _find(pattern: str) -> list[str]:
  if os.path.isdir(os.path.expanduser(os.fspath(pattern))):
    # A folder on the hub holds the files of all splits.
    raise ConfigError(
      f"parquet: path={os.fspath(pattern)!r} is a folder; expected a file or "
      "a pattern, such as 'folder/train-*.parquet'."
    )
  return files.find(pattern, "parquet: path")


def _schema(path: str) -> Any:
  pa = arrow_columns.import_pyarrow()
  try:
    return pa.parquet.read_schema(path)
  except (pa.ArrowException, OSError) as e:
    raise DataError(f"{path}: not a Parquet file: {_told(e)}.") from e


def _write_arrow(table: Any, path: str) -> None:
  """Writes a table to an Arrow file, all of it or nothing."""
  pa = arrow_columns.import_pyarrow()
  try:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Several processes may unpack the same row group at the same time.
    with tempfile.NamedTemporaryFile(
      dir=os.path.dirname(path), suffix=".tmp", delete=False
    ) as f:
      try:
        with pa.ipc.new_file(f, table.schema) as writer:
          writer.write_table(table)
      except BaseException:
        os.unlink(f.name)
        raise
    os.replace(f.name, path)
  except (pa.ArrowException, OSError) as e:
    raise ConfigError(f"parquet: unpack_to: {path}: {_told(e)}.") from e


def _told(error: Exception) -> str:
  return " ".join(str(error).split()).rstrip(".")[:200]
