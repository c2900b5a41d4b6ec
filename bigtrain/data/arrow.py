"""Arrow files, such as data sets saved by Hugging Face's `datasets`.

  dict(type="arrow", path="my_set", split="train")
  dict(type="arrow", path="my_set/train/*.arrow", columns=("image", "label"))

Columns become features as with type="parquet". Files are mapped into memory, so
any row can be read directly.
"""

import glob
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.data.formats import arrow_columns, files

# The end of a stream of record batches.
_END = b"\xff\xff\xff\xff\0\0\0\0"


class Source(arrow_columns.Rows):
  """The rows of saved data sets, or of other Arrow files.

  Args:
    path: a folder written by `save_to_disk` or taken from the cache of
      `datasets`, a file, a pattern such as "*.arrow", or a list of these.
    split: split of a folder with several.
    columns: names of the columns to use; all by default.
    slice: slice of the rows, such as "[:99%]".
  """

  def __init__(
    self,
    path: str | Sequence[str],
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    slice: str = "",
  ):
    arrow_columns.import_pyarrow()
    self._paths = _find(path, split)
    schema = _read(self._paths[0]).schema
    self._open_tables("arrow", path, scan_rows, schema, columns, slice)
    self._handles = files.handles(self._load)

  @staticmethod
  def read_class_names(
    path: Any, *, split: str | None = None, **_: Any
  ) -> dict[str, list[str]]:
    return arrow_columns.class_names(_read(_find(path, split)[0]).schema)

  def _load(self, path: str) -> Any:
    table = _read(path)
    self._check_schema(table.schema, path)
    return arrow_columns.feature_table(table, self._features)

  def _table(self, file: int, part: int) -> Any:
    return self._handles.get(self._paths[file])


def scan_rows(path: str) -> np.ndarray:
  """Returns 0, the number of rows, and the size in bytes, as `Rows` expects."""
  return np.asarray([0, _read(path).num_rows, os.path.getsize(path)], np.int64)


def _read(path: str) -> Any:
  with arrow_columns.errors(f"{path}: not a readable Arrow file") as pa:
    source = pa.memory_map(path)
    if source.read(6) == b"ARROW1":
      return pa.ipc.open_file(source).read_all()
    source.seek(max(0, source.size() - len(_END)))
    is_whole = source.read() == _END
    source.seek(0)
    reader = pa.ipc.open_stream(source)
    if not is_whole:
      raise DataError(f"{path}: the stream has no end: the file is truncated.")
    return reader.read_all()


def _find(path: Any, split: str | None) -> list[str]:
  """Returns the files of a folder, file, pattern or list of these."""
  paths: list[str] = []
  for entry in files.as_list(path, "arrow: path"):
    folder = files.local_path(entry, "arrow: path")
    if os.path.isdir(folder):
      paths += _saved(folder, split)
    else:
      paths += files.find(entry, "arrow: path")
  return paths


def _saved(folder: str, split: str | None) -> list[str]:
  """Returns the files of a folder that `datasets` has written."""
  contents = {}
  for name in ("state.json", "dataset_dict.json", "dataset_info.json"):
    if os.path.isfile(file := os.path.join(folder, name)):
      with open(file, encoding="utf-8") as f:
        contents[name] = json.load(f)
  if state := contents.get("state.json"):
    if state.get("_indices_data_files"):
      raise ConfigError(
        f"arrow: {folder}: it selects or reorders rows of its files, which is "
        "not supported; save it again after `flatten_indices()`."
      )
    return [os.path.join(folder, x["filename"]) for x in state["_data_files"]]
  if not contents:
    raise ConfigError(
      f"arrow: path={folder!r}: neither saved by `save_to_disk` nor from the "
      "cache of `datasets`; expected such a folder, or a pattern of files."
    )
  splits = list(next(iter(contents.values())).get("splits") or ())
  if split is None and len(splits) == 1:
    (split,) = splits
  check_choice(f"arrow: {folder}: split", split, splits)
  if "dataset_dict.json" in contents:
    return _saved(os.path.join(folder, str(split)), None)
  within = os.path.join(glob.escape(folder), f"*-{split}")
  return sorted(
    glob.glob(f"{within}.arrow") + glob.glob(f"{within}-?????-of-?????.arrow")
  )
