"""Tar shards as the library webdataset writes them."""

import io
import json
import os
import pathlib
import shutil
import tarfile

import numpy as np
import pytest
from support import tar_shards
from support.array_inputs import fetch

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import webdataset
from bigtrain.data.formats import tar_files
from bigtrain.inputs import pipeline

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "webdataset"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "bigtrain" / "offsets"


@pytest.fixture
def pattern(tmp_path):
  """Three shards of samples 0 to 3, none, and 4 to 6."""
  for shard, rows in enumerate((range(4), (), range(4, 7))):
    members = [member for i in rows for member in tar_shards.sample(i)]
    tar_shards.write(tmp_path / f"x-{shard:02}.tar", members)
  return str(tmp_path / "x-{00..02}.tar")


def check(batch, at, i):
  expected = dict(tar_shards.sample(i))
  assert batch["image"][at] == expected[f"{i:04}.jpg"]
  assert batch["label"][at] == i and batch["text"][at] == b"text %d" % i
  assert batch["__key__"][at] == b"%04d" % i
  assert batch["json"][at] == expected[f"{i:04}.json"]


def test_samples_in_any_order(pattern):
  source = webdataset.Source(pattern)
  assert len(source) == 7
  assert source.spec == {
    "image": (bytes, ()),
    "label": (np.int64, ()),
    "json": (bytes, ()),
    "text": (bytes, ()),
    "__key__": (bytes, ()),
  }
  order = np.asarray([6, 0, 5, 4, 3, 2, 1, 1])
  batch = source.read(order)
  assert batch["label"].dtype == np.int64
  for at, i in enumerate(order):
    check(batch, at, i)
  assert source.where(5).endswith("x-02.tar, sample '0005'")


