"""The log entries in metrics.jsonl: appending, reading, recovery after a kill.

The file has one JSON object per log step: `{"step": 100, "loss": 0.7, ...}`.
Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".

A line is appended with a single write. Evaluation results are added to the last
line by overwriting its closing brace. So a kill can only cut off what was being
added, and a restart recovers the rest. Files in object stores cannot be
appended to, so the whole file is uploaded at every `sync`, and sometimes in
between for readers.
"""

import json
import math
import os
from typing import Any

from absl import logging

from bigtrain.files import disk, paths

FILE_NAME = "metrics.jsonl"

Entry = dict[str, Any]


class WriteError(Exception):
  """Log entries or their files could not be written."""


def read(workdir: str) -> list[Entry]:
  """Reads metrics.jsonl, skipping damaged lines and an incomplete last line."""
  path = os.path.join(workdir, FILE_NAME)
  try:
    lines, cut_line = _split(paths.read_bytes(path))
  except (FileNotFoundError, NotADirectoryError):
    return []
  entries = []
  for i, line in enumerate(lines):
    entry = _parse(line)
    if entry is None:
      logging.warning("%s: line %d is damaged and was skipped.", path, i + 1)
    else:
      entries.append(entry)
  if entry := _parse_cut(cut_line):
    entries.append(entry)
  return [{k: _number(v) for k, v in entry.items()} for entry in entries]


class EntryFile:
  """metrics.jsonl, open for writing.

  Entries of steps after `restored_step`, or all if it is None, are removed.
  """

  def __init__(self, path: str, restored_step: int | None):
    self.path = path
    self.last_alive: float | None = None  # Unix time of the last write before.
    self._last: Entry | None = None  # The entry of the last line.
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
    """Repairs the line that a kill cut off, and removes later entries."""
    with open(self._local, "rb") as file:
      content = file.read()
    lines, cut_line = _split(content)
    if cut_line:
      outcome = "removed it"
      if entry := _parse_cut(cut_line):
        lines.append(_line(entry)[:-1])
        outcome = f"kept its values for step {entry['step']}"
      logging.warning(
        f"{self.path}: the last line is incomplete (the process was killed); "
        f"{outcome}."
      )
    last_kept = -1 if restored_step is None else restored_step
    num_lines = len(lines)
    while lines:
      entry = _parse(lines[-1])
      # A damaged line at the end goes too.
      if entry is not None and entry["step"] <= last_kept:
        break
      lines.pop()
    self._last = _parse(lines[-1]) if lines else None
    if num_removed := num_lines - len(lines):
      which = f"after step {restored_step}"
      if restored_step is None:
        which = "of a run without a checkpoint"
      logging.info(
        f"{self.path}: removed {num_removed} log entries {which}; the run will "
        "write them again."
      )
    kept = b"".join(line + b"\n" for line in lines)
    if kept != content:
      _replace(self._local, kept)

  def add(self, entry: Entry) -> None:
    """Appends an entry, or adds its metrics to the line of its step."""
    last = self._last
    if last is None or entry["step"] > last["step"]:
      self._append(_line(entry), at=self._size)
      self._last = dict(entry)
    elif entry["step"] == last["step"] and set(entry) & set(last) == {"step"}:
      metrics = {k: v for k, v in entry.items() if k != "step"}
      if metrics:  # Overwrites the closing brace and the newline.
        self._append(b", " + _line(metrics)[1:], at=self._size - 2)
      last.update(entry)
    else:  # A late result, or a metric that the step already has.
      self._insert(entry)

  def _append(self, line: bytes, at: int) -> None:
    self._file.seek(at)
    self._size = at
    while line:  # A write may be partial.
      written = self._file.write(line)
      self._size += written
      line = line[written:]

  def _insert(self, entry: Entry) -> None:
    """Rewrites the file with an entry inserted in its place."""
    with open(self._local, "rb") as file:
      entries = [_parse(line) for line in file.read().splitlines()]
    by_step: dict[int, Entry] = {e["step"]: e for e in entries if e}
    by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
    steps = sorted(by_step)
    self._file.close()
    _replace(self._local, b"".join(_line(by_step[s]) for s in steps))
    self._open()
    self._last = by_step[steps[-1]]

  def sync(self) -> None:
    os.fsync(self._file.fileno())
    self._mirror.push()

  def publish(self) -> None:
    """Uploads the file for readers, if the last upload was long enough ago."""
    self._mirror.push(soon=True)

  def close(self) -> None:
    self._file.close()
    self._mirror.close()


def _replace(path: str, content: bytes) -> None:
  with paths.replacing(path, "wb") as file:
    file.write(content)
  disk.sync_folder(os.path.dirname(path) or ".")


def _line(entry: Entry) -> bytes:
  plain = dict(entry)
  for name, value in entry.items():
    if isinstance(value, float) and not math.isfinite(value):
      plain[name] = json.dumps(value)  # "NaN", "Infinity" or "-Infinity".
  return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _parse(line: bytes) -> Entry | None:
  try:
    entry = json.loads(line)
  except ValueError:
    return None
  if isinstance(entry, dict) and isinstance(entry.get("step"), int):
    return entry
  return None


def _split(content: bytes) -> tuple[list[bytes], bytes]:
  """Returns (the complete lines, the incomplete last line or b"")."""
  *lines, cut_line = content.split(b"\n")
  # A cut line keeps its old newline if the kill came during an addition.
  if not cut_line and lines and _parse(lines[-1]) is None:
    cut_line = lines.pop()
  return lines, cut_line


def _parse_cut(line: bytes) -> Entry | None:
  """The values of an incomplete line before a comma: 0.2 may be a cut 0.25."""
  if entry := _parse(line):
    return entry  # Only the newline is missing.
  end = line.rfind(b",")
  while end > 0:
    entry = _parse(line[:end] + b"}")
    if entry and len(entry) > 1:
      return entry
    end = line.rfind(b",", 0, end)
  return None


def _number(value: Any) -> Any:
  return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
