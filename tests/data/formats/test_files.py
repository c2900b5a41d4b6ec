"""The cache of line offsets, and the cache of open files."""

import gc
import io
import json
import sys

import numpy as np
import pytest

from bigtrain.data import jsonl
from bigtrain.data.formats import files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path, rows):
  path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
  return str(path)


def test_the_index_is_cached_until_the_file_changes(tmp_path, monkeypatch):
  path = write(tmp_path / "x.jsonl", [{"i": 1}])
  assert len(jsonl.Source(path)) == 1
  cached = list((tmp_path / "cache" / "bigtrain" / "offsets").iterdir())
  assert len(cached) == 1

  def scan(path):
    raise AssertionError("scanned again")

  scan.__name__ = jsonl.scan_lines.__name__
  with monkeypatch.context() as patched:
    patched.setattr(jsonl, "scan_lines", scan)
    assert len(jsonl.Source(path)) == 1
  write(tmp_path / "x.jsonl", [{"i": 1}, {"i": 2}])
  assert len(jsonl.Source(path)) == 2
  for file in (tmp_path / "cache" / "bigtrain" / "offsets").iterdir():
    file.write_bytes(file.read_bytes()[:50])
  assert len(jsonl.Source(path)) == 2


def test_an_unwritable_cache_folder_is_a_warning(tmp_path, monkeypatch, caplog):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
  path = write(tmp_path / "x.jsonl", [{"i": 1}])
  assert len(jsonl.Source(path)) == 1
  assert "Cannot cache the index" in caplog.text


def test_handles_close_the_least_recently_used_file(tmp_path):
  opened = []

  def open_file(path):
    opened.append(path)
    return path

  handles = files.Cache(lambda path: (open_file(path), 1), 2)
  for path in "aabacab":
    assert handles.get(path) == path
  # Opening c evicts b, so b is opened again.
  assert "".join(opened) == "abcb"


def test_threads_load_arrays_while_garbage_is_collected():
  saved = io.BytesIO()
  np.save(saved, np.arange(3))
  thresholds, interval = gc.get_threshold(), sys.getswitchinterval()

  def load(number):
    for _ in range(50):
      array = files.load_array(io.BytesIO(saved.getvalue()))
      np.testing.assert_array_equal(array, np.arange(3))

  try:
    # Threads switch as often as possible, also in the collector's callbacks.
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    files.in_threads(load, range(32))
  finally:
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)
