"""Batches of two processes: a part of a job of support/two_processes.py."""

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.inputs import eval_input, pipeline

DATA = {"type": "arrays", "name": "digits", "split": "test[:37]"}


def make(folder):
  """Returns [labels of training, masks of evaluation], as lists of batches.

  A batch is a list of this process's shards: [[start, stop], values].
  """
  del folder
  mesh = sharding.make_mesh(2, 4)
  config = settings.Config({"data": DATA, "pp": "", "batch_size": 16})
  train = pipeline.make_train(config, seed=0, mesh=mesh)
  held_out = eval_input.make_eval(data=DATA, pp="", batch_size=16, mesh=mesh)
  return [
    [_shards(batch["label"]) for batch in train.start(5, 7)],
    [_shards(batch["_mask"]) for batch in held_out.batches()],
  ]


def _shards(array):
  return [
    [shard.index[0].indices(16)[:2], shard.data.tolist()]
    for shard in array.addressable_shards
  ]
