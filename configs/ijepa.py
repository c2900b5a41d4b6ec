"""I-JEPA on ILSVRC-2012: a ViT-H/14 that predicts features, without labels.

Command: python -m bigtrain.main --config=configs/ijepa.py --workdir=runs/ijepa
  and, on scikit-learn's digits, on any machine:
  python -m bigtrain.main --config=configs/ijepa.py:runlocal \\
    --workdir=runs/ijepa
Hardware: not known; no compiler has planned this config yet.
Result: not measured. Published for H/14 after 300 epochs on ImageNet-1k: 79.3%
accuracy of a linear probe on the mean of the teacher's patches. The run on
digits: 0.58 accuracy of the 10 nearest neighbours with the student's features
(student/10nn_acc), 0.55 with the teacher's; 0.53 with the random features of
step 0.
Source: Assran et al. 2023, "Self-supervised learning from images with a
joint-embedding predictive architecture", arxiv.org/abs/2301.08243, and
in1k_vith14_ep300 in its code: areas and number of the blocks, width and depth
of the predictor, momentum, crops, learning rate and batch. Different, and our
guesses: weight decay stays at 0.04 (theirs rises to 0.4); each image has blocks
of its own size (theirs is drawn per batch); a context has at most half of the
patches, others are left out at random (theirs is cut to the shortest of the
batch); Adam's moments in bfloat16.

A `vit` starts from the encoder with model_init=dict(path=WORKDIR,
allow_unused=["predictor/.*"], allow_missing=["head/.*"]). Needs imagenet2012,
prepared by tensorflow-datasets.
"""

import ml_collections

from configs import common

DIGITS = dict(type="arrays", name="digits")


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the ViT.
    data_dir: folder of the data set.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(arg, variant="H/14", data_dir="", runlocal=False)
  digits = arg.runlocal and not arg.data_dir
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 300
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "ijepa"
  config.loss = dict(
    num_targets=4,
    target_area=(0.15, 0.2),
    target_aspect=(0.75, 1.5),
    context_area=(0.85, 1.0),
    max_context=0.5,
    min_context=10,
    distance="smooth_l1",
    momentum=dict(at_percent=[0, 100], values=[0.996, 1.0]),
  )

  def data(split):
    if digits:
      return dict(**DIGITS, split="test" if split == "validation" else "train")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  res, resize = (224, 256) if not arg.runlocal else (32, 36)
  scale = "value_range(-1,1)"
  augment = f"decode|inception_crop({res},area_min=30)|{scale}"
  plain = f"decode|resize_small({resize})|central_crop({res})|{scale}"
  if digits:
    plain = "value_range(-1,1,0,16)"
    augment = f"random_crop(8,pad=1)|{plain}"
  config.input = dict(
    data=data("train"), pp=f"{augment}|keep('image')", batch_size=2048
  )

  config.model_name = "ijepa"
  config.model = dict(
    variant=arg.variant,
    predictor_width=384,
    predictor_depth=12,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 0.04
  config.wd_coupling = "lr"
  config.schedule = dict(decay_type="cosine", warmup_epochs=40)

  def evaluate(weights):
    return dict(
      type="knn",
      pred="pre_logits",  # The mean of the patches.
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
    del config.total_epochs, config.schedule.warmup_epochs
    config.total_steps = 1000 if digits else 3
    config.log_steps = 50 if digits else 1
    config.schedule.warmup_percent = 10
    config.input.batch_size = 128 if digits else 16
    config.model.update(
      variant="mu/2" if digits else "mu/4",
      width=64,
      predictor_width=32,
      predictor_depth=2,
      dtype="float32",
    )
    config.loss.momentum["values"] = [0.98, 1.0]
    if digits:  # A grid of 4 x 4 patches.
      config.loss.update(
        target_area=(0.2, 0.3), max_context=0.75, min_context=4
      )
    for evaluation in config.evals.values():
      evaluation.k = (10, 20) if digits else (2,)
  return config
