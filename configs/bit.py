"""BiT-ResNet-50x1 on ILSVRC-2012 in 90 epochs.

Command: python -m bigtrain.main --config=configs/bit.py --workdir=runs/bit
Hardware: 16 accelerators with 80 GB; the authors needed 32 minutes on a TPU
v3-128.
Result: not measured, nor published for these 90 epochs. With a teacher and in
1,200 epochs the same network has 82.8% top-1 accuracy on the validation set,
arxiv.org/abs/2106.05237.
Source: Kolesnikov et al. 2020, "Big Transfer (BiT): General Visual
Representation Learning", arxiv.org/abs/1912.11370, and bit_i1k.py of
big_vision.

Needs imagenet2012, prepared by tensorflow-datasets, and imagenet_v2 for
--config.evals.v2.enabled=True.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """The config.

  Arguments:
    depth: number of layers: 50, 101, 152 or 200.
    width: factor of all numbers of channels.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(arg, depth=50, width=1.0, runlocal=False, data_dir="")
  res, resize = (224, 256) if not arg.runlocal else (32, 36)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 90
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  config.task = "classification"
  config.loss = dict(kind="softmax_xent")

  def data(name, split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "label": "int64 < 1000"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  pp_common = "|value_range(-1,1)|copy('label','labels')|keep('image','labels')"
  config.input = dict(
    data=data("imagenet2012", "train[:99%]"),
    pp=f"decode|inception_crop({res})|flip_lr" + pp_common,
    batch_size=4096,
  )

  config.model_name = "resnet"
  config.model = dict(
    num_classes=1000,
    depth=arg.depth,
    width=arg.width,
    norm="bit",
    dtype="bfloat16",
  )

  config.optimizer = dict(
    name="sgd", momentum=0.9, accumulator_dtype="bfloat16"
  )
  config.lr = 0.1 * config.input.batch_size / 256
  config.wd = 1e-4 * config.input.batch_size / 256
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=1000)

  def evaluate(name, split):
    return dict(
      type="classification",
      pred="logits",
      data=data(name, split),
      pp=f"decode|resize_small({resize})|central_crop({res})" + pp_common,
      log_steps=1000,
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
    config.model.depth = 26
    config.model.width = 0.5
  return config
