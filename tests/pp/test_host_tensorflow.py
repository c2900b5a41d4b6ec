"""tensorflow is loaded without access to accelerators."""

import os
import subprocess
import sys

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.pp import host_tensorflow


def test_accelerators_are_hidden_from_tensorflow(monkeypatch):
  import tensorflow as tf

  hidden, in_use = [], []

  def hide(devices, kind):
    hidden.append((devices, kind))
    if in_use:
      raise RuntimeError("cannot be modified after being initialized")

  monkeypatch.setattr(tf.config, "set_visible_devices", hide)
  monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: in_use)
  load = host_tensorflow.load.__wrapped__  # Without its cache.
  monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
  assert load() is tf
  assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"  # No logs among results.
  assert hidden == [([], "GPU"), ([], "TPU")]
  in_use.append("a GPU")
  with pytest.raises(ConfigError, match="used earlier and holds the GPUs"):
    load()


@pytest.mark.parametrize(("before", "after"), [("1", "3"), ("0", "0")])
def test_the_level_that_jax_sets_is_raised(before, after, monkeypatch):
  monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", before)
  host_tensorflow.load.__wrapped__()
  assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == after


_DAMAGED = """
import jax
import numpy as np
from bigtrain.pp.host_tensorflow import one_line, tf

picture = tf.io.encode_jpeg(np.zeros((40, 40, 3), np.uint8)).numpy()
data = tf.data.Dataset.from_tensors(picture[:-40])
data = data.map(tf.io.decode_image, num_parallel_calls=2)
try:
  list(data.as_numpy_iterator())
except tf.errors.InvalidArgumentError as e:
  print(one_line(e))
"""


@pytest.mark.slow
def test_a_damaged_picture_prints_nothing_of_its_own():
  env = {n: x for n, x in os.environ.items() if n != "TF_CPP_MIN_LOG_LEVEL"}
  command = [sys.executable, "-c", _DAMAGED]
  process = subprocess.run(
    command, env=env, capture_output=True, text=True, check=True
  )
  assert "jpeg::Uncompress failed" in process.stdout
  for word in ("jpeg_mem", "rendezvous", "DecodeImage"):
    assert word not in process.stderr
