"""A run of 12 steps whose tasks have a state: teachers, centres, a queue."""

import os

import ml_collections

from configs import common

_VIT = dict(
  patch_size=2, width=16, depth=1, mlp_dim=32, num_heads=2, posemb="sincos2d"
)
_SCHEDULE = dict(at_percent=[0, 100], values=[0.9, 1.0], shape="cosine")


def get_config(arg=None):
  """Arguments: data (the folder of train.npz), kind ("dinov2" or "moco_v3")."""
  arg = common.parse_arg(arg, data="", kind="dinov2")
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 12
  config.log_steps = 3
  config.ckpt_steps = 2
  config.tensorboard = False

  config.input = dict(
    data=dict(type="arrays", path=os.path.join(arg.data, "train.npz")),
    pp="random_crop(8,pad=1)|value_range(-1,1,0,16)"
    "|onehot(10,key='label',key_result='labels')|keep('image','labels')",
    batch_size=8,
  )
  if arg.kind == "dinov2":
    # A teacher, two centres, a Gram teacher that is copied, and a queue.
    loss = dict(
      num_small=2,
      small_size=4,
      momentum=_SCHEDULE,
      gram_weight=1.0,
      gram_copies=dict(at_steps=[0, 12], values=[0, 4]),
    )
    config.task = dict(
      dino=dict(type="dinov2", weight=1.0, loss=loss),
      queue=dict(type="tiny.queueing", weight=0.1, from_steps=4),
    )
    config.model_name = "dinov2"
    config.model = dict(
      **_VIT,
      num_classes=10,
      head_zeroinit=False,  # Or the queue would hold zeros alone.
      num_prototypes=8,
      patch_prototypes=6,
      head_hidden=16,
      head_out=8,
    )
  else:
    config.task = "moco_v3"
    config.loss = dict(momentum=_SCHEDULE)
    config.model_name = "contrastive_vit"
    config.model = dict(
      **_VIT, pool_type="gap", predictor_layers=2, head_hidden=16, head_out=8
    )

  config.optimizer = dict(name="adam")
  config.lr = 1e-3
  config.schedule = dict(decay_type="cosine", warmup_steps=2)
  config.evals = {}
  return config