@pytest.mark.parametrize(
  "path", ["x-*.tar", "x-{00,01,02}.tar", ["x-00.tar", "x-{01..02}.tar"]]
)
def test_patterns_of_shards(path, pattern, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  source = webdataset.Source(path, slice="[2:-1]")
  assert source.read(np.arange(4))["label"].tolist() == [2, 3, 4, 5]
  assert source.fingerprint() != webdataset.Source(path).fingerprint()


def test_a_missing_shard_of_a_pattern_is_named(pattern):
  os.remove(pattern.replace("{00..02}", "01"))
  with pytest.raises(ConfigError, match=r"x-01\.tar': no such file"):
    webdataset.Source(pattern)


def test_selected_features(pattern):
  features = {
    "picture": "png;jpg",
    "captions": "json/captions",
    "score": "json/score",
    "name": "__key__",
  }
  source = webdataset.Source(pattern, features=features)
  assert source.spec == {
    "picture": (bytes, ()),
    "captions": (bytes, (None,)),
    "score": (np.float32, ()),
    "name": (bytes, ()),
  }
  batch = source.read(np.asarray([5, 3]))
  assert [list(x) for x in batch["captions"]] == [[b"c5", b"c5"], []]
  assert batch["score"].tolist() == [5.5, 3.5]
  assert batch["name"].tolist() == [b"0005", b"0003"]


def test_arrays_and_extensions_with_dots(tmp_path):
  array = io.BytesIO()
  np.save(array, np.arange(6, dtype=np.uint8).reshape(2, 3))
  members = [("a.Left.JPG", b"left"), ("a.depth.npy", array.getvalue())]
  source = webdataset.Source(tar_shards.write(tmp_path / "x.tar", members))
  assert source.spec["depth.npy"] == (np.uint8, (2, 3))
  batch = source.read(np.asarray([0]))
  assert batch["left.jpg"][0] == b"left"
  assert batch["depth.npy"][0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_samples_equal_those_of_webdataset():
  """tests/golden/make_data_files.py reads a file of odd names with it."""
  expected = json.loads((GOLDEN / "samples.json").read_text())
  index = tar_files.load(tar_files.scan_members(str(GOLDEN / "odd.tar")))
  samples = [[key.decode(), {}] for key in index.keys]
  for sample, extension, *row in index.members.tolist():
    content = (GOLDEN / "odd.tar").read_bytes()
    parts = [content[at : at + n] for at, n in tar_files.parts([row])]
    (data,) = tar_files.members(parts, [row])
    samples[sample][1][index.extensions[extension]] = data.decode()
  assert samples == [[key.removeprefix("./"), x] for key, x in expected]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names(format, tmp_path):
  name = "ü" * 90 + "/" + "x" * 150
  members = [(f"{name}.jpg", b"j"), (f"{name}.cls", b"3"), ("b.jpg", b"b")]
  path = tar_shards.write(
    tmp_path / "x.tar", members + [("b.cls", b"4")], format
  )
  batch = webdataset.Source(path).read(np.arange(2))
  assert batch["__key__"].tolist() == [name.encode(), b"b"]
  assert batch["image"].tolist() == [b"j", b"b"]
  assert batch["label"].tolist() == [3, 4]


def test_the_index_is_kept_and_remade_when_damaged(pattern, cache, monkeypatch):
  webdataset.Source(pattern)
  kept = sorted(cache.iterdir())
  assert len(kept) == 3
  scans = []

  def scan(path):
    scans.append(os.path.basename(path))
    return real(path)

  real, scan.__name__ = tar_files.scan_members, tar_files.scan_members.__name__
  monkeypatch.setattr(tar_files, "scan_members", scan)
  webdataset.Source(pattern)
  assert not scans
  for file in kept:  # One changed bit, far from the header.
    content = bytearray(file.read_bytes())
    content[200] ^= 4
    file.write_bytes(content)
  check(webdataset.Source(pattern).read(np.asarray([5])), 0, 5)
  assert len(scans) == 3
  members = [member for i in (8, 9) for member in tar_shards.sample(i)]
  tar_shards.write(pattern.replace("{00..02}", "01"), members)
  check(webdataset.Source(pattern).read(np.asarray([4])), 0, 8)
  assert scans[3:] == ["x-01.tar"]


def test_the_index_in_a_folder_of_the_config(pattern, tmp_path, cache):
  webdataset.Source(pattern, index=str(tmp_path / "index"))
  assert len(list((tmp_path / "index").iterdir())) == 3 and not cache.exists()


@pytest.mark.parametrize("change", ["replaced", "in place", "shrunk", "gone"])
def test_a_shard_that_changes_during_the_run(change, pattern):
  """Fault 63: named, and never other examples."""
  source = webdataset.Source(pattern)
  path = pattern.replace("{00..02}", "02")
  check(source.read(np.asarray([4])), 0, 4)
  # As long, with the same names: only the content of the pictures differs.
  members = [m for i in (5, 4, 6) for m in tar_shards.sample(i)]
  names = [name for i in (4, 5, 6) for name, _ in tar_shards.sample(i)]
  other = [(name, data) for name, (_, data) in zip(names, members)]
  if change == "replaced":
    os.replace(tar_shards.write(path + ".new", other), path)
  elif change == "in place":
    stat = os.stat(path)
    content = bytearray(pathlib.Path(path).read_bytes())
    at = content.index(b"image 4")
    content[at : at + 500] = content[at : at + 500].replace(b"4", b"5")
    pathlib.Path(path).write_bytes(content)
    assert os.stat(path).st_size == stat.st_size
  elif change == "shrunk":
    os.truncate(path, 2048)
  else:
    os.remove(path)
  for i in (4, 5, 6):
    with pytest.raises(DataError, match=r"x-02\.tar"):
      source.read(np.asarray([i]))
  check(source.read(np.asarray([3])), 0, 3)


@pytest.mark.parametrize("at", [520, 2 * 512 + 700])
def test_data_that_differ_from_the_index(at, pattern, monkeypatch):
  """Even if the size and the times of the file do not show it."""
  source = webdataset.Source(pattern)
  path = pattern.replace("{00..02}", "00")
  stat = os.stat(path)
  content = bytearray(pathlib.Path(path).read_bytes())
  begin = content.index(b"0001.jpg")
  content[begin + 3] ^= 1  # Its header: the name of another sample.
  pathlib.Path(path).write_bytes(content)
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  with pytest.raises(DataError, match="x-00.tar, sample '0001': damaged"):
    source.read(np.asarray([1]))
  check(source.read(np.asarray([0])), 0, 0)


def damage(path, at):
  content = bytearray(pathlib.Path(path).read_bytes())
  content[at] ^= 1
  pathlib.Path(path).write_bytes(content)
  os.utime(path, (1, 1))  # Clocks of file systems are coarse.


@pytest.mark.parametrize("member", ["0002.jpg", "0002.txt", "0003.txt"])
def test_a_damaged_header_loses_one_sample(member, pattern):
  path = pattern.replace("{00..02}", "00")
  at = pathlib.Path(path).read_bytes().index(member.encode())
  damage(path, at + 130)  # The size.
  source = webdataset.Source(pattern)
  assert len(source) == 7
  for i in range(7):
    if i == int(member[:4]):
      with pytest.raises(DataError, match=f"sample '{member[:4]}': damaged"):
        source.read(np.asarray([i]))
    else:
      check(source.read(np.asarray([i])), 0, i)


def test_skip_errors_loses_the_damaged_sample_alone(pattern):
  path = pattern.replace("{00..02}", "00")
  at = pathlib.Path(path).read_bytes().index(b"0002.jpg")
  damage(path, at + 130)

  def labels(**options):
    data = dict(type="webdataset", path=pattern)
    config = dict(data=data, pp="keep('label')", batch_size=8, **options)
    train = pipeline.make_train(
      settings.Config({"input": config}).input,
      seed=0,
      mesh=sharding.make_mesh(),
    )
    batches = [batch["label"] for batch in fetch(train.start(0, 7))]
    return np.concatenate(batches), train.skipped

  with pytest.raises(DataError, match="x-00.tar, sample '0002': damaged"):
    labels()
  seen, skipped = labels(skip_errors=1)
  assert skipped == 1 and {*seen.tolist()} == {0, 1, 3, 4, 5, 6}


@pytest.mark.parametrize("size", [3000, 512 * 9, 0])
def test_truncated_shards(size, pattern):
  path = pattern.replace("{00..02}", "00")
  os.truncate(path, size)
  with pytest.raises(DataError, match=r"x-00\.tar, byte \d+: not a whole tar"):
    webdataset.Source(pattern)


def test_mistakes(pattern, tmp_path):
  def refused(match, path=pattern, **options):
    with pytest.raises(ConfigError, match=match):
      webdataset.Source(path, **options).read(np.arange(2))

  import gzip

  whole = pathlib.Path(pattern.replace("{00..02}", "00"))
  for name in ("x.tar.gz", "y.tar"):
    (tmp_path / name).write_bytes(gzip.compress(whole.read_bytes()))
    refused(rf"{name}: compressed", str(tmp_path / name))
  (tmp_path / "x.txt").write_text("no tar " * 1000)
  refused("x.txt, byte 0: not a whole tar file", str(tmp_path / "x.txt"))
  empty = tar_shards.write(tmp_path / "empty.tar", [("folder", None)])
  refused("contains no examples", empty)
  refused("features='jpg': expected a dict", features="jpg")
  refused("no .jpgg. Did you mean 'jpg'", features={"image": "jpgg"})
  refused("no field 'captoin'", features={"text": "json/captoin"})
  refused("selects no examples", slice="[3:3]")
  members = [("a.jpg", b"a"), ("b.jpg", b"b"), ("a.cls", b"1"), ("b.cls", b"2")]
  apart = tar_shards.write(tmp_path / "apart.tar", members)
  refused("sample 'a': it has no .cls", apart, features={"label": "cls"})
  twice = tar_shards.write(tmp_path / "twice.tar", [members[0]] * 2)
  refused("'a.jpg' is there twice", twice)
  text = tar_shards.write(tmp_path / "t.tar", [("a.cls", b"cat")])
  refused(r"sample 'a': .cls: invalid literal", text)


def test_changed_shards_are_refused_on_resume(pattern, tmp_path):
  source = webdataset.Source(pattern)
  ((name, fingerprint),) = source.fingerprints.items()
  assert name == pattern
  copy = tmp_path / "copy"
  shutil.copytree(
    tmp_path, copy, ignore=shutil.ignore_patterns("copy", "cache")
  )
  same = webdataset.Source(str(copy / "x-*.tar"))
  assert same.fingerprint() == fingerprint  # Times do not count.
  path = pattern.replace("{00..02}", "00")
  damage(path, pathlib.Path(path).read_bytes().index(b"image 3") - 420)
  assert webdataset.Source(pattern).fingerprint() != fingerprint


@pytest.mark.parametrize(
  "store", ["gs_bucket", pytest.param("s3_bucket", marks=pytest.mark.cluster)]
)
def test_shards_in_an_object_store(store, request, pattern):
  from bigtrain.files import objects

  bucket = request.getfixturevalue(store)
  for i in range(3):
    content = pathlib.Path(pattern.replace("{00..02}", f"{i:02}")).read_bytes()
    objects.write(f"{bucket}/set/x-{i:02}.tar", content)
  local = webdataset.Source(pattern)
  for path in ("x-*.tar", "x-{00..02}.tar"):
    url = f"{bucket}/set/{path}"
    source = webdataset.Source(url, index=f"{bucket}/index")
    assert source.fingerprint() == local.fingerprint()
    order = np.asarray([6, 0, 3])
    for at, i in enumerate(order):
      check(source.read(order), at, i)
  assert len(objects.below(f"{bucket}/index")) == 3
  objects.write(f"{bucket}/set/x-02.tar", content[:2048])
  with pytest.raises(DataError, match=r"//bucket/.*x-02\.tar"):
    source.read(np.asarray([5]))
  objects.write(f"{bucket}/set/x-02.tar", content + bytes(512))
  with pytest.raises(DataError, match=r"x-02\.tar.*has changed"):
    source.read(np.asarray([5]))
  with pytest.raises(DataError, match=r"x-03\.tar: no such object"):
    webdataset.Source(f"{bucket}/set/x-03.tar")
