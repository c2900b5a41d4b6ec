"""Parquet files, such as the image and text data sets on Hugging Face's hub.

  dict(type="parquet", path="my_set/data/train-*.parquet",
       columns=("image", "caption"))

A column of numbers, strings, bytes or lists of these is a feature. An image
column, a struct of `bytes` and `path`, becomes the image's encoded bytes; the
fields of any other struct become features such as "captions/text".

Row groups are decoded as a whole. A data set larger than `cache_bytes`, in
random order, should set `unpack_to`, whose files give access to single rows.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.data.formats import arrow_columns, files, splits
from bigtrain.files import paths
from bigtrain.settings import ConfigError, DataError, check_number


class Source:
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
    if isinstance(columns, str):
      raise ConfigError(
        f"parquet: columns={columns!r}: expected a list of column names."
      )
    check_number("parquet: cache_bytes", cache_bytes, least=0, whole=True)
    entries = files.as_list(path, "parquet: path")
    self._paths = [file for entry in entries for file in _find(entry)]
    row_groups = files.offsets(self._paths, scan_row_groups)
    self._sizes = [int(starts[-1]) for starts in row_groups]
    counts = [np.diff(starts[:-1]) for starts in row_groups]
    self._groups = [(i, j) for i, n in enumerate(counts) for j in range(len(n))]
    self._shards = files.Shards(np.concatenate(counts).tolist())
    if not len(self._shards):
      raise DataError(f"parquet: {path}: contains no rows.")
    self._start, stop = splits.bounds(
      slice, len(self._shards), "parquet: slice"
    )
    self._length = stop - self._start
    self._schema = _schema(self._paths[0])
    self._features = arrow_columns.find_features(
      self._schema, columns, self._paths[0]
    )
    self.spec = {n: (f.kind, f.shape) for n, f in self._features.items()}
    self.class_names = arrow_columns.class_names(self._schema)
    self._tables = files.Cache(self._load, cache_bytes, self._warn_of_reloads)
    if unpack_to is not None:
      unpack_to = files.local_path(unpack_to, "parquet: unpack_to")
    self._unpack_to = unpack_to
    self._cache_bytes, self._warned = cache_bytes, False

  @staticmethod
  def read_class_names(path: Any, **_: Any) -> dict[str, list[str]]:
    first = files.as_list(path, "parquet: path")[0]
    return arrow_columns.class_names(_schema(_find(first)[0]))

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    batch = {}
    for name, (kind, shape) in self.spec.items():
      sizes: Any = () if None in shape else shape
      dtype: Any = object if None in shape or kind is bytes else kind
      batch[name] = np.empty((len(indices), *sizes), dtype)
    # Rows of a row group are read together, so that a batch in random order
    # holds only one table at a time.
    for i in np.argsort(indices):
      index = int(indices[i])
      file, group, row = self._position(index)
      table = self._tables.get((file, group))
      for name in batch:
        batch[name][i] = self._value(name, table, row, index)
    return batch

  def where(self, index: int) -> str:
    file, group, row = self._position(index)
    return f"{self._paths[file]}, row group {group}, row {row}"

  def fingerprint(self) -> str:
    names = [os.path.basename(path) for path in self._paths]
    options = self._start, self._length, sorted(self.spec)
    return files.digest("parquet", *names, *self._sizes, *options)

  def _position(self, index: int) -> tuple[int, int, int]:
    (i,), (row,) = self._shards.locate(np.asarray([index + self._start]))
    return *self._groups[i], int(row)

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
        self._check_schema(file.schema_arrow, columns, path)
        table = file.read_row_group(group, columns=columns)
      arrays = {
        name: arrow_columns.feature_array(table, feature)
        for name, feature in self._features.items()
      }
      return pa.table(arrays)

  def _check_schema(self, schema: Any, columns: list[str], path: str) -> None:
    for name in columns:
      kind = schema.field(name).type if name in schema.names else "missing"
      expected = self._schema.field(name).type
      if kind != expected:
        wanted = f"expected {expected}, as in {self._paths[0]}"
        raise DataError(f"{path}: column {name!r} is {kind}; {wanted}.")

  def _value(self, name: str, table: Any, row: int, index: int) -> Any:
    feature = self._features[name]
    value = table.column(name)[row].as_py()
    if feature.image and value is not None:
      value = self._image(value, index)
    holes = isinstance(value, list) and None in value
    if value is None or holes:
      null = "null in part" if holes else "null"
      raise DataError(f"{self.where(index)}: column {name!r} is {null}.")
    if not feature.shape:
      return value if feature.kind is bytes else feature.kind.type(value)
    if feature.kind is not bytes:
      return np.asarray(value, feature.kind)
    return files.objects(value)

  def _image(self, value: dict[str, Any], index: int) -> bytes | None:
    if value["bytes"] is not None or value["path"] is None:
      return value["bytes"]
    folder = os.path.dirname(self._paths[self._position(index)[0]])
    path = os.path.join(folder, os.fsdecode(value["path"]))
    try:
      with open(path, "rb", buffering=0) as f:
        return f.read()
    except (OSError, ValueError) as e:
      where = self.where(index)
      raise DataError(f"{where}: cannot read the image {path}: {e}.") from e


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
