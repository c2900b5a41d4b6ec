"""The rows of metrics.jsonl: appending, reading, and recovery after a kill.

The file has one JSON object per log step: `{"step": 100, "loss": 0.7, ...}`.
Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".

A line is appended with one write, and evaluation results are added to the last
line by overwriting its closing brace: a kill can only cut what was being added,
and a restart recovers the rest. Object stores cannot append: the file is then
uploaded as a whole at every `sync`, and from time to time for readers.
"""

import json
import math
import os
from typing import Any

from absl import logging

from bigtrain.files import disk, paths

FILE_NAME = "metrics.jsonl"

Row = dict[str, Any]


class WriteError(Exception):
  """A write of rows or their files failed."""


def read_rows(workdir: str) -> list[Row]:
  """Reads metrics.jsonl, without an incomplete last line and damaged lines."""
  path = os.path.join(workdir, FILE_NAME)
  try:
    lines, cut_line = _split(paths.read_bytes(path))
  except (FileNotFoundError, NotADirectoryError):
    return []
  rows = []
  for i, line in enumerate(lines):
    row = _parse(line)
    if row is None:
      logging.warning("%s: line %d is damaged and was skipped.", path, i + 1)
    else:
      rows.append(row)
  if row := _parse_cut(cut_line):
    rows.append(row)
  return [{k: _number(v) for k, v in row.items()} for row in rows]


class RowFile:
  """metrics.jsonl, open for writing."""

  def __init__(self, path: str, restored_step: int | None):
    self.path = path
    self.last_alive: float | None = None
    self._last: Row | None = None  # Of the last line.
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
      reason = f"{e.strerror or e}{disk.room(e, path)}"
      raise WriteError(f"cannot write {path}: {reason}") from e

  def _open(self) -> None:
    # Unbuffered: the rest of a failed write must not be written later.
    mode = "r+b" if os.path.exists(self._local) else "w+b"
    self._file = open(self._local, mode, buffering=0)
    self._size = self._file.seek(0, os.SEEK_END)
    disk.sync_folder(os.path.dirname(self._local) or ".")

  def _recover(self, restored_step: int | None) -> None:
    """Removes rows after a step and repairs the line that a kill cut."""
    with open(self._local, "rb") as file:
      content = file.read()
    lines, cut_line = _split(content)
    if cut_line:
      outcome = "removed it"
      if row := _parse_cut(cut_line):
        lines.append(_line(row)[:-1])
        outcome = f"kept its values for step {row['step']}"
      logging.warning(
        f"{self.path}: the last line is incomplete (the process was killed); "
        f"{outcome}."
      )
    keep_to = -1 if restored_step is None else restored_step
    num_lines = len(lines)
    while lines and (_parse(lines[-1]) or {"step": math.inf})["step"] > keep_to:
      lines.pop()
    self._last = _parse(lines[-1]) if lines else None
    if removed := num_lines - len(lines):
      which = f"after step {restored_step}"
      if restored_step is None:
        which = "of a run without a checkpoint"
      logging.info(
        f"{self.path}: removed {removed} rows {which}; the run will write them "
        "again."
      )
    kept = b"".join(line + b"\n" for line in lines)
    if kept != content:
      _replace(self._local, kept)

  def add(self, row: Row) -> None:
    """Writes a row, or adds its metrics to the line of its step."""
    last = self._last
    if last is None or row["step"] > last["step"]:
      self._append(_line(row), at=self._size)
      self._last = dict(row)
    elif row["step"] == last["step"] and set(row) & set(last) == {"step"}:
      metrics = _line({k: v for k, v in row.items() if k != "step"})
      if len(row) > 1:  # Overwrites the closing brace and the newline.
        self._append(b", " + metrics[1:], at=self._size - 2)
      last.update(row)
    else:  # A late result, or a metric that the step already has.
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
    os.fsync(self._file.fileno())
    self._mirror.push()

  def publish(self) -> None:
    self._mirror.push(soon=True)

  def close(self) -> None:
    self._file.close()
    self._mirror.close()


def _replace(path: str, content: bytes) -> None:
  with paths.replacing(path, "wb") as file:
    file.write(content)
  disk.sync_folder(os.path.dirname(path) or ".")


def _line(row: Row) -> bytes:
  # json writes these values as the names NaN, Infinity and -Infinity.
  plain = {
    name: json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value)
    else value
    for name, value in row.items()
  }
  return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _parse(line: bytes) -> Row | None:
  try:
    row = json.loads(line)
  except ValueError:
    return None
  if isinstance(row, dict) and isinstance(row.get("step"), int):
    return row
  return None


def _split(content: bytes) -> tuple[list[bytes], bytes]:
  *lines, cut_line = content.split(b"\n")
  # A cut line keeps its old newline if the kill came during an addition.
  if not cut_line and lines and _parse(lines[-1]) is None:
    cut_line = lines.pop()
  return lines, cut_line


def _parse_cut(line: bytes) -> Row | None:
  """The values of an incomplete line before a comma: 0.2 may be a cut 0.25."""
  if row := _parse(line):
    return row  # Only the newline is missing.
  end = len(line)
  while (end := line.rfind(b",", 0, end)) > 0:
    row = _parse(line[:end] + b"}")
    if row and len(row) > 1:
      return row
  return None


def _number(value: Any) -> Any:
  return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
