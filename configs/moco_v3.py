"""MoCo v3 on ILSVRC-2012: a ViT-B/16 by contrastive learning, without labels.

Command: python -m bigtrain.main --config=configs/moco_v3.py \\
    --workdir=runs/moco
  and, on scikit-learn's digits, on any machine:
  python -m bigtrain.main --config=configs/moco_v3.py:runlocal \\
    --workdir=runs/moco
Hardware: not known; no compiler has planned this config yet.
Result: not measured. Published for ViT-B/16 after 300 epochs on ImageNet: 76.7%
accuracy of a linear probe. The run on digits, which lie before random pixels,
once: 0.482 accuracy of the 20 nearest neighbours (knn/20nn_acc), less than the
0.691 of the pixels.
Source: Chen et al. 2021, "An empirical study of training self-supervised vision
transformers", arxiv.org/abs/2104.02057, and CONFIG.md of its code: heads,
temperature, momentum, batch, learning rate, decay, and the patch embedding that
keeps its random values; area, colours, blur and solarization of both views are
those of its code. Our guess: Adam's moments and activations in bfloat16.

Needs imagenet2012, prepared by tensorflow-datasets.
"""

import ml_collections

from configs import common

DIGITS = dict(type="arrays", name="digits")


def views(size):
  """Preprocessing of an encoded image to two views of `size` pixels.

  The first view is always blurred, the other one seldom, but sometimes
  solarized.
  """
  ops = ["decode"]
  for key, blur in (("'first'", 1.0), ("'second'", 0.1)):
    ops += [
      f"inception_crop({size},8,key='image',key_result={key})",
      f"color_jitter(0.4,saturation=0.2,hue=0.1,prob=0.8,key={key})",
      f"random_grayscale(0.2,key={key})|gaussian_blur({blur},key={key})",
      f"flip_lr(key={key})",
    ]
  ops.append("solarize(0.2,key='second')")
  ops.append("stack('first','second',key_result='views')")
  return "|".join([*ops, "value_range(-1,1,key='views')|keep('views')"])


def digit_views():
  """Preprocessing of a digit to two views, each before random pixels."""
  ops = []
  for key in ("'first'", "'second'"):
    ops.append(f"copy('image',{key})|random_crop(8,pad=1,key={key})")
    ops.append(f"random_background(16,key={key})")
  ops.append("stack('first','second',key_result='views')")
  return "|".join([*ops, "value_range(-1,1,0,16,key='views')|keep('views')"])


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the ViT.
    data_dir: folder of the data set.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(arg, variant="B/16", data_dir="", runlocal=False)
  digits = arg.runlocal and not arg.data_dir
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 300
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "moco_v3"
  config.loss = dict(
    temperature=0.2,
    momentum=dict(at_percent=[0, 100], values=[0.99, 1.0], shape="cosine"),
  )

  def data(split):
    if digits:
      return dict(**DIGITS, split="test" if split == "validation" else "train")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  res, resize = (224, 256) if not arg.runlocal else (32, 36)
  plain = f"decode|resize_small({resize})|central_crop({res})|value_range(-1,1)"
  pp = views(res)
  if digits:
    pp = digit_views()
    plain = "random_background(16)|value_range(-1,1,0,16)"
  config.input = dict(data=data("train"), pp=pp, batch_size=4096)

  config.model_name = "contrastive_vit"
  config.model = dict(
    variant=arg.variant,
    pool_type="tok",
    posemb="sincos2d",
    posemb_grid=None,
    projector_layers=3,
    predictor_layers=2,
    head_hidden=4096,
    head_out=256,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1.5e-4 * 4096 / 256
  config.wd = 0.1
  config.wd_coupling = "lr"
  decay = dict(decay_type="cosine", warmup_epochs=40)
  # Without a schedule, the patch embedding stays as it is.
  config.schedule = [("embedding/.*", None), (".*", decay)]

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

  config.evals = dict(knn=evaluate("params"), teacher=evaluate("teacher"))
  # The pixels in place of features, for comparison.
  config.evals.pixels = evaluate("params") | dict(
    pred="pixels", log_percent=100
  )
  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 1500 if digits else 3
    config.log_steps = 50 if digits else 1
    decay = dict(decay_type="cosine", warmup_percent=10)
    config.schedule = [("embedding/.*", None), (".*", decay)]
    config.input.batch_size = 128 if digits else 16
    config.lr = 2e-3
    config.model.update(
      variant="mu/2" if digits else "mu/16",
      width=64,
      head_hidden=128,
      head_out=64,
      dtype="float32",
    )
    if digits:
      config.schedule = [(".*", decay)]  # The patch embedding trains, too.
      config.model.update(
        depth=2,
        mlp_dim=128,
        pool_type="gap",
        posemb="learn",
        posemb_grid=(4, 4),
      )
    config.loss.momentum["values"] = [0.98, 1.0]
    for evaluation in config.evals.values():
      evaluation.k = (10, 20) if digits else (2,)
  return config
