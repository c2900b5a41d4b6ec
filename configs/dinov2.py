"""DINOv2 on ILSVRC-2012: a ViT-L/16 by self-distillation, without labels.

Command: python -m bigtrain.main --config=configs/dinov2.py \\
    --workdir=runs/dinov2
  and, on scikit-learn's digits, in a few minutes on two CPU cores:
  python -m bigtrain.main --config=configs/dinov2.py:runlocal \\
    --workdir=runs/dinov2
Hardware: 64 accelerators with 80 GB.
Result: not measured. Published for this recipe on ImageNet-1k, "vitl16_short"
of DINOv2's code: 81.6% accuracy of the 20 nearest neighbours. The run on
digits, which lie at random places, over three seeds: 0.755 to 0.786 accuracy of
the 20 nearest neighbours with the teacher's features (knn/20nn_acc), 0.774 to
0.797 with the student's; 0.510 with the pixels, 0.487 to 0.568 with a random
network (eval_at_start).
Source: Oquab et al. 2023, "DINOv2", arxiv.org/abs/2304.07193, and vitl16_short
in its code: prototypes, temperatures, crops, masks, momentum, KoLeo, clipping,
drop path, layer scale, and the colours, blur and solarization of
DataAugmentationDINO. Different, and our guesses: weight decay stays at 0.04
(theirs rises to 0.2); one learning rate for all layers; separate prototypes for
patches; Adam's moments in bfloat16.

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
# A digit's 8 x 8 pixels at a random place of 16 x 16, in evaluation as well.
PLACED = "random_crop(16,pad=8,key={0})"
SCALED = "value_range(-1,1,0,16,key={0})"

# Shares of the image that large and small crops have.
LARGE_AREA, SMALL_AREA = (0.32, 1.0), (0.05, 0.32)
# Colours of a feature, and a probability of blur.
COLOURS = (
  "color_jitter(0.4,saturation=0.2,hue=0.1,prob=0.8,key={0})"
  "|random_grayscale(0.2,key={0})|gaussian_blur({1},key={0})"
)


def crops(large_size, small_size, num_small, gram_size=None):
  """Preprocessing of an encoded image to its crops.

  Sizes are in pixels. The Gram teacher sees the large crops at `gram_size`, in
  the colours of the image.
  """
  ops, large, gram, small = ["decode"], [], [], []

  def cut(name, size, area):
    bounds = ",".join(f"{100 * share:g}" for share in area)
    ops.append(
      f"inception_crop({size},{bounds},method='bicubic',antialias=True,"
      f"key='image',key_result={name})|flip_lr(key={name})"
    )

  # The first large crop is always blurred, the other one seldom.
  for i, blur in enumerate((1.0, 0.1)):
    large.append(f"'large_{i}'")
    if gram_size:
      gram.append(f"'gram_{i}'")
      cut(gram[i], gram_size, LARGE_AREA)
      ops.append(
        f"resize({large_size},method='bicubic',antialias=True,key={gram[i]},"
        f"key_result={large[i]})"
      )
    else:
      cut(large[i], large_size, LARGE_AREA)
    ops.append(COLOURS.format(large[i], blur))
  ops.append(f"solarize(0.2,key={large[1]})")
  for i in range(num_small):
    small.append(f"'small_{i}'")
    cut(small[i], small_size, SMALL_AREA)
    ops.append(COLOURS.format(small[i], 0.5))

  stacks = dict(large_crops=large, gram_crops=gram, small_crops=small)
  stacks = {name: keys for name, keys in stacks.items() if keys}
  for name, keys in stacks.items():
    ops.append(f"stack({','.join(keys)},key_result='{name}')")
    ops.append(f"value_range(-1,1,key='{name}')")
  kept = ",".join(f"'{name}'" for name in stacks)
  return "|".join([*ops, f"keep({kept})"])


def digit_crops():
  """Preprocessing of a digit to two crops, in which its place differs."""
  large = ("'large_0'", "'large_1'")
  ops = [f"copy('image',{key})|{PLACED.format(key)}" for key in large]
  ops.append(f"stack({','.join(large)},key_result='large_crops')")
  ops.append(SCALED.format("'large_crops'"))
  return "|".join([*ops, "keep('large_crops')"])


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
    )

  def data(split):
    if digits:
      return dict(**DIGITS, split="test" if split == "validation" else "train")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  res, resize, small = (224, 256, 96) if not arg.runlocal else (32, 36, 16)
  plain = f"decode|resize_small({resize})|central_crop({res})|value_range(-1,1)"
  num_small = config.loss.num_small if not arg.runlocal else 2
  pp = crops(res, small, num_small, 2 * res if arg.gram else None)
  if digits:
    plain = "|".join(op.format("'image'") for op in (PLACED, SCALED))
    pp = digit_crops()
  config.input = dict(data=data("train"), pp=pp, batch_size=2048)

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
      pp=f"{plain}|keep('image','label')",
      k=(10, 20),
      log_percent=25,
    )

  config.evals = dict(knn=evaluate("teacher"), student=evaluate("params"))
  # The pixels in place of features, for comparison.
  config.evals.pixels = evaluate("params") | dict(
    pred="pixels", log_percent=100
  )
  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 1500 if digits else 3
    config.log_steps = 50 if digits else 1
    config.input.batch_size = 128 if digits else 16
    config.lr = 2e-3 if digits else 5e-4
    config.model.update(
      variant="mu/4" if digits else "mu/16",
      width=64,
      posemb_grid=(4, 4) if digits else (2, 2),
      layer_scale=0.1,
      drop_path=0.0,
      num_prototypes=128,
      patch_prototypes=128,
      head_hidden=128,
      head_out=32,
      dtype="float32",
    )
    config.loss.num_small = num_small
    config.loss.momentum["values"] = [0.98, 1.0]
    if digits:
      config.model.update(depth=2, num_heads=4, layer_scale=None)
      # The two crops differ in the digit's place, as the test's digits do, and
      # in nothing else. Most patches are empty, so none of them is masked.
      config.loss.num_small = 0
      config.model.patch_prototypes = None
      # A small network begins with almost equal vectors of all images. At 0.04
      # their assignments are nearly uniform, and the student would learn that.
      config.loss.teacher_temperature.update(
        at_percent=[0, 20], values=[0.005, 0.04]
      )
      config.loss.momentum["values"] = [0.99, 1.0]
    elif arg.gram:  # As many points as steps.
      config.loss.gram_weight.at_percent = [0, 60]
      config.loss.gram_copies.update(at_percent=[0, 30], values=[0, 1])
    for evaluation in config.evals.values():
      evaluation.k = (10, 20) if digits else (2,)
  return config
