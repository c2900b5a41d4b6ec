"""Fine-tunes a ViT on another data set (the AugReg recipe).

Command: python -m bigtrain.main --workdir=runs/cifar10 \
  --config=configs/transfer.py:cifar10,init=B_32.npz
Hardware: 8 accelerators with 16 GB for B/32; more for larger variants.
Result: top-1 accuracy on the test set (test/acc) with B/32 from ImageNet-21k:
98.55% (cifar10), 91.35% (cifar100), 83.27% (imagenet2012), 93.78%
(oxford_iiit_pet), 99.43% (oxford_flowers102).
Source: recipe and results of transfer.py of big_vision. The results are means
of five runs with this model of Steiner et al. 2021, arxiv.org/abs/2106.10270:
storage.googleapis.com/vit_models/augreg/
  B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz

`init` is a published ViT (.npz), or the workdir of a run of vit_i21k.py or
vit_i1k.py. A run of vit_s16_i1k.py has other layers and needs variant=S/16 and
--config.model.pool_type=gap --config.model.posemb=sincos2d
--config.model.rep_size=True. The head is always new.
Needs the data set, prepared by tensorflow-datasets.
"""

from typing import NamedTuple

import ml_collections

from configs import common


class Task(NamedTuple):
  """Settings of a data set, which the authors tuned on its validation split.

  Attributes:
    num_classes: number of classes.
    train: split for training.
    val: split for validation.
    test: split for the test.
    total_steps: length of the run.
    warmup_steps: steps of linear warm-up.
    crop: a key of CROPS.
    lr: peak learning rate.
  """

  num_classes: int
  train: str
  val: str
  test: str
  total_steps: int
  warmup_steps: int
  crop: str
  lr: float


INIT = "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz"

TASKS = {
  "cifar10": Task(
    num_classes=10,
    train="train[:98%]",
    val="train[98%:]",
    test="test",
    total_steps=10_000,
    warmup_steps=500,
    crop="resmall",
    lr=0.003,
  ),
  "cifar100": Task(
    num_classes=100,
    train="train[:98%]",
    val="train[98%:]",
    test="test",
    total_steps=10_000,
    warmup_steps=500,
    crop="resmall",
    lr=0.01,
  ),
  "imagenet2012": Task(
    num_classes=1000,
    train="train[:99%]",
    val="train[99%:]",
    test="validation",
    total_steps=20_000,
    warmup_steps=500,
    crop="inception",
    lr=0.03,
  ),
  "oxford_iiit_pet": Task(
    num_classes=37,
    train="train[:90%]",
    val="train[90%:]",
    test="test",
    total_steps=500,
    warmup_steps=100,
    crop="inception",
    lr=0.003,
  ),
  "oxford_flowers102": Task(
    num_classes=102,
    train="train[:90%]",
    val="train[90%:]",
    test="test",
    total_steps=500,
    warmup_steps=100,
    crop="inception",
    lr=0.003,
  ),
}

CROPS = {
  "inception": "inception_crop({res})",
  "resmall": "resize_small({resize})|random_crop({res})",
  "resize": "resize({resize})|random_crop({res})",
}


def get_config(arg=None):
  """The config of a data set.

  Arguments:
    dataset: a key of TASKS.
    init: checkpoint to start from; default: INIT, or none with `runlocal`.
    variant: size of the model in `init`.
    crop: a key of CROPS; default: see TASKS.
    res: height and width of the images, in pixels.
    resize: size of the images before the crop, in pixels; usually 256 for a
      `res` of 224.
    data_dir: folder of the data set.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    dataset="cifar10",
    init="",
    variant="B/32",
    crop="",
    res=384,
    resize=448,
    data_dir="",
    runlocal=False,
  )
  if arg.dataset not in TASKS:
    raise ValueError(f"dataset={arg.dataset}: expected one of {[*TASKS]}")
  task = TASKS[arg.dataset]
  crop = arg.crop or task.crop
  if crop not in CROPS:
    raise ValueError(f"crop={crop}: expected one of {[*CROPS]}")
  # More patches than in a tiny pretraining run, so that position embeddings are
  # resampled.
  res, resize = (arg.res, arg.resize) if not arg.runlocal else (64, 72)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = task.total_steps
  config.log_steps = 10
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  config.task = "classification"
  config.loss = dict(kind="softmax_xent")

  def data(split):
    if arg.runlocal and not arg.data_dir:
      label = f"int64 < {task.num_classes}"
      features = {"image": "jpeg[40,40,3]", "label": label}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name=arg.dataset, split=split, data_dir=data_dir)

  # The fast transform of JPEGs, as in the runs with these results.
  decode = "decode(precise=False)"
  pp_common = "|value_range(-1,1)|copy('label','labels')|keep('image','labels')"
  pp_crop = CROPS[crop].format(res=res, resize=resize)
  config.input = dict(
    data=data(task.train),
    pp=f"{decode}|{pp_crop}|flip_lr" + pp_common,
    batch_size=512,
  )

  config.model_name = "vit"
  config.model = dict(
    variant=arg.variant,
    num_classes=task.num_classes,
    pool_type="tok",
    posemb="learn",
    dtype="bfloat16",
  )
  if arg.init or not arg.runlocal:
    config.model_init = dict(
      path=arg.init or INIT,
      rename=[("head/.*", None)],
      allow_missing=["head/.*"],
      convert=dict(posemb_align="corners"),  # As big_vision does.
    )

  config.optimizer = dict(
    name="sgd", momentum=0.9, accumulator_dtype="bfloat16"
  )
  config.lr = task.lr
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=task.warmup_steps)

  def evaluate(split):
    return dict(
      type="classification",
      pred="logits",
      data=data(split),
      pp=f"{decode}|resize_small({resize})|central_crop({res})" + pp_common,
      log_percent=5,
      cache=False,  # A decoded test set can take 90 GB of memory.
    )

  config.evals = dict(val=evaluate(task.val), test=evaluate(task.test))

  if arg.runlocal:
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.model.variant = "mu/" + arg.variant.partition("/")[2]
  return config
