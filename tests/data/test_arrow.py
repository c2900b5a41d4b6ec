"""Arrow files and folders of Hugging Face's `datasets`."""

import os
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import arrow, parquet

# Made by tests/golden/make_data_files.py.
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "datasets"
ROWS = {"train": range(5), "test": (6, 5)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(source, rows):
  order = np.arange(len(rows))[::-1]
  batch = source.read(order)
  for at, index in enumerate(order):
    i = rows[index]
    assert batch["score"][at] == i / 2 and batch["label"][at] == i % 2
    assert list(batch["captions"][at]) == [b"c%d" % i] * (i % 3)
    assert batch["image"][at].startswith(b"\x89PNG")
  assert source.class_names == {"label": ["cat", "dog"]}


@pytest.mark.parametrize("split", ROWS)
def test_saved_data_sets(split):
  path = str(GOLDEN / "saved")
  source = arrow.Source(path, split=split)
  assert source.spec["image"] == (bytes, ())
  check(source, ROWS[split])
  check(arrow.Source(str(GOLDEN / "saved" / split)), ROWS[split])
  names = arrow.Source.read_class_names(path, split=split)
  assert names == source.class_names


def test_the_cache_of_the_library():
  check(arrow.Source(str(GOLDEN / "cached")), range(7))


def test_patterns_of_files():
  source = arrow.Source(str(GOLDEN / "saved/train/*.arrow"), slice="[1:]")
  check(source, range(1, 5))
  assert source.where(3).endswith("data-00001-of-00002.arrow, row 1")


def test_mistakes(tmp_path):
  def refused(match, path, **options):
    with pytest.raises(ConfigError, match=match):
      arrow.Source(str(path), **options)

  refused("split: unknown None. There are: test, train", GOLDEN / "saved")
  refused("unknown 'tran'. Did you mean", GOLDEN / "saved", split="tran")
  refused("no column 'labl'", GOLDEN / "cached", columns=["labl"])
  refused("neither saved by", tmp_path)


def test_files_that_are_cut_off_or_change(tmp_path):
  folder = tmp_path / "set"
  shutil.copytree(GOLDEN / "saved" / "train", folder)
  source = arrow.Source(str(folder))
  path = folder / "data-00001-of-00002.arrow"
  content = path.read_bytes()
  path.write_bytes(content[:-8])  # Without the end of the stream.
  os.utime(path, (1, 1))
  with pytest.raises(DataError, match=r"00002\.arrow, row 0: the file has cha"):
    source.read(np.asarray([3]))
  check(arrow.Source(str(folder / "data-00000-of-00002.arrow")), range(3))
  with pytest.raises(DataError, match=r"00001-of-00002\.arrow: .*truncated"):
    arrow.Source(str(folder))


def test_files_with_random_access(tmp_path):
  table = pa.table({"x": [1, 2, 3]})
  with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
    writer.write_table(table)
  source = arrow.Source(str(tmp_path / "x.arrow"))
  assert source.read(np.arange(3))["x"].tolist() == [1, 2, 3]
  pa.parquet.write_table(table, tmp_path / "x.parquet")
  same = parquet.Source(str(tmp_path / "x.parquet"))
  assert same.read(np.arange(3))["x"].tolist() == [1, 2, 3]
