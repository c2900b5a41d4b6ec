"""Stores the token ids of rows of any length, and which ids have a loss.

The ids are made once, in a pass over all rows, and stored in the user's cache
folder, under a hash of the files' paths, sizes and modification times and of
the options that the ids depend on. There are two files: STEM.ids has the ids of
all rows one after the other, and STEM.npz the start and weight of each row and
the counts of the pass. If rows have pictures, a third file, STEM.pictures, has
their paths or their bytes.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data.formats import files
from bigtrain.files import paths


class Row(NamedTuple):
  """The ids of a row."""

  ids: np.ndarray  # int32 [n].
  prompt: int  # Number of ids before the first with a loss.
  trained: np.ndarray  # bool [n], whether an id has a loss.
  weight: float = 1.0  # Of the loss.
  label: int = -1  # 1 if an answer is wanted, 0 if not, -1 if nobody says so.
  # Its pictures, each as `Rows.pictures` returns it.
  pictures: Sequence[bytes] = ()


# Files and refused rows that messages name.
_NUM_NAMED = 3


class Rows:
  """The ids of all rows, memory-mapped.

  Attributes:
    weight: weights of the rows' losses, float32 [rows].
    label: whether answers are wanted, int8 [rows], see `Row`.
    counts: the counts of the pass, with "num_refused", the number of rows that
      were left out, and "refused", messages about them.
    digest: hash of the files' names and sizes, and of the options.
  """

  def __init__(self, stem: str, inputs: Sequence[str], digest: str):
    with np.load(stem + ".npz", allow_pickle=False) as arrays:
      self._starts, self._prompt = arrays["starts"], arrays["prompt"]
      self.weight, self._ends = arrays["weight"], arrays["ends"]
      self.label, self._number = arrays["label"], arrays["number"]
      self.counts: dict[str, Any] = json.loads(str(arrays["counts"]))
      # Number of pictures before each row, and where each picture starts.
      self._pictures = arrays["pictures"]
      self._picture_starts = arrays["picture_starts"]
    # An id is stored as 2 id + (1 if it has a loss).
    shape = (int(self._starts[-1]),)
    self._codes = np.asarray(np.memmap(stem + ".ids", "<u4", "r", 0, shape))
    self._inputs, self.digest = inputs, digest
    self._encoded: Any = b""
    if len(self._picture_starts) > 1:
      self._encoded = np.memmap(stem + ".pictures", np.uint8, "r")

  def __len__(self) -> int:
    return len(self._prompt)

  def spans(self, rows: np.ndarray, pairs: bool) -> np.ndarray:
    """Returns (start, stop) of the ids of rows, int64 [rows, 1, 2].

    With `pairs`, there is a span for the prompt and one for the answer, [rows,
    2, 2].
    """
    start, stop = self._starts[rows], self._starts[rows + 1]
    if not pairs:
      return np.stack([start, stop], axis=1)[:, None]
    middle = start + self._prompt[rows]
    return np.stack([start, middle, middle, stop], axis=1).reshape(-1, 2, 2)

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids, int32 [n], and whether they have a loss, bool [n]."""
    codes = self._codes[start:stop]
    return (codes >> 1).astype(np.int32), (codes & 1).astype(bool)

  def num_pictures(self, rows: np.ndarray) -> np.ndarray:
    return self._pictures[rows + 1] - self._pictures[rows]

  def pictures(self, row: int) -> list[bytes]:
    """Returns the pictures of a row, as they were given in `Row`."""
    numbers = range(self._pictures[row], self._pictures[row + 1])
    starts = self._picture_starts
    return [bytes(self._encoded[starts[i] : starts[i + 1]]) for i in numbers]

  def first_of_each(self, rows: np.ndarray) -> np.ndarray:
    """Indices in `rows` at which an entry of a file begins."""
    file = np.searchsorted(self._ends, rows, side="right")
    number = self._number[rows]
    is_new = (np.diff(file) != 0) | (np.diff(number) != 0)
    return np.flatnonzero(np.append(len(rows) > 0, is_new))

  def entry(self, row: int) -> tuple[str, int]:
    """The input that a row comes from, and the row's number in this input."""
    file = int(np.searchsorted(self._ends, row, side="right"))
    return self._inputs[file], int(self._number[row])

  def where(self, row: int) -> str:
    file = int(np.searchsorted(self._ends, row, side="right"))
    return f"{self._inputs[file]}, row {self._number[row]} (from 0)"


