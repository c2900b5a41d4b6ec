"""ViTs on ImageNet-21k with augmentation (AugReg), to be fine-tuned.

Command: python -m bigtrain.main --config=configs/vit_i21k.py:B/16 \
  --workdir=runs/vit_b16_i21k
Hardware: 64 accelerators with 80 GB or more: 300 epochs of 14 million images
are a million steps.
Result: top-1 accuracy on ILSVRC-2012's validation set after fine-tuning there
at 384 pixels (configs/transfer.py:imagenet2012): 78.22% (Ti/16), 79.58% (S/32),
83.73% (S/16), 83.59% (B/32), 85.49% (B/16), 85.59% (L/16).
Source: Steiner et al. 2021, "How to train your ViT?", arxiv.org/abs/2106.10270,
and vit_i21k.py of big_vision for the recipe; the table of recommended
checkpoints in the README of google-research/vision_transformer for the numbers
and, in the names of the files, the settings.

Needs the data set `imagenet21k` in the layout of tensorflow-datasets, whose
public catalogue does not include it: one split, `full`, with `image` and
`labels`, a list of class numbers below 21,843.
"""

import ml_collections

from configs import common

NUM_CLASSES = 21_843

# Magnitude of RandAugment, and alpha of mixup.
AUGMENTATIONS = {
  "none": (None, 0.0),
  "light1": (0, 0.0),  # Not "none": some operations ignore the magnitude.
  "light2": (10, 0.2),
  "medium1": (15, 0.2),
  "medium2": (15, 0.5),
  "strong1": (20, 0.5),
  "strong2": (20, 0.8),
}

# Augmentation, and weight decay divided by lr, of the recommended checkpoints.
# None of them uses dropout or stochastic depth.
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
    variant: size and patch size, such as "B/16".
    aug: a key of AUGMENTATIONS; default: see SETTINGS.
    res: height and width of the images, in pixels.
    data_dir: folder of the data set.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg, variant="B/16", aug="", res=224, data_dir="", runlocal=False
  )
  if arg.variant not in SETTINGS and not arg.aug:
    raise ValueError(
      f"variant={arg.variant}: give aug; only {', '.join(SETTINGS)} have "
      "defaults"
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
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "labels": "int64[2] < 21843"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name="imagenet21k", split=split, data_dir=data_dir)

  n = 25_600 if not arg.runlocal else 4  # Size of each evaluation.
  randaug = "" if magnitude is None else f"|randaug(2,{magnitude})"
  # The fast transform of JPEGs, as in the runs with these results.
  decode = "decode(precise=False)"
  pp_common = f"|value_range(-1,1)|onehot({NUM_CLASSES})|keep('image','labels')"
  config.input = dict(
    data=data(f"full[{2 * n}:]"),
    pp=f"{decode}|inception_crop({res})|flip_lr{randaug}" + pp_common,
    batch_size=4096,
  )

  config.model_name = "vit"
  config.model = dict(
    variant=arg.variant,
    num_classes=NUM_CLASSES,
    pool_type="tok",
    posemb="learn",
    head_bias_init=-10.0,  # log(1/21843), for one sigmoid per class.
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
      pp=f"{decode}|resize_small({resize})|central_crop({res})" + pp_common,
      log_steps=5000,
      cache=False,  # The decoded images would take 50 GB of memory.
    )

  config.evals = dict(
    test=evaluate(f"full[:{n}]"),
    val=evaluate(f"full[{n}:{2 * n}]"),
    train=evaluate(f"full[{2 * n}:{3 * n}]"),
  )

  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.model.variant = "mu/" + arg.variant.partition("/")[2]
  return config
