"""Faults 39 to 42: damaged, truncated, empty or exhausted data."""

import json
import os
import pathlib

import numpy as np
import pytest
import tiny

from faults import program as program_lib


@pytest.mark.slow
def test_a_file_without_examples(program, workdir, tmp_path):
  train = {k: v[:0] for k, v in program_lib.digits()["train"].items()}
  program_lib.write_data(tmp_path / "data", train=train)
  process = program.run(workdir, data=tmp_path / "data", code=2)
  expected = f"error: config.input.data: {tmp_path}/data/train.npz: "
  assert process.last_line() == expected + "contains no examples."
  assert not workdir.exists()


@pytest.mark.slow
def test_no_example_can_be_made(program, workdir, tmp_path):
  train = program_lib.digits()["train"]
  train["label"] += 10  # Not one of ten classes.
  program_lib.write_data(tmp_path / "data", train=train)
  for skip_errors, words in (
    (0, 'op "onehot'),
    (1000, "so are 99 replacements"),
  ):
    change = f"input.skip_errors={skip_errors}"
    process = program.start(workdir, change, data=tmp_path / "data")
    assert process.wait(120) == 2, process.text()
    last = process.last_line()
    assert "train.npz, row " in last and words in last, last


def write_lines(folder):
  """The training digits as lines of JSON."""
  train = program_lib.digits()["train"]
  rows = zip(*(train[key].tolist() for key in ("image", "label", "id")))
  path = folder / "train.jsonl"
  with open(path, "w") as file:
    for image, label, number in rows:
      line = dict(image=image, label=label, id=number)
      file.write(json.dumps(line) + "\n")
  return path


@pytest.mark.slow
def test_data_that_ends_before_the_last_step(program, workdir, tmp_path):
  path = write_lines(tmp_path)
  source = dict(type="jsonl", path=str(path))
  flag = tmp_path / "steps"
  hook = dict(type="faults.waiting.Gate", step=5, flag=str(flag))
  process = program.start(
    workdir, f"input.data={source}", f"hooks={dict(gate=hook)}"
  )
  process.until_file(flag)
  os.truncate(path, path.stat().st_size // 10)
  pathlib.Path(f"{flag}.go").touch()
  assert process.wait() == 2, process.text()
  last = process.last_line()
  assert str(path) in last and "line" in last, last


# A prepared TFDS data set with one file.


@pytest.fixture
def prepared(tmp_path):
  """(changes of the config that read it, its file)."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  train = program_lib.digits()["train"]
  features = tfds.features.FeaturesDict(
    {
      "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
      "label": np.int64,
      "id": np.int64,
    }
  )
  folder = tmp_path / "tfds" / "my_digits" / "1.0.0"
  folder.mkdir(parents=True)
  path = folder / "my_digits-train.tfrecord-00000-of-00001"
  with tf.io.TFRecordWriter(str(path)) as writer:
    for i in range(program_lib.NUM_TRAIN):
      example = {key: train[key][i] for key in ("image", "label", "id")}
      encoded = features.encode_example(example)
      writer.write(features.serialize_example(encoded))
  name = dict(dataset_name="my_digits", filetype_suffix="tfrecord")
  template = tfds.core.ShardedFileTemplate(
    data_dir=folder, split="train", **name
  )
  split = tfds.core.SplitInfo(
    name="train",
    shard_lengths=[program_lib.NUM_TRAIN],
    num_bytes=0,
    filename_template=template,
  )
  tfds.folder_dataset.write_metadata(
    data_dir=str(folder),
    features=features,
    split_infos=[split],
    filename_template=tfds.core.ShardedFileTemplate(data_dir=folder, **name),
    check_data=False,
  )
  source = dict(type="tfds", name="my_digits", data_dir=str(tmp_path / "tfds"))
  pp = (
    "decode(channels=1)|resize(8)|value_range(-1,1,0,16)|onehot(10,key='label',"
    "key_result='labels')|keep('image','labels','id')"
  )
  return (f"input.data={source}", f"input.pp={pp}"), path


def record_starts(path):
  """The first byte of each record, then the file's size."""
  content, starts = path.read_bytes(), [0]
  while starts[-1] < len(content):
    at = starts[-1]
    size = int.from_bytes(content[at : at + 8], "little")
    starts.append(at + size + 16)
  return starts


@pytest.mark.slow
def test_a_damaged_record(program, workdir, prepared, tmp_path):
  changes, path = prepared
  start = record_starts(path)[17]
  content = bytearray(path.read_bytes())
  content[start + 40] ^= 1
  path.write_bytes(content)
  process = program.run(workdir, *changes, code=2)
  assert f"{path}, byte {start}: damaged record" in process.last_line()
  # Only that record is skipped; another one takes its place.
  each = ("log_steps=1", "input.skip_errors=1")
  other = tmp_path / "other"
  process = program.run(other, *changes, *each)
  assert f"Skipped 1: {path}, byte {start}" in process.text()
  rows = tiny.rows(other).values()
  seen = {row[f"id_{i}"] for row in rows for i in range(8)}
  assert seen == {*range(1000, 1080)} - {1017}


@pytest.mark.slow
def test_a_file_cut_between_two_records(program, workdir, prepared):
  changes, path = prepared
  os.truncate(path, record_starts(path)[-2])
  process = program.run(workdir, *changes, code=2)
  last = process.last_line()
  expected = "79 records; expected 80, as in dataset_info.json"
  assert f"{path.name}: {expected}" in last
  assert not workdir.exists()
