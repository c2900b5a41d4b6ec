"""A small ViT on scikit-learn's handwritten digits: the quickstart.

Command: make train, which is
  python -m bigtrain.main --config=configs/digits.py --workdir=runs/digits
Hardware: any; two CPU cores need about a minute.
Result: 0.992 top-1 on the held-out fifth; 0.983 to 0.992 over four seeds.
Source: our own runs, see docs/benchmarks.md. The data are 1,797 real images of
8 x 8 pixels (Alpaydin and Kaynak 1998, UCI), which scikit-learn includes.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: runlocal (a few steps, for tests)."""
  arg = common.parse_arg(arg, runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 1400 if not arg.runlocal else 4
  config.log_steps = 50 if not arg.runlocal else 2
  config.ckpt_steps = 300 if not arg.runlocal else 2
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "classification"
  config.loss = dict(kind="softmax_xent", mixup_alpha=0.4)

  # Pixels are 0..16 and the background is 0. random_crop pads with 0, so it
  # comes before value_range.
  pp = "{}value_range(-1,1,0,16)|onehot(10,key='label',key_result='labels')"
  pp += "|keep('image','labels')"
  config.input = dict(
    data=dict(type="arrays", name="digits", split="train"),
    pp=pp.format("random_crop(8,pad=1)|"),
    batch_size=128 if not arg.runlocal else 16,
  )

  config.model_name = "vit"
  config.model = dict(
    num_classes=10,
    patch_size=2,
    width=64,
    depth=4,
    mlp_dim=256,
    num_heads=4,
    pool_type="gap",
    posemb="learn",
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.99)
  config.lr = 3e-3
  config.wd = 1e-3
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=8)

  config.evals = {}
  config.evals.val = dict(
    type="classification",
    pred="logits",
    data=dict(type="arrays", name="digits", split="test"),
    pp=pp.format(""),
    log_steps=200 if not arg.runlocal else 2,
  )
  return config


def get_sweep():
  """Variants for `python -m bigtrain.tools.sweep`."""
  return {"lr": [1e-3, 3e-3], "model.depth": [2, 4]}
