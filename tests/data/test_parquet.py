"""Parquet files of images and texts, as on Hugging Face's hub."""

import json
import os
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import parquet

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
  [
    ("image", IMAGE),
    ("caption", pa.string()),
    ("captions", pa.list_(pa.string())),
    ("label", pa.int64()),
    ("score", pa.float64()),
    ("box", pa.list_(pa.float32(), 2)),
    ("kind", pa.dictionary(pa.int32(), pa.string())),
    ("meta", pa.struct([("ids", pa.list_(pa.int32())), ("ok", pa.bool_())])),
  ]
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def row(i):
  return {
    "image": {"bytes": b"image %d" % i, "path": f"{i}.jpg"},
    "caption": f"caption ü {i}",
    "captions": [f"{i} is {k}" for k in range(i % 3)],
    "label": i,
    "score": i / 2,
    "box": [i, i + 1],
    "kind": f"kind {i % 2}",
    "meta": {"ids": list(range(i % 4)), "ok": i % 2 == 0},
  }


def write(path, rows, schema=SCHEMA, group=3, **options):
  table = pa.Table.from_pylist(rows, schema=schema)
  pq.write_table(table, path, row_group_size=group, **options)
  return str(path)


@pytest.fixture
def pattern(tmp_path):
  """Two files: rows 0 to 6 in groups of 3, 3, 1 and rows 7 to 11 in 3, 2."""
  write(tmp_path / "train-0.parquet", [row(i) for i in range(7)])
  write(tmp_path / "train-1.parquet", [row(i) for i in range(7, 12)])
  return str(tmp_path / "train-*.parquet")


def check(batch, at, i):
  """Asserts that example `at` of a batch is row `i`."""
  example = {name: array[at] for name, array in batch.items()}
  expected = row(i)
  assert example["image"] == expected["image"]["bytes"]
  assert example["caption"] == expected["caption"].encode()
  captions = [caption.encode() for caption in expected["captions"]]
  assert list(example["captions"]) == captions
  assert example["label"] == i and example["score"] == i / 2
  assert example["box"].tolist() == expected["box"]
  assert example["kind"] == expected["kind"].encode()
  assert example["meta/ids"].tolist() == expected["meta"]["ids"]
  assert example["meta/ok"] == expected["meta"]["ok"]


@pytest.mark.parametrize("unpack", [False, True])
def test_rows_in_any_order(pattern, tmp_path, unpack):
  unpack_to = str(tmp_path / "unpacked") if unpack else None
  source = parquet.Source(pattern, unpack_to=unpack_to)
  assert len(source) == 12
  assert source.spec == {
    "image": (bytes, ()),
    "caption": (bytes, ()),
    "captions": (bytes, (None,)),
    "label": (np.int64, ()),
    "score": (np.float32, ()),
    "box": (np.float32, (2,)),
    "kind": (bytes, ()),
    "meta/ids": (np.int32, (None,)),
    "meta/ok": (np.bool_, ()),
  }
  order = np.random.default_rng(0).permutation(12)
  for _ in range(2):  # The second time from memory.
    batch = source.read(order)
    assert batch["label"].dtype == np.int64
    assert batch["captions"].dtype == object
    for at, i in enumerate(order):
      check(batch, at, i)
  if unpack:
    assert len(os.listdir(unpack_to)) == 5
    again = parquet.Source(pattern, unpack_to=unpack_to)
    again._decode = None  # Fails if anything is decoded again.
    check(again.read(np.asarray([8])), 0, 8)


def test_columns_and_slices(pattern):
  source = parquet.Source(pattern, columns=("label", "image"), slice="[5:9]")
  assert list(source.spec) == ["label", "image"] and len(source) == 4
  assert source.read(np.arange(4))["label"].tolist() == [5, 6, 7, 8]
  assert source.where(0).endswith("train-0.parquet, row group 1, row 2")
  assert source.where(2).endswith("train-1.parquet, row group 0, row 0")
  whole = parquet.Source(pattern)
  assert source.fingerprint() != whole.fingerprint()
  assert whole.fingerprint() == parquet.Source(pattern).fingerprint()


def test_a_list_of_patterns(pattern, tmp_path):
  paths = [str(tmp_path / "train-1.parquet"), str(tmp_path / "train-0.parquet")]
  source = parquet.Source(paths, columns=["label"])
  assert source.read(np.arange(12))["label"].tolist() == [
    *range(7, 12),
    *range(7),
  ]


