"""Every local path of a data entry works as people type it."""

import json
import os
import pathlib
import re

import numpy as np
import pytest
from support import prepared_sets, tar_shards, token_corpora

from bigtrain.config.errors import ConfigError
from bigtrain.inputs import sources

# {what a user types: the same place below tmp_path}. The working directory is
# "here [1]", whose name is also a pattern. It has a link to ../there/deep.
TYPED = {
  "set": "here [1]/set",
  "./set": "here [1]/set",
  "../beside/./set/": "beside/set",
  "a//b///set": "here [1]/a/b/set",
  "~/set": "home/set",
  "two words/a set": "here [1]/two words/a set",
  "link/set": "there/deep/set",
  "link/../set": "there/set",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
  """`place(typed)` makes the folder `typed` and returns its absolute path."""
  for name in ("here [1]", "beside", "home", "there/deep"):
    (tmp_path / name).mkdir(parents=True)
  (tmp_path / "here [1]" / "link").symlink_to(tmp_path / "there" / "deep")
  monkeypatch.chdir(tmp_path / "here [1]")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

  def make(typed):
    folder = tmp_path / TYPED[typed]
    folder.mkdir(parents=True)
    return folder

  return make


def write_arrays(folder):
  np.savez(folder / "x.npz", label=np.arange(5))


def write_images(folder):
  for name in ("cat", "dog"):
    (folder / "train" / name).mkdir(parents=True)
    (folder / "train" / name / "0.jpg").write_bytes(name.encode())
  (folder / "classes.txt").write_text("dog\ncat\n")


def write_jsonl(folder):
  (folder / "0.jpg").write_bytes(b"zero")
  row = json.dumps({"label": 3, "file": "0.jpg"}) + "\n"
  for name in ("x0", "x1"):
    (folder / f"{name}.jsonl").write_text(row)


def write_parquet(folder):
  pyarrow = pytest.importorskip("pyarrow")
  pytest.importorskip("pyarrow.parquet")
  (folder / "0.jpg").write_bytes(b"zero")
  image = pyarrow.struct(
    [("bytes", pyarrow.binary()), ("path", pyarrow.string())]
  )
  rows = [{"image": {"bytes": None, "path": "0.jpg"}, "label": 3}]
  schema = pyarrow.schema([("image", image), ("label", pyarrow.int64())])
  for name in ("x0", "x1"):
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet")


def write_text(folder):
  (folder / "more").mkdir()
  for name in ("x0", "more/x1"):
    (folder / f"{name}.txt").write_text(name)


def write_tar(folder):
  for i in range(2):
    tar_shards.write(folder / f"x{i}.tar", tar_shards.sample(i))


def write_tfds(folder):
  image = np.zeros((2, 2, 3), np.uint8)
  examples = [{"image": image, "label": 1, "file_name": "x"}] * 2
  prepared_sets.write(folder, "tfrecord", examples, (1, 1))


# {case: (writer of the files, arguments of the source)}; {p} is the folder as
# it was typed.
SOURCES = {
  "arrays": (write_arrays, dict(type="arrays", path="{p}/x.npz")),
  "image_folder": (
    write_images,
    dict(type="image_folder", path="{p}/train", classes="{p}/classes.txt"),
  ),
  "jsonl": (
    write_jsonl,
    dict(type="jsonl", path="{p}/x0.jsonl", image_key="file"),
  ),
  "jsonl pattern": (
    write_jsonl,
    dict(type="jsonl", path="{p}/x*.jsonl", image_key="file"),
  ),
  "parquet": (
    write_parquet,
    dict(type="parquet", path="{p}/x0.parquet", unpack_to="{p}/unpacked"),
  ),
  "parquet list": (
    write_parquet,
    dict(type="parquet", path=["{p}/x0.parquet", "{p}/x1*"]),
  ),
  "text": (write_text, dict(type="text", path="{p}/x0.txt", length=4)),
  "text pattern": (
    write_text,
    dict(type="text", path="{p}/**/*.txt", length=4),
  ),
  "text list": (
    write_text,
    dict(type="text", path=["{p}/x0.txt", "{p}/*/x?.txt"], length=4),
  ),
  "webdataset pattern": (
    write_tar,
    dict(type="webdataset", path="{p}/x*.tar", index="{p}/index"),
  ),
  "webdataset list": (
    write_tar,
    dict(type="webdataset", path=["{p}/x0.tar", "{p}/x1.tar"]),
  ),
  "tfds name": (
    write_tfds,
    dict(type="tfds", name="my_set", data_dir="{p}"),
  ),
  "tfds builder_dir": (
    write_tfds,
    dict(type="tfds", builder_dir="{p}/my_set/1.0.0"),
  ),
  "tokens folder": (
    token_corpora.tokenized,
    dict(type="tokens", path="{p}/tokenized", length=4),
  ),
  "tokens file": (
    token_corpora.plain,
    dict(type="tokens", path="{p}/x.bin", length=4),
  ),
  "tokens megatron": (
    token_corpora.megatron,
    dict(type="tokens", path="{p}/x", length=4),
  ),
  "tokens list": (
    token_corpora.plain,
    dict(type="tokens", path=["{p}/x.bin", "{p}/*.bin"], length=4),
  ),
}


def fill(options, folder):
  """Returns the arguments of a source with {p} replaced by `folder`."""
  if isinstance(options, dict):
    return {name: fill(value, folder) for name, value in options.items()}
  if isinstance(options, list):
    return [fill(value, folder) for value in options]
  if isinstance(options, str):
    return options.replace("{p}", folder).replace("//x", "/x")
  return options


def read_all(source):
  batch = source.read(np.arange(len(source)))
  # Paths may keep symbolic links.
  places = [os.path.realpath(source.where(i)) for i in range(len(source))]
  return {name: value.tolist() for name, value in batch.items()}, places


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("case", SOURCES)
def test_a_source_reads_a_path_as_typed(case, typed, place, monkeypatch):
  write, options = SOURCES[case]
  folder = place(typed)
  write(folder)
  source = sources.make_source(fill(options, typed), "config.input.data")
  # Later changes of the working directory and of HOME have no effect.
  monkeypatch.chdir("/")
  monkeypatch.setenv("HOME", "/")
  batch, places = read_all(source)
  if "unpack_to" in options:
    assert len(list((folder / "unpacked").iterdir())) == 1
  # A pattern with an absolute path would match nothing in "here [1]".
  monkeypatch.chdir(folder)
  direct = sources.make_source(fill(options, "."), "config.input.data")
  assert read_all(direct) == (batch, places)
  assert source.fingerprint() == direct.fingerprint()
  assert all(place.startswith(str(folder)) for place in places)


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_takes_path_objects(case, place):
  write, options = SOURCES[case]
  write(place("set"))
  strings = fill(options, "set")
  source = sources.make_source(strings, "config.input.data")
  for name in {"path", "classes", "unpack_to", "data_dir", "builder_dir"}:
    if name in strings:
      value = strings[name]
      many = isinstance(value, list)
      strings[name] = (
        list(map(pathlib.Path, value)) if many else pathlib.Path(value)
      )
  again = sources.make_source(strings, "config.input.data")
  assert read_all(again) == read_all(source)


@pytest.mark.parametrize("case", SOURCES)
@pytest.mark.parametrize("value", ["", 3, []])
def test_values_that_are_not_paths(case, value, place):
  write, options = SOURCES[case]
  write(place("set"))
  options = fill(options, "set")
  for name in {"path", "classes", "unpack_to", "data_dir", "builder_dir"}:
    if name in options:
      message = f"{name}: expected .*got {re.escape(repr(value))}"
      with pytest.raises(ConfigError, match=message):
        sources.make_source({**options, name: value}, "config.input.data")


@pytest.mark.parametrize(
  "case", ["arrays", "jsonl", "parquet", "text", "tokens file"]
)
def test_the_error_for_a_missing_file_has_the_absolute_path(case, place):
  write, options = SOURCES[case]
  folder = place("set")
  write(folder)
  options = {**options, "path": "{p}/y.z"}
  message = re.escape(f"path='{folder}/y.z': no such file")
  with pytest.raises(ConfigError, match=message):
    sources.make_source(fill(options, "set"), "config.input.data")
