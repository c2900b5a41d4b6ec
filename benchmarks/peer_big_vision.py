"""Config of big_vision's train.py with model, data and batch of jpegs.py.

  python -m big_vision.train --workdir= \\
    --config=benchmarks/peer_big_vision.py:index.jsonl,S/16,64,8
"""

from typing import Any

import ml_collections


def get_config(arg: str) -> Any:
  """A training config.

  Args:
    arg: index of the images, variant, size in pixels, batch size and,
      optionally, the number of steps, with a checkpoint at the end.
  """
  index, variant, size, batch_size, *steps = arg.split(",")
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.total_steps = int(steps[0]) if steps else 1_000_000
  if steps:
    config.ckpt_steps = config.total_steps
  config.log_training_steps = 10
  config.num_classes = 1000
  config.loss = "softmax_xent"
  config.input = dict(
    data=dict(name="bv:jsonl", fname=index, fopen_keys=("image",)),
    pp=(
      f"decode_jpeg_and_inception_crop({size})|flip_lr|value_range(-1, 1)"
      '|onehot(1000, key="label", key_result="labels")|keep("image", "labels")'
    ),
    batch_size=int(batch_size),
    shuffle_buffer_size=1000,
  )
  config.pp_modules = ["ops_general", "ops_image"]
  config.model_name = "vit"
  config.model = dict(variant=variant, pool_type="gap")
  config.grad_clip_norm = 1.0
  config.optax_name = "scale_by_adam"
  config.lr = 1e-4
  config.wd = 1e-4
  config.schedule = dict(decay_type="cosine", warmup_steps=1000)
  return config
