"""Damaged and malicious token files."""

import json
import pickle

import pytest
from support import token_corpora

from bigtrain.config.errors import DataError
from bigtrain.data import tokens
from bigtrain.data.formats import token_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def truncate(path, by=1):
  raw = path.read_bytes()
  path.write_bytes(raw[: len(raw) - by])


def test_damaged_files_are_errors(tmp_path):
  token_corpora.plain(tmp_path)
  truncate(tmp_path / "x.bin")
  with pytest.raises(DataError, match="not a whole number"):
    tokens.Source(4, str(tmp_path / "x.bin"))
  token_corpora.megatron(tmp_path)
  truncate(tmp_path / "x.bin", 2)
  with pytest.raises(DataError, match="truncated to"):
    tokens.Source(4, str(tmp_path / "x"))
  token_corpora.megatron(tmp_path)
  truncate(tmp_path / "x.idx", 9)
  with pytest.raises(DataError, match="truncated to"):
    tokens.Source(4, str(tmp_path / "x.bin"))
  (tmp_path / "x.idx").write_bytes(b"something else, long enough to be one..")
  with pytest.raises(DataError, match="not a Megatron index"):
    tokens.Source(4, str(tmp_path / "x.bin"))
  path = token_corpora.tokenized(tmp_path)
  truncate(tmp_path / "tokenized" / "00001.bin", 2)
  with pytest.raises(DataError, match="22 bytes; expected 12 uint16 ids"):
    tokens.Source(4, path)
  (tmp_path / "tokenized" / "00001.bin").unlink()
  with pytest.raises(DataError, match="listed in manifest.json, but missing"):
    tokens.Source(4, path)
  (tmp_path / "tokenized" / "manifest.json").unlink()
  with pytest.raises(DataError, match="no manifest.json"):
    tokens.Source(4, path)


class Evil:
  def __reduce__(self):
    return print, ("unpickled",)


def test_pickled_indices_cannot_run_code(tmp_path, capsys):
  path = token_corpora.pbin(tmp_path)
  raw = (tmp_path / "x.pbin").read_bytes()[: 12 + 2 * len(token_corpora.IDS)]
  for index in (Evil(), [Evil()], [(0, 1.5)], {"a": 1}):
    (tmp_path / "x.pbin").write_bytes(raw + pickle.dumps(index))
    with pytest.raises(DataError, match="index"):
      tokens.Source(4, path)
  assert "unpickled" not in capsys.readouterr().out


def test_shards_outside_of_the_folder_are_errors(tmp_path):
  path = token_corpora.tokenized(tmp_path)
  manifest = token_files.read_manifest(path)
  manifest["shards"][0]["name"] = "../x"
  (tmp_path / "tokenized" / "manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(DataError, match="outside of the folder"):
    tokens.Source(4, path)
