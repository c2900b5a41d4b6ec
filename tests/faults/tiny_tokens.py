"""A language model on packed documents, with their numbers in the rows.

The last window of the evaluation set is not full, nor is its last batch.
`write` makes the data.
"""

import os

import ml_collections
import numpy as np

from configs import common

_VOCAB_SIZE = 64
_END = 0


def write(folder):
  """Writes train.bin and val.bin: documents of random lengths."""
  rng = np.random.default_rng(0)
  for name, number in (("train", 300), ("val", 70)):
    sizes = rng.integers(2, 20, number)
    documents = [[*rng.integers(1, _VOCAB_SIZE, n), _END] for n in sizes]
    path = os.path.join(folder, f"{name}.bin")
    np.concatenate(documents).astype(np.uint16).tofile(path)


def get_config(arg=None):
  """Arguments: data (the folder that was passed to `write`)."""
  arg = common.parse_arg(arg, data="")
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 6
  config.log_steps = 1
  config.ckpt_steps = 100
  config.tensorboard = False

  config.task = "faults.noting_tokens"

  def source(name):
    return dict(
      type="tokens",
      path=os.path.join(arg.data, f"{name}.bin"),
      length=16,
      packing=True,
      eos_id=_END,
      vocab_size=_VOCAB_SIZE,
    )

  config.input = dict(data=source("train"), batch_size=48)
  config.model_name = "decoder"
  config.model = dict(
    variant="llama",
    vocab_size=_VOCAB_SIZE,
    width=16,
    depth=1,
    num_heads=2,
    mlp_dim=32,
  )
  config.optimizer = dict(name="adam")
  config.lr = 1e-2
  config.schedule = dict(decay_type="cosine")

  config.evals = {}
  config.evals.val = dict(
    type="perplexity", pred="perplexity", data=source("val"), log_steps=2
  )
  return config
