"""A small student of the quickstart's ViT: distillation on digits.

Command:
  make train; python -m bigtrain.main \\
    --config=configs/digits_distill.py --workdir=runs/digits_distill
Hardware: any; two CPU cores need about a minute.
Result: 0.961 top-1 on the held-out fifth with 15,250 parameters, one seed; the
teacher of that run has 202,058 and 0.986.
Source: our own run. The recipe is that of Beyer et al. 2021
(arxiv.org/abs/2106.05237): the same views for both models, strong mixup, no
labels, and many epochs.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: teacher (its workdir), runlocal (a few steps, for tests).

  With runlocal the teacher has fresh parameters.
  """
  arg = common.parse_arg(arg, teacher="runs/digits", runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 1400 if not arg.runlocal else 4
  config.log_steps = 50 if not arg.runlocal else 2
  config.ckpt_steps = 300 if not arg.runlocal else 2

  config.task = "distillation"
  config.loss = dict(distance="kl", temperature=1.0, mixup_alpha=1.0)
  config.teacher = dict(
    model_name="vit",
    model=dict(
      num_classes=10,
      patch_size=2,
      width=64,
      depth=4,
      mlp_dim=256,
      num_heads=4,
      pool_type="gap",
      posemb="learn",
      # From a head of zeros there would be nothing to learn.
      head_zeroinit=not arg.runlocal,
    ),
    model_init=arg.teacher if not arg.runlocal else None,
  )

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
    width=24,
    depth=2,
    mlp_dim=96,
    num_heads=3,
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
