"""The rows of metrics.jsonl: appending, reading, and what a kill leaves.

The file has one line for each step that has something to say, in order of
steps, each a JSON object: `{"step": 100, "loss": 0.7, ...}`. Results of
evaluations of that step, which come later, are added to its line: there are
never two lines of one step. Numbers that JSON lacks are the strings "NaN",
"Infinity" and "-Infinity"; `read_rows` makes floats of them.

Lines are appended by one write each, so that a killed process leaves at most
the last one incomplete. Adding to the last line only appends too, but for its
closing brace: what is incomplete then is what was added, and a restart keeps
the line before it.

Object stores cannot append. There the file is kept beside, and the object gets
all of its content at every `sync`, and every now and then for readers.
"""

import json
import math
import os
from typing import Any

from absl import logging

from bigtrain.files import paths

FILE_NAME = "metrics.jsonl"

Row = dict[str, Any]


class WriteError(Exception):
  """metrics.jsonl could not be written."""


def read_rows(workdir: str) -> list[Row]:
  """The rows of a workdir's metrics.jsonl, also while a run is writing it.

  Returns:
    One dict a step, in order; empty if there is no file. A last line that is
    incomplete is left out; damaged ones elsewhere are, with a warning.
  """
  path = os.path.join(workdir, FILE_NAME)
  try:
    lines, torn = _split(paths.read_bytes(path))
  except (FileNotFoundError, NotADirectoryError):
    return []
  rows = []
  for i, line in enumerate(lines):
    row = _parse(line)
    if row is None:
      logging.warning("%s line %d is damaged; left out.", path, i + 1)
    else:
      rows.append(row)
  if row := _parse_torn(torn):
    rows.append(row)
  return [{k: _number(v) for k, v in row.items()} for row in rows]


class RowFile:
  """metrics.jsonl, open for writing.

  Attributes:
    last_alive: Unix seconds of the newest write before this; None if none, or
      if the storage does not tell.
  """

  def __init__(self, path: str, restored_step: int | None):
    """Opens the file, and removes the rows that will be made again.

    Args:
      path: of the file; its folder is made if missing.
      restored_step: rows up to it are kept; None keeps none.

    Raises:
      WriteError: the file cannot be written.
    """
    self.path = path
    self.last_alive: float | None = None
    self._last: Row | None = None  # The last line.
    try:
      paths.make_folder(os.path.dirname(path) or ".")
      self._mirror = paths.Mirror(path)
      self._local = self._mirror.local
      if os.path.exists(self._local) and os.path.getsize(self._local):
        if not paths.is_remote(path):
          self.last_alive = os.path.getmtime(path)
        self._recover(restored_step)
      self._open()
      self._mirror.push()
    except OSError as e:
      raise WriteError(f"cannot write {path}: {e.strerror or e}") from e

  def _open(self) -> None:
    # Unbuffered: what a failed write leaves behind must not come later.
    mode = "r+b" if os.path.exists(self._local) else "w+b"
    self._file = open(self._local, mode, buffering=0)
    self._size = self._file.seek(0, os.SEEK_END)
    _sync_folder(self._local)

  def _recover(self, restored_step: int | None) -> None:
    """Removes the rows after a step, and what a killed process left."""
    with open(self._local, "rb") as file:
      content = file.read()
    lines, torn = _split(content)
    if torn:
      row = _parse_torn(torn)
      logging.warning(
        "%s: the last line is incomplete (the process was killed); %s.",
        self.path,
        f"kept what it says of step {row['step']}" if row else "removed it",
      )
      if row:
        lines.append(_line(row)[:-1])
    keep_to, removed = -1 if restored_step is None else restored_step, 0
    while lines:
      self._last = _parse(lines[-1])
      if self._last and self._last["step"] <= keep_to:
        break
      lines.pop()
      removed += 1
      self._last = None
    if removed:
      logging.info(
        "%s: removed %d rows %s; they come again.",
        self.path,
        removed,
        "of a run that left no checkpoint"
        if restored_step is None
        else f"after step {restored_step}",
      )
    kept = b"".join(line + b"\n" for line in lines)
    if kept != content:
      _replace(self._local, kept)

  def add(self, row: Row) -> None:
    """Writes a row, or adds its names to those its step already has."""
    last = self._last
    if last is None or row["step"] > last["step"]:
      self._append(_line(row), at=self._size)
      self._last = dict(row)
    elif row["step"] == last["step"] and set(row) & set(last) == {"step"}:
      more = _line({k: v for k, v in row.items() if k != "step"})
      if len(row) > 1:  # Over the closing brace and the newline.
        self._append(b", " + more[1:], at=self._size - 2)
      last.update(row)
    else:  # A result that comes late, or once more.
      self._insert(row)

  def _append(self, line: bytes, at: int) -> None:
    self._file.seek(at)
    self._size = at
    while line:
      written = self._file.write(line)
      self._size += written
      line = line[written:]

  def _insert(self, row: Row) -> None:
    with open(self._local, "rb") as file:
      rows = [_parse(line) for line in file.read().splitlines()]
    by_step: dict[int, Row] = {r["step"]: r for r in rows if r}
    by_step[row["step"]] = by_step.get(row["step"], {}) | row
    steps = sorted(by_step)
    self._file.close()
    _replace(self._local, b"".join(_line(by_step[s]) for s in steps))
    self._open()
    self._last = by_step[steps[-1]]

  def sync(self) -> None:
    """Returns when everything is on disk."""
    os.fsync(self._file.fileno())
    self._mirror.push()

  def publish(self) -> None:
    """Lets readers see the rows so far, sooner or later."""
    self._mirror.push(soon=True)

  def close(self) -> None:
    """Closes the file."""
    self._file.close()
    self._mirror.close()


def _replace(path: str, content: bytes) -> None:
  """Gives a file another content, or leaves it as it is."""
  fresh = path + ".new"
  with open(fresh, "wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
  os.replace(fresh, path)
  _sync_folder(path)


def _sync_folder(path: str) -> None:
  """Makes the file's name as durable as its content."""
  folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def _line(row: Row) -> bytes:
  plain = {
    name: _name_of(value)
    if isinstance(value, float) and not math.isfinite(value)
    else value
    for name, value in row.items()
  }
  return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _name_of(value: float) -> str:
  if math.isnan(value):
    return "NaN"
  return "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> Row | None:
  """The row of a line; None if it is none."""
  try:
    row = json.loads(line)
  except ValueError:
    return None
  if isinstance(row, dict) and isinstance(row.get("step"), int):
    return row
  return None


def _split(content: bytes) -> tuple[list[bytes], bytes]:
  """The complete lines, and the last one if it is not complete."""
  *lines, torn = content.split(b"\n")
  # The newline after a line that was being added to may still be there.
  if not torn and lines and _parse(lines[-1]) is None:
    torn = lines.pop()
  return lines, torn


def _parse_torn(line: bytes) -> Row | None:
  """What an incomplete line says for sure; None if that is nothing.

  A value is complete where a comma follows; `0.2` could be the beginning of
  `0.25`.
  """
  if row := _parse(line):
    return row  # Only its newline is missing.
  end = len(line)
  while (end := line.rfind(b",", 0, end)) > 0:
    row = _parse(line[:end] + b"}")
    if row and len(row) > 1:
      return row
  return None


def _number(value: Any) -> Any:
  return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