def cached(
  encode: Callable[[Any, Any], Sequence[Row]],
  key: str,
  inputs: Sequence[str],
  rows_of: Callable[[str], Iterator[tuple[Any, Any]]],
  count: Callable[[], dict[str, Any]] = dict,
  skip_errors: int = 0,
) -> Rows:
  """Returns the ids of rows, made now or for an earlier run.

  Args:
    encode: encode(row, its place) makes the ids of a row. It may return several
      rows, such as those of two answers, or raise DataError.
    key: hash of everything that `encode` depends on.
    inputs: files, or names of other inputs.
    rows_of: rows_of(input) yields (place, row).
    count: returns the counts of `encode`, as JSON.
    skip_errors: number of rows that may be left out because of a DataError.
  """
  sizes: list[tuple[str, int | str | None]] = []
  times: list[tuple[str, int | None]] = []
  for name in inputs:
    if paths.is_remote(name):
      # Reading its size would take all of an object.
      sizes.append((os.path.basename(name), files.stamp(name)))
      continue
    stat = os.stat(name) if os.path.isfile(name) else None
    sizes.append((os.path.basename(name), stat and stat.st_size))
    times.append((os.path.realpath(name), stat and stat.st_mtime_ns))
  digest = files.digest(*sizes, key)
  folder = os.path.join(os.path.dirname(files.cache_folder()), "rows")
  # Python's version, because its own documentation may be the data.
  stem = os.path.join(folder, files.digest(sys.version, *times, *sizes, key))
  # A missing or damaged cache entry only costs another pass.
  with contextlib.suppress(OSError, ValueError, EOFError, KeyError):
    rows = Rows(stem, inputs, digest)
    if rows.counts["num_refused"] <= skip_errors:
      return rows
  try:
    os.makedirs(folder, exist_ok=True)
    _write(stem, encode, inputs, rows_of, count, skip_errors)
  except OSError as e:
    raise ConfigError(f"{folder}: cannot be written: {e}.") from e
  return Rows(stem, inputs, digest)


def _names(inputs: Sequence[str]) -> str:
  named = ", ".join(inputs[:_NUM_NAMED])
  more = len(inputs) - _NUM_NAMED
  return named + (f" and {more} more" if more > 0 else "")


def _write(
  stem: str,
  encode: Callable[[Any, Any], Sequence[Row]],
  inputs: Sequence[str],
  rows_of: Callable[[str], Iterator[tuple[Any, Any]]],
  count: Callable[[], dict[str, Any]],
  skip_errors: int,
) -> None:
  logging.info("Reading the rows of %s.", _names(inputs))
  starts, ends = [0], []
  pictures, picture_starts = [0], [0]
  rows: list[Row] = []  # Without their ids and pictures.
  numbers: list[int] = []  # Of each row in its file.
  refused: list[str] = []
  num_trained = 0
  nothing = np.zeros(0, np.int32)
  with contextlib.ExitStack() as stack:
    ids_file = stack.enter_context(paths.replacing(stem + ".ids", "wb"))
    pictures_file = stack.enter_context(
      paths.replacing(stem + ".pictures", "wb")
    )
    for name in inputs:
      for number, (where, content) in enumerate(rows_of(name)):
        try:
          encoded = encode(content, where)
        except DataError as e:
          refused.append(str(e))
          if len(refused) <= skip_errors:
            continue
          if skip_errors:
            more = f"more than skip_errors={skip_errors} rows are refused"
            raise DataError(f"{e} With this one, {more}.") from e
          raise
        for row in encoded:
          ids_file.write((2 * row.ids + row.trained).astype("<u4").tobytes())
          starts.append(starts[-1] + len(row.ids))
          for picture in row.pictures:
            pictures_file.write(picture)
            picture_starts.append(picture_starts[-1] + len(picture))
          pictures.append(pictures[-1] + len(row.pictures))
          num_trained += int(row.trained.sum())
          rows.append(row._replace(ids=nothing, trained=nothing, pictures=()))
          numbers.append(number)
      ends.append(len(rows))
  if not rows:
    raise DataError(f"{_names(inputs)}: no rows.")
  logging.info(
    f"{len(rows)} rows with {starts[-1]} tokens, of which {num_trained} "
    "have a loss."
  )
  counts = count() | {
    "num_refused": len(refused),
    "refused": refused[:_NUM_NAMED],
  }
  with paths.replacing(stem + ".npz", "wb") as f:
    np.savez(
      f,
      starts=np.asarray(starts, np.int64),
      prompt=np.asarray([row.prompt for row in rows], np.int64),
      weight=np.asarray([row.weight for row in rows], np.float32),
      label=np.asarray([row.label for row in rows], np.int8),
      number=np.asarray(numbers, np.int64),
      ends=np.asarray(ends, np.int64),
      counts=np.asarray(json.dumps(counts)),
      pictures=np.asarray(pictures, np.int64),
      picture_starts=np.asarray(picture_starts, np.int64),
    )
