"""Lines of JSON by number."""

import base64
import json

import numpy as np
import pytest

from bigtrain.data import jsonl
from bigtrain.data.formats import files
from bigtrain.settings import ConfigError, DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path, rows, newline="\n"):
  path.write_bytes("".join(json.dumps(r) + newline for r in rows).encode())
  return str(path)


ROWS = [
  {"text": "a ü", "label": 3, "score": 1, "ok": True, "box": [1, 2], "n": []},
  {"text": "", "label": 4, "score": 0.5, "ok": False, "box": [3, 4], "n": [7]},
  {"text": "c", "label": 5, "score": 2, "ok": True, "box": [5, 6], "n": [8, 9]},
]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n \n"])
def test_fields_as_they_are(tmp_path, newline):
  source = jsonl.Source(write(tmp_path / "x.jsonl", ROWS, newline))
  assert len(source) == 3
  assert source.spec == {
    "text": (bytes, ()),
    "label": (np.int64, ()),
    "score": (np.float32, ()),
    "ok": (np.bool_, ()),
    "box": (np.int64, (2,)),
    "n": (np.int64, (None,)),
  }
  batch = source.read(np.asarray([2, 0]))
  assert batch["text"].tolist() == [b"c", "a ü".encode()]
  assert batch["label"].tolist() == [5, 3]
  assert batch["score"].dtype == np.float32
  assert batch["score"].tolist() == [2, 1]
  assert batch["ok"].tolist() == [True, True]
  assert batch["box"].tolist() == [[5, 6], [1, 2]]
  assert batch["n"].dtype == object
  assert [list(n) for n in batch["n"]] == [[8, 9], []]
  assert batch["n"][1].dtype == np.int64


def test_lists_of_strings(tmp_path):
  rows = [{"two": ["a", "b"], "any": ["x"]}, {"two": ["c", ""], "any": []}]
  source = jsonl.Source(write(tmp_path / "x.jsonl", rows))
  assert source.spec == {"two": (bytes, (None,)), "any": (bytes, (None,))}
  batch = source.read(np.arange(2))
  assert [list(a) for a in batch["two"]] == [[b"a", b"b"], [b"c", b""]]
  assert [list(a) for a in batch["any"]] == [[b"x"], []]


def test_many_files_last_line_without_end_and_slices(tmp_path):
  write(tmp_path / "b.jsonl", [{"i": i} for i in range(3, 7)])
  write(tmp_path / "a.jsonl", [{"i": i} for i in range(3)])
  (tmp_path / "c.jsonl").write_text('{"i": 7}\n{"i": 8}')
  source = jsonl.Source(str(tmp_path / "*.jsonl"))
  assert source.read(np.arange(9))["i"].tolist() == list(range(9))
  assert source.where(3) == f"{tmp_path / 'b.jsonl'}, line 1"
  assert source.where(8) == f"{tmp_path / 'c.jsonl'}, line 2"
  part = jsonl.Source(str(tmp_path / "*.jsonl"), slice="[-3:]")
  assert part.read(np.arange(3))["i"].tolist() == [6, 7, 8]
  assert part.where(0) == f"{tmp_path / 'b.jsonl'}, line 4"
  assert part.fingerprint() != source.fingerprint()


def test_images_by_path_and_in_base64(tmp_path):
  (tmp_path / "im").mkdir()
  (tmp_path / "im" / "0.jpg").write_bytes(b"zero")
  path = write(
    tmp_path / "x.jsonl",
    [
      {"file": "im/0.jpg", "raw": base64.b64encode(b"null").decode()},
      {"file": "im/1.jpg", "raw": "?"},
    ],
  )
  source = jsonl.Source(path, image_key="file", fields=())
  assert source.spec == {"image": (bytes, ())}
  assert source.read(np.asarray([0]))["image"].tolist() == [b"zero"]
  with pytest.raises(DataError, match=r"x\.jsonl, line 2: image 'im/1.jpg'"):
    source.read(np.asarray([1]))
  source = jsonl.Source(
    path, image_key="raw", image_is="base64", fields=("file",)
  )
  assert source.read(np.asarray([0]))["image"].tolist() == [b"null"]
  with pytest.raises(DataError, match=r"line 2: field 'raw' is not base64"):
    source.read(np.asarray([1]))


@pytest.mark.parametrize(
  "line, message",
  [
    ('{"i": 1', "not valid JSON"),
    ("[1]", "expected an object, got list"),
    ('{"j": 1}', "no field 'i'"),
    ('{"i": "x"}', "field 'i' is \"x\", but in earlier lines it is int64"),
    ('{"i": 0.5}', "field 'i' is 0.5, but in earlier lines it is int64"),
    ('{"i": [1]}', r"has shape \(1,\), but in earlier lines \(\)"),
    ('{"i": null}', "field 'i' is null, expected"),
    ('{"i": {"a": 1}}', "expected a string, a number"),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = tmp_path / "x.jsonl"
  path.write_text("\n" + '{"i": 1}\n' * 100 + line + "\n" + '{"i": 2}\n')
  source = jsonl.Source(str(path))
  with pytest.raises(DataError, match=message) as error:
    source.read(np.arange(102))
  assert str(error.value).startswith(f"{path}, line 102: ")
  assert source.read(np.asarray([101]))["i"].tolist() == [2]


def test_mistakes(tmp_path):
  path = write(tmp_path / "x.jsonl", [{"i": 1, "s": "a"}, {"i": "b", "s": 2}])
  with pytest.raises(ConfigError, match=r"Did you mean 'x\.jsonl'"):
    jsonl.Source(str(tmp_path / "xx.jsonl"))
  with pytest.raises(ConfigError, match="no such file"):
    jsonl.Source(str(tmp_path / "y*.jsonl"))
  with pytest.raises(ConfigError, match="type of field 'i'"):
    jsonl.Source(path)
  with pytest.raises(ConfigError, match=r"no field 'ss'\. Did you mean 's'"):
    jsonl.Source(path, fields=("ss",))
  with pytest.raises(ConfigError, match="Did you mean 'path'"):
    jsonl.Source(path, image_key="s", image_is="pth")
  (tmp_path / "none.jsonl").write_text("\n\n")
  with pytest.raises(DataError, match="no line in it"):
    jsonl.Source(str(tmp_path / "none.jsonl"))


def test_the_index_is_kept_and_follows_the_file(tmp_path, monkeypatch):
  path = write(tmp_path / "x.jsonl", [{"i": 1}])
  assert len(jsonl.Source(path)) == 1
  kept = list((tmp_path / "cache" / "bigtrain" / "offsets").iterdir())
  assert len(kept) == 1

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


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
  path = write(tmp_path / "x.jsonl", [{"i": 1}])
  assert len(jsonl.Source(path)) == 1
  assert "is not kept" in caplog.text


def test_only_so_many_files_stay_open(tmp_path):
  opened = []

  def open_file(path):
    opened.append(path)
    return path

  handles = files.Handles(open_file, max_open=2)
  for path in "aabacab":
    assert handles.get(path) == path
  # a, b and then c, which closes b; b again.
  assert "".join(opened) == "abcb"
