"""Masked autoencoder (MAE) on ILSVRC-2012: a ViT-B/16 without labels.

Command: python -m bigtrain.main --config=configs/mae.py --workdir=runs/mae
  and, on scikit-learn's digits, in two minutes on two CPU cores:
  python -m bigtrain.main --config=configs/mae.py:runlocal --workdir=runs/mae
Hardware: 8 accelerators with 80 GB.
Result: not measured. Published after fine-tuning on ImageNet: 83.6% top-1
accuracy of B/16. The run on digits, which lie before random pixels: 0.819 to
0.833 accuracy of the 20 nearest neighbours over three seeds (knn/20nn_acc),
0.691 with the pixels, 0.563 to 0.649 with a random network.
Source: He et al. 2021, "Masked autoencoders are scalable vision learners",
arxiv.org/abs/2111.06377: 75% of the patches hidden, decoder of 8 blocks of
width 512, pixels normalised per patch, table 8 for the optimizer. Our guesses:
mu_dtype and bfloat16. The loss and its gradients equal transformers' (tests).

A `vit` starts from the encoder with model_init=dict(path=WORKDIR,
allow_unused=["decoder/.*"], allow_missing=["head/.*"]). Needs imagenet2012,
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
  arg = common.parse_arg(arg, variant="B/16", data_dir="", runlocal=False)
  digits = arg.runlocal and not arg.data_dir
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 800
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "mae"
  config.loss = dict(mask_ratio=0.75, norm_pixels=True)

  def data(split):
    if digits:
      return dict(**DIGITS, split="test" if split == "validation" else "train")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  res, resize = (224, 256) if not arg.runlocal else (32, 36)
  scale = "value_range(-1,1)"
  augment = f"decode|inception_crop({res},area_min=20)|flip_lr|{scale}"
  plain = f"decode|resize_small({resize})|central_crop({res})|{scale}"
  if digits:
    plain = augment = "random_background(16)|value_range(-1,1,0,16)"
  config.input = dict(
    data=data("train"), pp=f"{augment}|keep('image')", batch_size=4096
  )

  config.model_name = "mae"
  config.model = dict(
    variant=arg.variant,
    posemb="sincos2d",
    decoder_width=512,
    decoder_depth=8,
    decoder_num_heads=16,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", b2=0.95, mu_dtype="bfloat16")
  config.lr = 1.5e-4 * 4096 / 256
  config.wd = 0.05
  config.wd_coupling = "lr"
  config.schedule = dict(decay_type="cosine", warmup_epochs=40)

  # Averages of the patches have better neighbours than the class token, which
  # the loss does not train.
  config.evals = dict(
    knn=dict(
      type="knn",
      pred="pre_logits",
      pred_kw=dict(layer="encoded", pool=True),
      data=data("train"),
      test_data=data("validation"),
      pp=f"{plain}|keep('image','label')",
      k=(10, 20),
      log_percent=25,
    )
  )
  # The pixels in place of features, for comparison.
  pixels = config.evals.knn.to_dict() | dict(pred="pixels", log_percent=100)
  del pixels["pred_kw"]
  config.evals.pixels = pixels
  if arg.runlocal:
    del config.total_epochs, config.schedule.warmup_epochs
    config.total_steps = 6000 if digits else 3
    config.log_steps = 100 if digits else 1
    config.schedule.warmup_percent = 10
    config.input.batch_size = 128 if digits else 16
    config.lr = 1.5e-3
    config.model.update(
      variant="mu/2" if digits else "mu/16",
      width=64,
      decoder_width=64,
      decoder_depth=1,
      decoder_num_heads=2,
      dtype="float32",
    )
    for evaluation in config.evals.values():
      evaluation.k = (10, 20) if digits else (2,)
    if digits:
      config.model.update(depth=4, num_heads=4)
      # Most pixels are random. Normalised, those of a patch without ink would
      # count as much as a stroke; and of four patches nobody knows a digit.
      config.loss.update(mask_ratio=0.5, norm_pixels=False)
      # All digits are in the middle, so each patch is a feature of its own.
      config.evals.knn.pred_kw.pool = False
  return config
