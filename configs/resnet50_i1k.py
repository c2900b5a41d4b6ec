"""ResNet-50 v1.5 on ILSVRC-2012 in 90 epochs.

Command: python -m bigtrain.main --config=configs/resnet50_i1k.py \
  --workdir=runs/resnet50
Hardware: 8 accelerators with 80 GB; the authors needed 3 hours on eight A100,
and 14 hours on one.
Result: 77.1% +- 0.1% top-1 accuracy on the validation set (val/acc).
Source: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/
resnet50v1.5, README.md and configs.yml: 90 epochs in mixed precision.

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
  config.loss = dict(kind="softmax_xent", label_smoothing=0.1)

  def data(name, split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "label": "int64 < 1000"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  pp_common = "|vgg_value_range|copy('label','labels')|keep('image','labels')"
  pp_train = "decode|inception_crop({},8,ratio_max=1.3333,antialias=True)"
  pp_eval = "decode|resize_small({},'bilinear',antialias=True)|central_crop({})"
  config.input = dict(
    data=data("imagenet2012", "train"),
    pp=pp_train.format(res) + "|flip_lr" + pp_common,
    batch_size=2048,
  )
  # Batch statistics are computed over each microbatch of 256 images, as in the
  # source. On many devices, a single microbatch of 2048 is faster.
  config.microbatches = 8

  config.model_name = "resnet"
  config.model = dict(depth=50, num_classes=1000, dtype="bfloat16")

  config.optimizer = dict(name="sgd", momentum=0.875)
  config.lr = 0.256 * config.input.batch_size / 256
  config.wd = 1 / 32768
  config.wd_coupling = "gradient"
  config.wd_mults = [(".*/kernel", 1.0), ("head/bias", 1.0)]
  config.schedule = dict(decay_type="cosine", warmup_epochs=8)

  def evaluate(name, split):
    return dict(
      type="classification",
      pred="logits",
      data=data(name, split),
      pp=pp_eval.format(resize, res) + pp_common,
      log_steps=2500,
      cache=False,  # The decoded images would take 50 GB of memory.
    )

  config.evals = dict(
    train=evaluate("imagenet2012", "train[:2%]"),
    val=evaluate("imagenet2012", "validation"),
    v2=evaluate("imagenet_v2/matched-frequency", "test"),
  )
  config.evals.v2.enabled = False

  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 3
    config.log_steps = 1
    config.schedule = dict(decay_type="cosine", warmup_steps=1)
    config.input.batch_size = 16
    config.microbatches = 2
    config.model.depth = 26
    config.model.width = 0.125
  return config
