"""Parquet files, such as the image and text data sets on Hugging Face's hub.

  dict(type="parquet", path="my_set/data/train-*.parquet",
       columns=("image", "caption"))

A column of numbers, strings, bytes or lists of these is a feature. An image
column, a struct of `bytes` and `path`, becomes the image's encoded bytes; the
fields of any other struct become features such as "captions/text".

Row groups are decoded as a whole. If the data set is larger than `cache_bytes`
and read in random order, set `unpack_to`, whose files give access to single
rows.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.data.formats import arrow_columns, files
from bigtrain.files import paths


class Source(arrow_columns.Rows):
  """The rows of one or more files.

  Args:
    path: a file, a pattern such as "data/train-*.parquet", whose matches are
      sorted, or a list of these.
    columns: names of the columns to use, by default all of the first file.
    slice: slice of the rows, such as "[:99%]".
    cache_bytes: maximum memory for decoded row groups.
    unpack_to: folder for decoded row groups, as Arrow files.
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
    check_number("parquet: cache_bytes", cache_bytes, least=0, whole=True)
    entries = files.as_list(path, "parquet: path")
    self._paths = [file for entry in entries for file in _find(entry)]
    schema = _schema(self._paths[0])
    self._open_tables("parquet", path, scan_row_groups, schema, columns, slice)
    self._tables = files.Cache(self._load, cache_bytes, self._warn_of_reloads)
    if unpack_to is not None:
      unpack_to = files.local_path(unpack_to, "parquet: unpack_to")
    self._unpack_to = unpack_to
    self._cache_bytes, self._warned = cache_bytes, False

  @staticmethod
  def read_class_names(path: Any, **_: Any) -> dict[str, list[str]]:
    first = files.as_list(path, "parquet: path")[0]
    return arrow_columns.class_names(_schema(_find(first)[0]))

  def where(self, index: int) -> str:
    file, group, row = self._position(index)
    return f"{self._paths[file]}, row group {group}, row {row}"

  def _table(self, file: int, group: int) -> Any:
    return self._tables.get((file, group))

  def _load(self, key: tuple[int, int]) -> tuple[Any, int]:
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
    copy = f"{unpacked}: cannot read it (a copy of {path}; it can be deleted)"
    with arrow_columns.errors(copy) as pa:
      return pa.ipc.open_file(pa.memory_map(unpacked)).read_all(), 0

  def _warn_of_reloads(self) -> None:
    if not self._warned:
      logging.warning(
        "parquet: row groups are decoded repeatedly because they do not all "
        "fit into cache_bytes=%d. Raise it, or set unpack_to to a folder.",
        self._cache_bytes,
      )
    self._warned = True

  def _decode(self, path: str, group: int) -> Any:
    columns = list(dict.fromkeys(f.path[0] for f in self._features.values()))
    with arrow_columns.errors(
      f"{path}, row group {group}: cannot read it"
    ) as pa:
      with pa.parquet.ParquetFile(
        path, memory_map=True, page_checksum_verification=True
      ) as file:
        self._check_schema(file.schema_arrow, path)
        table = file.read_row_group(group, columns=columns)
      return arrow_columns.feature_table(table, self._features)


def scan_row_groups(path: str) -> np.ndarray:
  """Returns the first row of N row groups, the number of rows, and the size."""
  with arrow_columns.errors(f"{path}: not a Parquet file") as pa:
    size = os.path.getsize(path)
    metadata = pa.parquet.read_metadata(path)
  groups = map(metadata.row_group, range(metadata.num_row_groups))
  counts = [group.num_rows for group in groups]
  return np.asarray([0, *np.cumsum(counts, dtype=np.int64), size], np.int64)


def _find(pattern: str) -> list[str]:
  # Folders on the hub contain the files of all splits.
  if os.path.isdir(files.local_path(pattern, "parquet: path")):
    raise ConfigError(
      f"parquet: path={os.fspath(pattern)!r} is a folder; expected a file or "
      "a pattern, such as 'folder/train-*.parquet'."
    )
  return files.find(pattern, "parquet: path")


def _schema(path: str) -> Any:
  with arrow_columns.errors(f"{path}: not a Parquet file") as pa:
    return pa.parquet.read_schema(path)


def _write_arrow(table: Any, path: str) -> None:
  with arrow_columns.errors(f"parquet: unpack_to: {path}", ConfigError) as pa:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with paths.replacing(path, "wb") as f:
      with pa.ipc.new_file(f, table.schema) as writer:
        writer.write_table(table)
