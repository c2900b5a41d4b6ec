"""ViTs on ILSVRC-2012 with augmentation and regularisation (AugReg).

Command: python -m bigtrain.main --config=configs/vit_i1k.py:B/16 \
  --workdir=runs/vit_b16
Hardware: 32 accelerators with 80 GB or more, for a batch of 4096 images; on
fewer, split the batch with --config.microbatches=4 or so.
Result: 78.8% (S/16), 79.2% (B/16) and 74.9% (B/32) top-1 accuracy on the
validation set, after the released models of these settings were fine-tuned on
the same data for 20,000 steps (configs/transfer.py). The paper shows their
accuracy before fine-tuning only as colours of a heat map; other variants have
no published number.
Source: Steiner et al. 2021, "How to train your ViT?", arxiv.org/abs/2106.10270,
and vit_i1k.py of big_vision for the recipe; results-imagenet.csv of timm,
models vit_*_224.augreg_in1k, for the numbers and, in the names of the released
files, the settings.

Needs imagenet2012, prepared by tensorflow-datasets, and imagenet_v2 for
--config.evals.v2.enabled=True.
"""

import ml_collections

from configs import common

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

# Augmentation, and rate of dropout and stochastic depth, from the released
# models (S/16, B/32 and B/16) or from big_vision (the others).
SETTINGS = {
  "Ti/16": ("light1", 0.0),
  "S/32": ("medium1", 0.0),
  "S/16": ("medium2", 0.0),
  "B/32": ("medium2", 0.1),
  "B/16": ("strong2", 0.1),
  "L/16": ("medium2", 0.1),
}


def get_config(arg=None):
  """The config of a variant.

  Arguments:
    variant: size and patch size, such as "B/16".
    aug: a key of AUGMENTATIONS; default: see SETTINGS.
    reg: rate of dropout and stochastic depth; default: see SETTINGS.
    res: height and width of the images, in pixels.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/16",
    aug="",
    reg=-1.0,
    res=224,
    data_dir="",
    runlocal=False,
  )
  if arg.variant not in SETTINGS and (not arg.aug or arg.reg < 0):
    raise ValueError(
      f"variant={arg.variant}: give aug and reg; only "
      f"{', '.join(SETTINGS)} have defaults"
    )
  aug, reg = SETTINGS.get(arg.variant, (arg.aug, arg.reg))
  aug = arg.aug or aug
  reg = arg.reg if arg.reg >= 0 else reg
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

  def data(name, split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "label": "int64 < 1000"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  randaug = "" if magnitude is None else f"|randaug(2,{magnitude})"
  # The fast transform of JPEGs, as in the runs with these results.
  decode = "decode(precise=False)"
  pp_common = "|value_range(-1,1)|copy('label','labels')|keep('image','labels')"
  config.input = dict(
    data=data("imagenet2012", "train[:99%]"),
    pp=f"{decode}|inception_crop({res})|flip_lr{randaug}" + pp_common,
    batch_size=4096,
  )

  config.model_name = "vit"
  config.model = dict(
    variant=arg.variant,
    num_classes=1000,
    pool_type="tok",
    posemb="learn",
    head_bias_init=-6.9,  # log(1/1000), for one sigmoid per class.
    dropout=reg,
    drop_path=reg,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 0.1 * config.lr
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=10_000)

  resize = res * 8 // 7  # 256 for 224.

  def evaluate(name, split):
    return dict(
      type="classification",
      pred="logits",
      loss="sigmoid_xent",
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
    config.model.variant = "mu/" + arg.variant.partition("/")[2]
  return config
