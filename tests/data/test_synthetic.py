"""Random examples of declared types and shapes."""

import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.data import synthetic
from bigtrain.inputs import pipeline

FEATURES = {
  "tokens": "int32[6] < 11",
  "weight": "float32",
  "pixels": "uint8[4, 4, 3]",
  "labels": "int64[?] < 3",
  "text": "text",
  "captions": "text[?]",
}


def test_examples_match_their_declaration():
  source = synthetic.Source(FEATURES, num_examples=50)
  assert source.spec["tokens"] == (np.int32, (6,))
  assert source.spec["labels"] == (np.int64, (None,))
  assert source.spec["captions"] == (bytes, (None,))
  assert source.vocab_sizes == {"tokens": 11, "labels": 3}
  batch = source.read(np.arange(len(source)))
  assert batch["tokens"].shape == (50, 6)
  assert set(batch["tokens"].ravel().tolist()) == set(range(11))
  assert batch["weight"].dtype == np.float32
  assert batch["pixels"].dtype == np.uint8 and batch["pixels"].max() > 200
  assert {len(row) for row in batch["labels"]} == {1, 2, 3}
  assert max(row.max() for row in batch["labels"]) == 2
  assert all(isinstance(text, bytes) for text in batch["text"])
  assert isinstance(batch["captions"][0][0], bytes)


def test_an_example_depends_only_on_its_number():
  source = synthetic.Source(FEATURES)
  some, one = source.read(np.asarray([7, 3, 7])), source.read(np.asarray([7]))
  for name in FEATURES:
    np.testing.assert_array_equal(some[name][0], some[name][2])
    np.testing.assert_array_equal(some[name][0], one[name][0])
  assert (some["pixels"][0] != some["pixels"][1]).any()
  other = synthetic.Source(FEATURES, seed=1).read(np.asarray([7]))
  assert (other["pixels"] != one["pixels"]).any()


def test_pictures_go_through_preprocessing():
  data = dict(
    type="synthetic",
    features={"image": "jpeg[40,50,3]", "labels": "int64[?] < 10"},
    num_examples=64,
  )
  config = settings.Config(
    {
      "data": data,
      "pp": "decode|inception_crop(16)|onehot(10)|keep('image','labels')",
      "batch_size": 8,
    }
  )
  train = pipeline.make_train(config, seed=0, mesh=sharding.make_mesh())
  assert train.spec["image"].shape == (8, 16, 16, 3)
  batches = train.start(0, 1)
  batch = next(batches)
  batches.close()
  assert batch["image"].std() > 5
  assert set(np.asarray(batch["labels"]).sum(1).tolist()) <= {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
  "text, message",
  [
    ("int33[4]", "kind: unknown 'int33'. Did you mean 'int32'?"),
    ("int32[4", "expected KIND"),
    ("float32 < 5", "only integers"),
    ("jpeg[4,4]", r"expected jpeg\[height,width,channels\]"),
    (5, "expected KIND"),
  ],
)
def test_mistakes(text, message):
  with pytest.raises(ConfigError, match=message) as error:
    synthetic.Source({"x": text})
  assert "features.x" in str(error.value)
