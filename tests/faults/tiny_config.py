"""A run of 24 steps that uses every kind of state in a checkpoint.

Dropout, mixup and random crops draw random numbers; the net has running
statistics and an exponential moving average; a row is the mean of three steps,
and some checkpoints fall between them. The examples are real digits, each with
an id, written by program.write_data.
"""

import os

import ml_collections

from configs import common

_MODELS = {
  "net": (
    "tiny.net",
    # Wide enough for a file to be cut in the middle.
    dict(num_classes=10, width=512, dropout=0.1, statistics=True),
  ),
  "vit": (
    "vit",
    dict(
      num_classes=10,
      patch_size=4,
      width=16,
      depth=1,
      mlp_dim=32,
      num_heads=2,
      pool_type="gap",
      posemb="learn",
      dropout=0.1,
    ),
  ),
}


def get_config(arg=None):
  """Arguments: data (the folder of train.npz and val.npz), model."""
  arg = common.parse_arg(arg, data="", model="net")
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 24
  config.log_steps = 3
  config.ckpt_steps = 2
  config.tensorboard = False

  config.task = "faults.noting_task"
  config.loss = dict(mixup_alpha=0.2)

  def source(name):
    return dict(type="arrays", path=os.path.join(arg.data, f"{name}.npz"))

  pp = "{}value_range(-1,1,0,16)|onehot(10,key='label',key_result='labels')"
  pp += "|keep('image','labels','id')"
  config.input = dict(
    data=source("train"),
    pp=pp.format("random_crop(8,pad=1)|"),
    batch_size=8,
  )
  config.model_name, config.model = _MODELS[arg.model]

  config.optimizer = dict(name="adam")
  config.lr = 1e-3
  config.schedule = dict(decay_type="cosine", warmup_steps=2)
  config.ema_decay = 0.9

  config.evals = {}
  config.evals.val = dict(
    type="classification",
    pred="logits",
    data=source("val"),
    pp=pp.format(""),
    log_steps=4,
  )
  return config
