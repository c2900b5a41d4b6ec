"""DINOv2 on ILSVRC-2012: a ViT-L/16 by self-distillation, without labels.

Command: python -m bigtrain.main --config=configs/dinov2.py \\
    --workdir=runs/dinov2
  and, on scikit-learn's digits, in two minutes on two CPU cores:
  python -m bigtrain.main --config=configs/dinov2.py:runlocal \\
    --workdir=runs/dinov2
Hardware: 64 accelerators with 80 GB.
Result: not measured. Published for this recipe on ImageNet-1k, "vitl16_short"
of DINOv2's code: 81.6% accuracy of the 20 nearest neighbours. The run on
digits: 0.72 accuracy of the 10 nearest neighbours with the teacher's features
(knn/10nn_acc), 0.77 with the student's; 0.55 with the random ones of step 0.
Source: Oquab et al. 2023, "DINOv2", arxiv.org/abs/2304.07193, and vitl16_short
in its code: prototypes, temperatures, crops, masks, momentum, KoLeo, clipping,
drop path and layer scale. Different, and our guesses: weight decay stays at
0.04 (theirs rises to 0.2); one learning rate for all layers; no blur and no
color jitter, but random contrast; separate prototypes for patches; Adam's
moments in bfloat16; crops of a picture of 256 pixels.

With `gram`, DINOv3's Gram anchoring in the last fifth (Simeoni et al. 2025,
arxiv.org/abs/2508.10104, and vit7b16_gram_anchor in its code): weight 2, four
copies of the teacher, which sees the crops at twice the size. Our guesses: the
last fifth of a short run, and that the first copy is made at 60% (theirs
begins after 1,000,000 steps and has a copy each 10,000).

Needs imagenet2012, prepared by tensorflow-datasets.
"""

import ml_collections

from configs import common

DIGITS = dict(type="arrays", name="digits")


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the ViT.
    data_dir: folder of the data set.
    gram: whether Gram anchoring keeps the similarities of patches at the end.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(
    arg, variant="L/16", data_dir="", gram=False, runlocal=False
  )
  digits = arg.runlocal and not arg.data_dir
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 100
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "dinov2"
  config.loss = dict(
    num_small=8,
    large_size=224,
    small_size=96,
    large_area=(0.32, 1.0),
    small_area=(0.05, 0.32),
    flip=True,
    contrast=0.4,
    mask_prob=0.5,
    mask_ratio=(0.1, 0.5),
    centering="sinkhorn",
    teacher_temperature=dict(at_percent=[0, 30], values=[0.04, 0.07]),
    student_temperature=0.1,
    patch_weight=1.0,
    koleo_weight=0.1,
    momentum=dict(at_percent=[0, 100], values=[0.992, 1.0], shape="cosine"),
  )
  if arg.gram:
    config.loss.update(
      gram_weight=dict(at_percent=[0, 80], values=[0.0, 2.0], shape="stair"),
      gram_copies=dict(
        at_percent=[0, 60, 85, 90, 95], values=[0, 1, 2, 3, 4], shape="stair"
      ),
      gram_size=2 * config.loss.large_size,
    )

  def data(split):
    if digits:
      return dict(**DIGITS, split="test" if split == "validation" else "train")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  res = 224 if not arg.runlocal else 32
  resize = 256 if not arg.runlocal else 36
  plain = "decode|resize_small({})|central_crop({})|value_range(-1,1)"
  whole, central = plain.format(resize, resize), plain.format(resize, res)
  if digits:
    whole = central = "value_range(-1,1,0,16)"
  config.input = dict(
    data=data("train"), pp=f"{whole}|keep('image')", batch_size=2048
  )

  config.model_name = "dinov2"
  config.model = dict(
    variant=arg.variant,
    posemb="learn",
    posemb_grid=(14, 14),
    posemb_class=True,
    layer_scale=1e-5,
    drop_path=0.3,
    num_prototypes=65536,
    patch_prototypes=65536,
    head_hidden=2048,
    head_out=256,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 4e-3 * (2048 / 1024) ** 0.5
  config.wd = 0.04
  config.wd_coupling = "lr"
  config.grad_clip_norm = 3.0
  config.schedule = dict(decay_type="cosine", warmup_percent=10)

  def evaluate(weights):
    return dict(
      type="knn",
      pred="pre_logits",
      weights=weights,
      data=data("train"),
      test_data=data("validation"),
      pp=f"{central}|keep('image','label')",
      k=(10, 20),
      log_percent=25,
    )

  config.evals = dict(knn=evaluate("teacher"), student=evaluate("params"))
  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 400 if digits else 3
    config.log_steps = 50 if digits else 1
    config.input.batch_size = 128 if digits else 16
    config.lr = 5e-4
    grid = (4, 4) if digits else (2, 2)
    config.model.update(
      variant="mu/2" if digits else "mu/16",
      width=64,
      posemb_grid=grid,
      layer_scale=0.1,
      drop_path=0.0,
      num_prototypes=128,
      patch_prototypes=128,
      head_hidden=128,
      head_out=32,
      dtype="float32",
    )
    # Small crops need pictures of several patches.
    config.loss.update(
      num_small=2,
      large_size=8 if digits else 32,
      small_size=6 if digits else 16,
      large_area=(0.7, 1.0),
      small_area=(0.4, 0.7),
      flip=False,
      contrast=0.2,
    )
    if arg.gram:
      config.loss.gram_size = 2 * config.loss.large_size
      if not digits:  # As many points as steps.
        config.loss.gram_weight.at_percent = [0, 60]
        config.loss.gram_copies.update(at_percent=[0, 30], values=[0, 1])
    config.loss.teacher_temperature["values"] = [0.03, 0.04]
    config.loss.momentum["values"] = [0.98, 1.0]
    for evaluation in config.evals.values():
      evaluation.k = (10, 20) if digits else (2,)
  return config
