"""Inputs made from arrays in memory, and ops that fail on demand."""

import jax
import numpy as np

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.inputs import eval_input, pipeline
from bigtrain.pp import registry

PP = "random_crop(8, pad=1)|flip_lr|value_range(-1, 1, 0, 16)"


@registry.register("test_fail_if")
def fail_if(values: list[int], batched: bool = True):
  """Fails on examples whose label is among the values."""

  def fn(features, u):
    bad = np.isin(features["label"], values)
    if bad.any():
      raise ValueError(f"bad label {features['label']}")
    return features

  return registry.Op(fn, batched=batched, reads=("label",))


@registry.register("test_widen")
def widen():
  """Adds a feature whose shape depends on the example."""

  def fn(features, u):
    size = 2 if features["label"] == 77 else 3
    return {**features, "wide": np.zeros(size, np.float32)}

  return registry.Op(fn)


def config(pp=PP, batch_size=16, data=None, **kwargs):
  """A config whose input is the digits, unless `data` or `mixture` is set."""
  if data is None and "mixture" not in kwargs:
    data = {"type": "arrays", "name": "digits"}
  options = {"pp": pp, "batch_size": batch_size, **kwargs}
  if data is not None:
    options["data"] = data
  return settings.Config({"input": options})


def rows_of(count, **features):
  """A source of `count` rows with labels 0, 1, 2, ..."""
  return {
    "type": "arrays",
    "arrays": {"label": np.arange(count), **features},
  }


def make_train(*args, seed=0, mesh=None, **kwargs):
  """The training input of `config(*args, **kwargs)`."""
  mesh = mesh or sharding.make_mesh()
  cfg = config(*args, **kwargs)
  return pipeline.make_train(cfg.input, seed=seed, mesh=mesh)


def make_eval(data=None, pp="keep('label')", **kwargs):
  """An evaluation input, of 37 rows by default."""
  return eval_input.make_eval(
    data=data or rows_of(37),
    pp=pp,
    batch_size=16,
    mesh=sharding.make_mesh(),
    **kwargs,
  )


def fetch(iterator):
  """All batches as numpy arrays."""
  return [jax.device_get(batch) for batch in iterator]


def assert_equal(batch, expected):
  """Compares two batches, feature by feature."""
  assert batch.keys() == expected.keys()
  for name in expected:
    np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)