def test_decoded_row_groups_are_cached_up_to_cache_bytes(pattern, caplog):
  source = parquet.Source(pattern, cache_bytes=1)
  decoded = []
  decode = source._decode
  source._decode = lambda *args: decoded.append(args) or decode(*args)
  source.read(np.asarray([0, 1, 2, 0]))
  assert len(decoded) == 1
  source.read(np.asarray([11, 0, 10]))  # The first group is still cached.
  assert len(decoded) == 2
  assert "decoded repeatedly" not in caplog.text
  source.read(np.asarray([0]))
  assert len(decoded) == 3 and "unpack_to" in caplog.text

  source = parquet.Source(pattern)
  decoded = []
  decode = source._decode
  source._decode = lambda *args: decoded.append(args) or decode(*args)
  threads = [
    threading.Thread(target=source.read, args=(np.arange(12),))
    for _ in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(decoded) == len(set(decoded)) == 5


def test_images_in_separate_files(tmp_path):
  (tmp_path / "a.jpg").write_bytes(b"of a")
  rows = [
    {"image": {"bytes": None, "path": "a.jpg"}},
    {"image": {"bytes": None, "path": "b.jpg"}},
    {"image": {"bytes": None, "path": None}},
    {"image": None},
  ]
  schema = pa.schema([("image", IMAGE)])
  source = parquet.Source(write(tmp_path / "x.parquet", rows, schema))
  assert source.read(np.asarray([0]))["image"].tolist() == [b"of a"]
  with pytest.raises(DataError, match=r"row group 0, row 1: .*b\.jpg"):
    source.read(np.asarray([1]))
  for i in (2, 3):
    with pytest.raises(DataError, match="row .: column 'image' is null"):
      source.read(np.asarray([i]))


def test_nulls_are_errors_and_invalid_utf8_is_passed_on(tmp_path):
  schema = pa.schema([("t", pa.string()), ("l", pa.list_(pa.string()))])
  bad = pa.Array.from_buffers(
    pa.string(),
    1,
    [
      None,
      pa.py_buffer(np.asarray([0, 2], np.int32)),
      pa.py_buffer(b"\xff\xfe"),
    ],
  )
  rows = pa.Table.from_pylist(
    [{"t": None, "l": ["a"]}, {"t": "a", "l": ["a", None]}], schema
  )
  table = pa.concat_tables(
    [rows, pa.table({"t": bad, "l": pa.array([["x"]])}, schema)]
  )
  pq.write_table(table, tmp_path / "x.parquet")
  source = parquet.Source(str(tmp_path / "x.parquet"))
  with pytest.raises(DataError, match="row 0: column 't' is null"):
    source.read(np.asarray([0]))
  with pytest.raises(DataError, match="row 1: column 'l' is null in part"):
    source.read(np.asarray([1]))
  # The op that decodes the text reports the error.
  assert source.read(np.asarray([2]))["t"].tolist() == [b"\xff\xfe"]


def test_damaged_files(tmp_path):
  path = tmp_path / "x.parquet"
  write(
    path,
    [row(i) for i in range(9)],
    use_dictionary=False,
    compression="none",
    write_page_checksum=True,
  )
  whole = path.read_bytes()
  path.write_bytes(whole[:-20])
  with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file"):
    parquet.Source(str(path))
  at = whole.index(b"image 4")
  path.write_bytes(whole[:at] + b"IMAGE" + whole[at + 5 :])
  source = parquet.Source(str(path))
  check(source.read(np.asarray([0])), 0, 0)
  with pytest.raises(DataError, match=r"x\.parquet, row group 1: cannot read"):
    source.read(np.asarray([4]))
  check(source.read(np.asarray([8])), 0, 8)  # Only that group is lost.


def test_files_with_different_types(tmp_path):
  write(tmp_path / "a.parquet", [{"x": 1}], pa.schema([("x", pa.int64())]))
  write(tmp_path / "b.parquet", [{"x": "1"}], pa.schema([("x", pa.string())]))
  source = parquet.Source(str(tmp_path / "*.parquet"))
  with pytest.raises(DataError, match=r"b\.parquet: column 'x' is string; exp"):
    source.read(np.asarray([1]))


def test_mistakes(pattern, tmp_path, monkeypatch):
  def refused(match, path=pattern, **options):
    with pytest.raises(ConfigError, match=match):
      parquet.Source(path, **options)

  refused(
    "no such file. Did you mean 'train-1.parquet'", pattern[:-9] + "9.parquet"
  )
  refused("is a folder; expected a file or a pattern", str(tmp_path))
  refused("at least one file", [])
  refused("no column 'captoin'. Did you mean 'caption'", columns=["captoin"])
  refused("columns='label': expected a list of column names", columns="label")
  refused("at least one", columns=[])
  refused("cache_bytes: .* got '1G'", cache_bytes="1G")
  refused("selects no examples", slice="[3:3]")
  kind = pa.schema([("when", pa.timestamp("s")), ("x", pa.int8())])
  path = write(tmp_path / "t.parquet", [{"when": None, "x": 3}], kind)
  refused(r"'when' has the unsupported type timestamp.*columns= selects", path)
  assert parquet.Source(path, columns=["x"]).read(np.arange(1))["x"] == [3]
  path = write(tmp_path / "e.parquet", [], kind)
  refused("contains no examples", path)
  (tmp_path / "j.parquet").write_text(json.dumps({"a": 1}))
  refused("not a Parquet file", str(tmp_path / "j.parquet"))
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  refused(r"pip install 'bigtrain\[parquet\]'")


def test_the_names_of_the_classes_are_read_without_examples(tmp_path):
  label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
  note = json.dumps({"info": {"features": {"label": label}}})
  path = tmp_path / "0.parquet"
  write(path, [row(0)], SCHEMA.with_metadata({"huggingface": note}))
  names = parquet.Source.read_class_names(str(path), columns=["label"])
  assert names == {"label": ["cat", "dog"]}
  assert parquet.Source(str(path)).class_names == names
