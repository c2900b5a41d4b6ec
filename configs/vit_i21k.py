"""ViTs on ImageNet-21k with augmentation (AugReg), to be fine-tuned.

Command: python -m bigtrain.main --config=configs/vit_i21k.py:B/16 \
  --workdir=runs/vit_b16_i21k
Hardware: 64 accelerators or more: 300 epochs of 14 million images are a million
steps.
Result: top-1 on ILSVRC-2012's validation set once fine-tuned there at 384
pixels (configs/transfer.py:imagenet2012): 78.22% (Ti/16), 79.58% (S/32),
83.73% (S/16), 83.59% (B/32), 85.49% (B/16), 85.59% (L/16).
Source: Steiner et al. 2021, "How to train your ViT?", arxiv.org/abs/2106.10270,
and vit_i21k.py of big_vision for the recipe; the table of recommended
checkpoints in the README of google-research/vision_transformer for the numbers
and, in the names of the files, the settings.

Needs the data set `imagenet21k` as tensorflow-datasets would prepare it: the
public catalogue has none. It has one split, `full`, of `image` and `labels`, a
list of class numbers below 21,843.
"""

import ml_collections

from configs import common

NUM_CLASSES = 21_843

# Magnitude of RandAugment, and the parameter of mixup.
AUGMENTATIONS = {
  "none": (None, 0.0),
  "light1": (0, 0.0),  # Not the same as none: some operations have no strength.
  "light2": (10, 0.2),
  "medium1": (15, 0.2),
  "medium2": (15, 0.5),
  "strong1": (20, 0.5),
  "strong2": (20, 0.8),
}

# The recommended checkpoints' augmentation, and weight decay over lr. None of
# them has dropout or stochastic depth.
SETTINGS = {
  "Ti/16": ("none", 0.03),
  "S/32": ("none", 0.1),
  "S/16": ("light1", 0.03),
  "B/32": ("light1", 0.1),
  "B/16": ("medium1", 0.1),
  "L/16": ("strong1", 0.1),
}


def get_config(arg=None):
  """The config of a variant.

  Arguments:
    variant: such as "B/16".
    aug: a key of AUGMENTATIONS; that of SETTINGS unless given.
    res: of the images, in pixels.
    data_dir: of the data set.
    runlocal: a tiny run, for tests.
  """
  arg = common.parse_arg(
    arg, variant="B/16", aug="", res=224, data_dir="", runlocal=False
  )
  if arg.variant not in SETTINGS and not arg.aug:
    raise ValueError(
      f"variant={arg.variant}: give aug, which is known for "
      f"{', '.join(SETTINGS)} only"
    )
  aug, wd = SETTINGS.get(arg.variant, (arg.aug, 0.1))
  aug = arg.aug or aug
  if aug not in AUGMENTATIONS:
    raise ValueError(f"aug={aug}: expected one of {', '.join(AUGMENTATIONS)}")
  magnitude, mixup_alpha = AUGMENTATIONS[aug]
  res = arg.res if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 300
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  config.task = "classification"
  config.loss = dict(kind="sigmoid_xent", mixup_alpha=mixup_alpha)

  def data(split):
    data_dir = arg.data_dir or None
    return dict(type="tfds", name="imagenet21k", split=split, data_dir=data_dir)

  randaug = "" if magnitude is None else f"|randaug(2,{magnitude})"
  pp_common = f"|value_range(-1,1)|onehot({NUM_CLASSES})|keep('image','labels')"
  config.input = dict(
    data=data("full[51200:]"),
    pp=f"decode|inception_crop({res})|flip_lr{randaug}" + pp_common,
    batch_size=4096,
  )

  config.model_name = "vit"
  config.model = dict(
    variant=arg.variant,
    num_classes=NUM_CLASSES,
    pool_type="tok",
    posemb="learn",
    head_bias_init=-10.0,  # log(1/21843): a sigmoid for each class.
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = wd * config.lr
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=10_000)

  resize = res * 8 // 7  # 256 for 224.

  def evaluate(split):
    return dict(
      type="classification",
      pred="logits",
      loss="sigmoid_xent",
      data=data(split),
      pp=f"decode|resize_small({resize})|central_crop({res})" + pp_common,
      log_steps=5000,
      cache=False,  # As pixels, the sets would take 50 GB of memory.
    )

  config.evals = dict(
    test=evaluate("full[:25600]"),
    val=evaluate("full[25600:51200]"),
    train=evaluate("full[51200:76800]"),
  )

  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.input.data.split = "full[8:]"
    config.evals.test.data.split = "full[:4]"
    config.evals.val.data.split = "full[4:8]"
    config.evals.train.data.split = "full[8:12]"
    config.model.variant = "mu/" + arg.variant.partition("/")[2]
  return config
