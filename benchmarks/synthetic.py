"""Config of a ViT on images of noise, and the data source.

--config=benchmarks/synthetic.py:variant=S/16,depth=12,size=64,batch_size=8
"""

from typing import Any

import numpy as np

from benchmarks import pool
from configs import common

_POOL = 64  # Number of different images.
_CLASSES = 1000


def get_config(arg: str | None = None) -> Any:
  """A training config.

  Args:
    arg: variant, depth (default: depth of the variant), scan, size of the
      images in pixels, batch_size.
  """
  options = common.parse_arg(
    arg, variant="S/16", depth=None, scan=False, size=64, batch_size=8
  )
  config = common.parse_arg(None)
  config.seed = 0
  config.total_steps = 1_000_000
  config.log_steps = 50
  config.ckpt_steps = 1_000_000
  config.task = "classification"
  config.loss = dict(kind="softmax_xent")
  config.input = dict(
    data=dict(type="benchmarks.synthetic", size=options.size),
    batch_size=options.batch_size,
  )
  config.model_name = "vit"
  config.model = dict(
    variant=options.variant,
    num_classes=_CLASSES,
    depth=options.depth,
    scan=options.scan,
  )
  config.optimizer = dict(name="adam")
  config.lr = 1e-4
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=1000)
  return config


class Source(pool.Pool):
  """Images of noise with labels; a small pool repeats.

  Args:
    size: height and width in pixels.
  """

  def __init__(self, size: int):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(_POOL, size, size, 3)).astype(np.float32)
    labels = rng.integers(_CLASSES, size=_POOL)
    super().__init__({"image": image, "labels": labels}, "synthetic image")
