"""tensorflow is loaded without access to accelerators."""

import os

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
