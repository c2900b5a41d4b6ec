"""The cache of raw records changes the speed of an input and nothing else."""

import numpy as np
import pytest
from support.array_inputs import assert_equal, fetch, make_train, rows_of

from bigtrain.config.errors import ConfigError
from bigtrain.data import synthetic
from bigtrain.files import disk
from bigtrain.inputs import cache, checks


def test_each_record_is_read_once(reads, caplog):
  caplog.set_level("DEBUG", logger="absl")
  data = rows_of(40, image=np.zeros((40, 8, 8, 1), np.uint8))
  train = make_train(data=data, cache="raw", num_threads=1)
  assert "config.input.cache: 40 records take about 2.88 kB" in caplog.text
  expected = fetch(make_train(data=data).start(0, 10))
  del reads[:]
  for a, b in zip(fetch(train.start(0, 10)), expected, strict=True):
    assert_equal(a, b)
  indices = sorted(i for call in reads for i in call)
  assert len(indices) == len(set(indices)) <= 40
  assert train.fingerprint == make_train(data=data).fingerprint
  assert train.fingerprint != make_train().fingerprint


def test_records_larger_than_memory_are_refused(monkeypatch):
  monkeypatch.setattr(cache, "available_bytes", lambda: 1000)
  with pytest.raises(ConfigError, match=r"input\.cache='raw'.*1 kB are avail"):
    make_train(cache="raw")


def test_memory_is_measured():
  assert 1e6 < cache.available_bytes() < 1e15
  assert disk.size(1234567) == "1.23 MB"


@pytest.mark.parametrize("kind", ["none", "raw"])
def test_ids_beyond_the_vocabulary_are_refused_with_and_without_cache(kind):
  data = {
    "type": "synthetic",
    "features": {"tokens": "int32[8] < 300"},
    "num_examples": 20,
  }
  train = make_train("", data=data, cache=kind)
  assert train.vocab_sizes == {"tokens": 300}
  with pytest.raises(ConfigError, match="'tokens' go up to 299, but .* 259"):
    checks.check_sizes(train.vocab_sizes, {"tokens": 259}, "config.input")


def test_unknown_attributes_come_from_the_source():
  source = synthetic.Source({"x": "int32 < 9"}, num_examples=5)
  source.note = "of the source"
  cached = cache.CachedSource(source, "config.input.cache")
  assert cached.note == "of the source"
  assert cached.spec == source.spec
  assert cached.where(3) == source.where(3)
  assert not hasattr(cached, "parse")
  with pytest.raises(AttributeError, match="no_such_name"):
    _ = cached.no_such_name
  # Private names are not delegated, so an empty object can be asked for them.
  with pytest.raises(AttributeError, match="_source"):
    _ = cache.CachedSource.__new__(cache.CachedSource)._source
