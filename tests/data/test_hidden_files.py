"""Files that systems and editors leave beside the user's are no examples."""

import json
import logging

import numpy as np
import pytest
from support import tar_shards

from bigtrain.config.errors import ConfigError
from bigtrain.data import (
  image_folder,
  jsonl,
  supervised,
  text,
  tokens,
  webdataset,
)
from bigtrain.data.formats import files
from bigtrain.tools import tokenize


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def pictures(tmp_path):
  """Two classes of three pictures, in a folder that is itself hidden."""
  top = tmp_path / ".pictures"
  for label in ("cat", "dog"):
    (top / label).mkdir(parents=True)
    for i in range(3):
      (top / label / f"{i}.png").write_bytes(f"{label} {i}".encode())
  return top


def count_logged(caplog):
  """Number of hidden names in the log."""
  (record,) = [r for r in caplog.records if "hidden" in r.getMessage()]
  return record.args[1]


def test_a_notebooks_folder_of_checkpoints_is_no_class(pictures, caplog):
  (pictures / ".ipynb_checkpoints").mkdir()
  (pictures / ".ipynb_checkpoints" / "0-checkpoint.png").write_bytes(b"copy")
  with caplog.at_level(logging.INFO):
    source = image_folder.Source(str(pictures))
  assert source.classes == ["cat", "dog"]
  assert len(source) == 6
  assert count_logged(caplog) == 1
  names = image_folder.Source.read_class_names(str(pictures))
  assert names == {"label": ["cat", "dog"]}


def test_hidden_pictures_are_no_examples(pictures, caplog):
  (pictures / "cat" / "._0.png").write_bytes(b"Mac OS X")
  for _ in range(2):  # A folder counts once.
    (pictures / "dog" / ".trash").mkdir(exist_ok=True)
  (pictures / "dog" / ".trash" / "0.png").write_bytes(b"deleted")
  (pictures / "dog" / ".trash" / "1.png").write_bytes(b"deleted")
  with caplog.at_level(logging.INFO):
    source = image_folder.Source(str(pictures))
  assert len(source) == 6
  assert source.read(np.arange(6))["image"].tolist() == [
    *(f"cat {i}".encode() for i in range(3)),
    *(f"dog {i}".encode() for i in range(3)),
  ]
  assert count_logged(caplog) == 2


def test_a_file_of_classes_may_name_a_hidden_folder(pictures, tmp_path):
  (pictures / ".none").mkdir()
  (pictures / ".none" / "0.png").write_bytes(b"nothing")
  classes = tmp_path / "classes.txt"
  classes.write_text("cat\ndog\n")
  assert len(image_folder.Source(str(pictures), classes=str(classes))) == 6
  classes.write_text("cat\ndog\n.none\n")
  source = image_folder.Source(str(pictures), classes=str(classes))
  assert source.read(np.asarray([6]))["label"].tolist() == [2]


ROW = json.dumps({"text": "ab", "label": 1}).encode() + b"\n"
SOURCES = {
  "jsonl": (jsonl.Source, ROW, {}),
  "supervised": (
    supervised.Source,
    ROW,
    {"tokenizer": "bytes", "length": 8},
  ),
  "text": (text.Source, b"ab", {"length": 4}),
  "tokens": (tokens.Source, np.arange(4, dtype="<u2").tobytes(), {"length": 4}),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("pattern", ["*", "**/*", "{x,y}*", "[a-zD.T]*"])
def test_patterns_do_not_match_hidden_files(kind, pattern, tmp_path, caplog):
  make, content, options = SOURCES[kind]
  folder = tmp_path / "data"
  (folder / ".git").mkdir(parents=True)
  for name in ("x.jsonl", "y.jsonl", ".x.jsonl", "._y.jsonl", ".git/x.jsonl"):
    (folder / name).write_bytes(content)
  for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
    (folder / name).write_bytes(content)
  with caplog.at_level(logging.INFO):
    assert len(make(path=f"{folder}/{pattern}", **options)) == 2
  if pattern != "{x,y}*":
    expected = {"*": 5, "**/*": 6, "[a-zD.T]*": 5}
    assert count_logged(caplog) == expected[pattern]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
  "path", [".x.jsonl", "{.x,.y}.jsonl", ".[xy].jsonl", ".more/*", "Thumbs.db"]
)
def test_a_path_may_name_a_hidden_file(kind, path, tmp_path):
  make, content, options = SOURCES[kind]
  if kind == "supervised" and path == "Thumbs.db":
    pytest.skip("The suffix says the format.")
  (tmp_path / ".more").mkdir()
  for name in (".x.jsonl", ".y.jsonl", ".more/z.jsonl", "Thumbs.db"):
    (tmp_path / name).write_bytes(content)
  expected = 1 if path in (".x.jsonl", ".more/*", "Thumbs.db") else 2
  assert len(make(path=f"{tmp_path}/{path}", **options)) == expected


def test_a_pattern_of_hidden_files_alone_matches_nothing(tmp_path):
  (tmp_path / "._x.jsonl").write_bytes(ROW)
  with pytest.raises(ConfigError, match="no such file"):
    jsonl.Source(f"{tmp_path}/*.jsonl")


def test_hidden_members_of_tar_files_are_no_samples(tmp_path, caplog):
  members = []
  for i in range(3):
    for name, data in tar_shards.sample(i):
      members += [(f"./{name}", data), (f"./._{name}", b"Mac OS X")]
  members += [
    (f".ipynb_checkpoints/{name}", data) for name, data in tar_shards.sample(0)
  ]
  members += [("photos/Thumbs.db", b"pictures")]
  path = tar_shards.write(tmp_path / "x.tar", members)
  for _ in range(2):  # The second time, from the cached index.
    caplog.clear()
    with caplog.at_level(logging.INFO):
      source = webdataset.Source(path)
    assert len(source) == 3
    assert source.read(np.arange(3))["label"].tolist() == [0, 1, 2]
    assert count_logged(caplog) == 12 + 1 + 1


def test_hidden_objects_of_a_store_are_left_out(monkeypatch):
  names = {
    "gs://bucket": ["a/x.tar", "a/._x.tar", "a/.x.tar", ".a/x.tar"],
    "gs://bucket/a": ["x.tar", "._x.tar", ".x.tar"],
  }
  monkeypatch.setattr(files.stores, "below", names.get)
  found = files.find("gs://bucket/*/*.tar", "path", remote=True)
  assert found == ["gs://bucket/a/x.tar"]
  found = files.find("gs://bucket/a/.*.tar", "path", remote=True)
  assert found == ["gs://bucket/a/._x.tar", "gs://bucket/a/.x.tar"]


def test_hidden_files_are_not_tokenized(tmp_path):
  (tmp_path / "data").mkdir()
  for name in ("x.jsonl", "._x.jsonl", "desktop.ini"):
    (tmp_path / "data" / name).write_bytes(ROW)
  manifest = tokenize.tokenize(
    [f"{tmp_path}/data/*"], str(tmp_path / "out"), "bytes"
  )
  assert manifest["num_documents"] == 1


def test_a_token_folder_may_have_hidden_files(tmp_path):
  (tmp_path / "x.jsonl").write_bytes(ROW)
  output = tmp_path / "out"
  output.mkdir()
  (output / ".DS_Store").write_bytes(b"looks")
  tokenize.tokenize([str(tmp_path / "x.jsonl")], str(output), "bytes")
  (output / "._00000.bin").write_bytes(b"Mac OS X")
  assert len(tokens.Source(2, str(output))) == 2
