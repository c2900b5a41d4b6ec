"""Made-up data in place of the data of a config."""

import pytest

from bigtrain import sharding
from bigtrain.config import loading, settings
from bigtrain.inputs import pipeline
from bigtrain.tools.plan import meshes


@pytest.mark.slow
@pytest.mark.parametrize(
  "path, shapes",
  [
    ("vit_i1k.py:S/16", {"image": (224, 224, 3), "labels": ()}),
    ("cappa.py", {"image": (224, 224, 3), "labels": (64,)}),
    ("t5_small.py", {"inputs": (512,), "targets": (114,)}),
  ],
)
def test_real_configs_yield_batches_of_the_right_shapes(path, shapes):
  loaded = loading.load(f"configs/{path}")
  for change in meshes.without_data(loaded, None, 1000):
    loading.override(loaded, change)
  loaded["input"]["batch_size"] = 8
  train_input = pipeline.make_train(
    settings.Config(loaded).input, seed=0, mesh=sharding.make_mesh()
  )
  shapes_of_batch = {name: x.shape[1:] for name, x in train_input.spec.items()}
  assert shapes_of_batch.items() >= shapes.items()
