"""Random access to TFRecord files that the tests write byte by byte."""

import struct

import google_crc32c
import numpy as np
import pytest

from bigtrain.config.errors import DataError
from bigtrain.data.formats import tfrecord


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def masked(data):
  crc = google_crc32c.value(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data):
  length = struct.pack("<Q", len(data))
  return (
    length
    + struct.pack("<I", masked(length))
    + data
    + struct.pack("<I", masked(data))
  )


def write(path, records):
  path.write_bytes(b"".join(map(record, records)))
  return str(path)


# Small records, an empty one, and one larger than a scan's window.
RECORDS = [b"a" * 10, b"", b"b" * 70000, b"c" * 9000, b"d" * 9000, b"e"]


def test_reads_records_in_any_order(tmp_path):
  paths = [
    write(tmp_path / "x", RECORDS),
    write(tmp_path / "y", [b"%d" % i * 100 for i in range(5000)]),
    write(tmp_path / "z", []),
  ]
  files = tfrecord.TFRecordFiles(paths)
  assert files.counts == [6, 5000, 0]
  assert [files.read(0, i) for i in (5, 2, 0, 1, 3)] == [
    RECORDS[i] for i in (5, 2, 0, 1, 3)
  ]
  assert files.read(1, 4321) == b"4321" * 100
  assert files.where(0, 2) == f"{paths[0]}, byte {26 + 16}"


def test_the_format_is_tensorflows(tmp_path):
  import tensorflow as tf

  with tf.io.TFRecordWriter(str(tmp_path / "x")) as writer:
    for data in RECORDS:
      writer.write(data)
  assert (tmp_path / "x").read_bytes() == b"".join(map(record, RECORDS))


def flip(path, at):
  raw = bytearray(path.read_bytes())
  raw[at] ^= 1
  path.write_bytes(raw)


def test_a_flipped_bit_in_the_data(tmp_path):
  path = tmp_path / "x"
  write(path, RECORDS)
  flip(path, 26 + 16 + 12 + 5)
  files = tfrecord.TFRecordFiles([str(path)])
  with pytest.raises(DataError, match=r"x, byte 42: damaged record"):
    files.read(0, 2)
  assert files.read(0, 3) == RECORDS[3]


@pytest.mark.parametrize("at", [26 + 16 + 2, 26 + 16 + 9])
def test_a_flipped_bit_in_a_length_or_its_checksum(tmp_path, at):
  path = tmp_path / "x"
  write(path, RECORDS)
  flip(path, at)
  with pytest.raises(DataError, match=r"x, byte 42: .*length"):
    tfrecord.TFRecordFiles([str(path)])


@pytest.mark.parametrize("cut", [1, 5, 16, 9020])
def test_a_file_truncated_within_a_record(tmp_path, cut):
  path = tmp_path / "x"
  write(path, RECORDS)
  path.write_bytes(path.read_bytes()[:-cut])
  message = r"x, byte \d+: the file ends within this record"
  with pytest.raises(DataError, match=message):
    tfrecord.TFRecordFiles([str(path)])


def test_a_file_that_changes_after_indexing(tmp_path):
  path = tmp_path / "x"
  write(path, RECORDS)
  files = tfrecord.TFRecordFiles([str(path)])
  write(path, RECORDS[:1])
  with pytest.raises(DataError, match="byte 42: the file ends within"):
    files.read(0, 2)
  path.unlink()
  other = tfrecord.TFRecordFiles([write(tmp_path / "y", [b"1"])])
  (tmp_path / "y").unlink()
  with pytest.raises(DataError, match="byte 12: No such file"):
    other.read(0, 0)


def test_array_record_files(tmp_path):
  from array_record.python import array_record_module

  path = str(tmp_path / "x")
  data = [np.random.default_rng(i).bytes(3000) for i in range(20)]
  writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
  for item in data:
    writer.write(item)
  writer.close()
  files = tfrecord.ArrayRecordFiles([path])
  assert files.counts == [20]
  assert [files.read(0, i) for i in (19, 3)] == [data[19], data[3]]
  flip(tmp_path / "x", (tmp_path / "x").read_bytes().index(data[7][100:200]))
  files = tfrecord.ArrayRecordFiles([path])
  with pytest.raises(DataError, match="x, record 7: damaged record"):
    files.read(0, 7)
  assert files.read(0, 8) == data[8]
  (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-7000])
  with pytest.raises(DataError, match="x: truncated or damaged"):
    tfrecord.ArrayRecordFiles([path])
