"""Random access to JSON lines."""

import base64
import json

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import jsonl


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
def test_types_and_values_of_fields(tmp_path, newline):
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


def test_several_files_slices_and_a_last_line_without_newline(tmp_path):
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
    ('{"i": "x"}', "'i': expected int64 as in earlier lines, got \"x\""),
    ('{"i": 0.5}', "'i': expected int64 as in earlier lines, got 0.5"),
    ('{"i": [1]}', r"shape \(\) as in earlier lines, got \(1,\)"),
    ('{"i": null}', "field 'i': expected .*, got null"),
    ('{"i": {"a": 1}}', "expected a string, a number"),
  ],
)
def test_the_error_for_an_invalid_line_has_its_number(tmp_path, line, message):
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
  with pytest.raises(ConfigError, match="field 'i' .* has different types"):
    jsonl.Source(path)
  with pytest.raises(ConfigError, match=r"no field 'ss'\. Did you mean 's'"):
    jsonl.Source(path, fields=("ss",))
  with pytest.raises(ConfigError, match="Did you mean 'path'"):
    jsonl.Source(path, image_key="s", image_is="pth")
  (tmp_path / "none.jsonl").write_text("\n\n")
  with pytest.raises(DataError, match="contains no examples"):
    jsonl.Source(str(tmp_path / "none.jsonl"))
