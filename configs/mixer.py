"""MLP-Mixer-B/16 on ILSVRC-2012 in 300 epochs.

Command: python -m bigtrain.main --config=configs/mixer.py \
  --workdir=runs/mixer [--config.total_epochs=60]
Hardware: 64 accelerators with 80 GB; the authors needed 2 hours and 11 minutes
on a TPU v3-128.
Result: 76.3% top-1 accuracy on the validation set (val/acc); 70.5% after 60
epochs.
Source: Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision",
arxiv.org/abs/2105.01601, and mlp_mixer_i1k.py of big_vision.

Needs imagenet2012, prepared by tensorflow-datasets, and imagenet_v2 for
--config.evals.v2.enabled=True.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the model: S/16, B/16, L/16, H/14.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(arg, variant="B/16", runlocal=False, data_dir="")
  res, resize = (224, 256) if not arg.runlocal else (32, 36)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 300
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  config.task = "classification"
  config.loss = dict(kind="sigmoid_xent", mixup_alpha=0.5)

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
    pp=f"{decode}|inception_crop({res})|flip_lr|randaug(2,15)" + pp_common,
    batch_size=4096,
  )

  config.model_name = "vit"
  config.model = dict(
    variant=f"Mixer-{arg.variant}",
    num_classes=1000,
    head_bias_init=-6.9,
    drop_path=0.1,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(
    decay_type="linear", warmup_steps=10_000, linear_end=1e-5
  )

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
    config.model.variant = "Mixer-mu/16"
  return config
