"""Saved predictions."""

import os

import numpy as np
import pytest
from tiny import evaluating

from bigtrain.config.errors import ConfigError

N, C = 21, 7  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
LOGITS = RNG.integers(-3, 4, size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C, size=N)
DATA = dict(
  type="arrays",
  arrays=dict(x=LOGITS, labels=LABELS, id=np.arange(N) + 100),
)


def test_the_file_has_one_row_per_example(tmp_path):
  def several(variables, batch):
    return {"logits": batch["x"], "sums": {"all": batch["x"].sum(-1)}}

  evaluator = evaluating.build(
    "save",
    several,
    evaluating.context(workdir=str(tmp_path), name="out"),
    data=DATA,
    keys=["id", "labels"],
  )
  assert evaluator.run({}, 12) == {"num_examples": N}
  assert os.listdir(tmp_path / "predictions") == ["out-00000012.npz"]
  with np.load(tmp_path / "predictions" / "out-00000012.npz") as file:
    arrays = dict(file)
  assert set(arrays) == {
    "predictions/logits",
    "predictions/sums/all",
    "id",
    "labels",
  }
  np.testing.assert_array_equal(arrays["id"], np.arange(N) + 100)
  np.testing.assert_array_equal(arrays["labels"], LABELS)
  np.testing.assert_array_equal(arrays["predictions/logits"], LOGITS)
  np.testing.assert_allclose(arrays["predictions/sums/all"], LOGITS.sum(-1))


def test_an_unknown_key():
  message = r"config.evals.val: .*'ids'.* mean 'id'"
  evaluator = evaluating.build(
    "save", lambda variables, batch: batch["x"], data=DATA, keys=["ids"]
  )
  with pytest.raises(ConfigError, match=message):
    evaluator.run({}, 1)
