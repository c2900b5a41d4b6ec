"""Folders of token files merged, filtered and shuffled."""

import json

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import tokens
from bigtrain.data.formats import token_files
from bigtrain.text import tokenizers
from bigtrain.tools import merge_tokens, tokenize

BYTES = tokenizers.get("bytes")
NEWS = ["the first", "zwöi", "4", "the first"]
BOOKS = ["a third one\nof two lines", "zwöi", "the last"]


def is_short(ids):
  return len(ids) < 12


@pytest.fixture
def folders(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  for name, texts in (("news", NEWS), ("books", BOOKS)):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / f"{name}.jsonl").write_text(lines)
    source = [str(tmp_path / f"{name}.jsonl")]
    tokenize.tokenize(source, str(tmp_path / name), "bytes")
  return [str(tmp_path / "news"), str(tmp_path / "books")]


def texts(folder):
  """Texts in the order of the files; the manifest agrees with them."""
  shards, manifest = token_files.open_shards(str(folder), None)
  rows = [
    row for shard in shards for row in np.split(shard.map(), shard.ends()[:-1])
  ]
  assert all(row[-1] == BYTES.eos_id for row in rows)
  result = [BYTES.decode(row) for row in rows]
  assert manifest["num_documents"] == len(rows)
  assert manifest["num_tokens"] == sum(map(len, rows))
  assert manifest["num_bytes"] == sum(len(t.encode()) for t in result)
  return result


def test_documents_keep_their_order(folders, tmp_path):
  out = tmp_path / "out"
  command = [*folders, f"--output={out}", "--shard_tokens=15"]
  assert merge_tokens.main(command) == 0
  assert texts(out) == NEWS + BOOKS
  manifest = json.loads((out / "manifest.json").read_text())
  sizes = [shard["num_tokens"] for shard in manifest["shards"]]
  assert len(sizes) > 2 and min(sizes[:-1]) >= 10
  source = tokens.Source(path=str(out), length=8)
  assert len(source) == sum(-(-size // 8) for size in sizes)


def test_filters(folders, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "own_filters.py").write_text(
    "def is_short(ids):\n  return len(ids) < 12\n"
  )
  cases = {
    "unique": ["the first", "zwöi", "4", BOOKS[0], "the last"],
    "min_tokens=7": ["the first", "the first", BOOKS[0], "the last"],
    "max_tokens=6": ["zwöi", "4", "zwöi"],
    "keep=own_filters.is_short": [*NEWS, "zwöi", "the last"],
  }
  for option, want in cases.items():
    out = tmp_path / option
    assert merge_tokens.main([*folders, f"--output={out}", f"--{option}"]) == 0
    assert texts(out) == want, option
  # A result is an input, too.
  again = [str(tmp_path / "unique"), str(tmp_path / "max_tokens=6")]
  merge_tokens.merge(again, str(tmp_path / "again"), unique=True)
  assert texts(tmp_path / "again") == cases["unique"]


def test_the_seed_alone_gives_the_order(folders, tmp_path):
  orders = []
  for name, seed in (("a", 0), ("b", 0), ("c", 1)):
    merge_tokens.merge(folders, str(tmp_path / name), shuffle=seed)
    orders.append(texts(tmp_path / name))
    assert sorted(orders[-1]) == sorted(NEWS + BOOKS)
  assert orders[0] == orders[1] and orders[0] not in (orders[2], NEWS + BOOKS)


def test_folders_that_do_not_fit(folders, tmp_path):
  out = str(tmp_path / "out")
  with pytest.raises(DataError, match="no document is left"):
    merge_tokens.merge(folders, out, min_tokens=100)
  source = [str(tmp_path / "news.jsonl")]
  tokenize.tokenize(source, str(tmp_path / "other"), "bytes", eos=False)
  with pytest.raises(ConfigError, match="other: has eos_id None, and .* has 2"):
    merge_tokens.merge([*folders, str(tmp_path / "other")], out)
  with pytest.raises(ConfigError, match="news: expected a new or empty folder"):
    merge_tokens.merge(folders, folders[0])
  with pytest.raises(ConfigError, match="has no 'is_shorter'. Did you mean"):
    merge_tokens.merge(folders, out, keep=f"{__name__}.is_shorter")
  with pytest.raises(DataError, match="no manifest.json"):
    merge_tokens.merge([str(tmp_path)], out)
