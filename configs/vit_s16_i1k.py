"""ViT-S/16 on ILSVRC-2012 in 90 epochs: the plain baseline.

Command: python -m bigtrain.main --config=configs/vit_s16_i1k.py \
  --workdir=runs/vit_s16 [--config.total_epochs=300]
Hardware: 8 accelerators with 80 GB; the authors needed 6 to 7 hours on a TPU
v3-8.
Result: 76.5% top-1 accuracy on the validation set (val/acc); 80% after 300
epochs.
Source: Beyer, Zhai and Kolesnikov 2022, "Better plain ViT baselines for
ImageNet-1k", arxiv.org/abs/2205.01580, and vit_s16_i1k.py of big_vision, which
has a tanh layer before the head. According to the paper, accuracy is the same
without that layer: --config.model.rep_size=False.

Needs imagenet2012, prepared by tensorflow-datasets, and imagenet_v2 for
--config.evals.v2.enabled=True.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """The config.

  Arguments:
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(arg, runlocal=False, data_dir="")
  res, resize = (224, 256) if not arg.runlocal else (32, 36)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 90
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  config.task = "classification"
  config.loss = dict(kind="softmax_xent", mixup_alpha=0.2)

  def data(name, split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "label": "int64 < 1000"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  # The fast transform of JPEGs, as in the runs with these results.
  decode = "decode(precise=False)"
  pp_common = "|value_range(-1,1)|copy('label','labels')|keep('image','labels')"
  config.input = dict(
    data=data("imagenet2012", "train[:99%]"),
    pp=f"{decode}|inception_crop({res})|flip_lr|randaug(2,10)" + pp_common,
    batch_size=1024,
  )

  config.model_name = "vit"
  config.model = dict(
    variant="S/16",
    num_classes=1000,
    pool_type="gap",
    posemb="sincos2d",
    rep_size=True,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=10_000)

  def evaluate(name, split):
    return dict(
      type="classification",
      pred="logits",
      data=data(name, split),
      pp=f"{decode}|resize_small({resize})|central_crop({res})" + pp_common,
      log_steps=2500,
      cache=False,  # The decoded images would take 60 GB of memory.
    )

  config.evals = dict(
    train=evaluate("imagenet2012", "train[:2%]"),
    minival=evaluate("imagenet2012", "train[99%:]"),
    val=evaluate("imagenet2012", "validation"),
    v2=evaluate("imagenet_v2/matched-frequency", "test"),
  )
  config.evals.v2.enabled = False

  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.model.variant = "mu/16"
  return config
