"""JiT on ILSVRC-2012: a plain ViT that makes images from noise, on pixels.

Command: python -m bigtrain.main --config=configs/jit.py --workdir=runs/jit
  and, on scikit-learn's digits, in a few minutes on two CPU cores (train the
  quickstart first: its classifier judges the samples):
  python -m bigtrain.main \\
    --config=configs/jit.py:runlocal,judge=runs/digits --workdir=runs/jit
Hardware: not known; no compiler has planned this config yet.
Result: not measured. Published for JiT-B/16 at 256 pixels: FID-50K of 4.37
after 200 epochs and 3.66 after 600. On digits: the quickstart's classifier
recognises 0.999 of 1,000 samples; their FID in its features is 0.81, that of
held-out digits 0.96.
Source: Li and He 2025, "Back to basics: let denoising generative models
denoise", arxiv.org/abs/2511.13720, table 9 and the authors' code: 131 million
parameters, 32 class tokens from block 4 on, a bottleneck of 128, noise of 1 at
256 pixels and 2 at 512, logit-normal times of mean -0.8 and deviation 0.8, 10%
of the classes hidden, Adam with b2 = 0.95, a constant learning rate of 5e-5 per
256 images after 5 epochs, no weight decay, an average of the parameters with
decay 0.9999, Heun with 50 steps, guidance of 2.9 from t = 0.1 on. Our guesses:
bfloat16, and the guidance of the run on digits.

FID needs a model whose features it compares: judge=FOLDER, of a run or of a
published model. Needs imagenet2012, prepared by tensorflow-datasets.
"""

import ml_collections

from configs import common

DIGITS = dict(type="arrays", name="digits")


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the model, "JiT-B/16" or another name in models/dit.py.
    res: rows and columns of the images.
    data_dir: folder of the data set.
    judge: folder of a classifier, whose features FID compares.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(
    arg, variant="JiT-B/16", res=256, data_dir="", judge="", runlocal=False
  )
  digits = arg.runlocal and not arg.data_dir
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 600
  config.log_steps = 100
  config.ckpt_steps = 2000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "flow_matching"
  config.loss = dict(
    times="logit_normal", time_mean=-0.8, time_std=0.8, class_drop=0.1
  )

  def data(split):
    if digits:
      return dict(**DIGITS, split="test" if split == "validation" else "train")
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  res = arg.res
  if arg.runlocal:
    res = 8 if digits else 32
  scale = "value_range(-1,1)"
  names = "copy('label','labels')|keep('image','labels')"
  plain = f"decode|resize_small({res})|central_crop({res})"
  augment = f"{plain}|flip_lr|{scale}|{names}"
  plain = f"{plain}|{scale}|{names}"
  if digits:
    plain = augment = f"value_range(-1,1,0,16)|{names}"
  config.input = dict(data=data("train"), pp=augment, batch_size=1024)

  config.model_name = "dit"
  config.model = dict(
    variant=arg.variant,
    image_size=res,
    channels=3,
    num_classes=1000,
    noise_scale=res / 256,
    dtype="bfloat16",
  )

  config.optimizer = dict(name="adam", b2=0.95)
  config.lr = 5e-5 * 1024 / 256
  config.wd = 0.0
  config.schedule = dict(decay_type="constant", warmup_epochs=5)
  config.ema_decay = 0.9999

  making = dict(
    pred="samples",
    pred_kw=dict(
      sampler="heun", steps=50, guidance=2.9, guidance_interval=(0.1, 1.0)
    ),
    weights="ema",
    log_percent=10,
  )
  config.evals = dict(
    samples=dict(type="samples", num_samples=40, zoom=1, **making)
  )
  if arg.judge:
    config.evals.fid = dict(
      type="sample_fid",
      model=dict(path=arg.judge),
      data=data("train"),
      pp=plain,
      num_samples=50_000,
      **making,
    )
  if arg.runlocal:
    del config.total_epochs, config.schedule.warmup_epochs
    config.total_steps = 800 if digits else 3
    config.log_steps = 100 if digits else 1
    config.ckpt_steps = 400 if digits else 3
    config.schedule.warmup_percent = 5
    config.input.batch_size = 128 if digits else 16
    config.lr = 1e-3
    config.ema_decay = 0.99
    config.model.update(
      variant="JiT-mu/2" if digits else "JiT-mu/16",
      width=64,
      image_size=res,
      channels=1 if digits else 3,
      num_classes=10 if digits else 1000,
      noise_scale=1.0,
      dtype="float32",
    )
    for part in config.evals.values():
      part.pred_kw.update(steps=20 if digits else 2, guidance=1.5)
      part.log_percent = 50 if digits else 100
    config.evals.samples.update(num_samples=100 if digits else 8, zoom=4)
    if arg.judge:
      config.evals.fid.num_samples = 1000 if digits else 8
      config.evals.recognised = dict(
        config.evals.fid, type="sample_accuracy", num_classes=10
      )
      for name in ("data", "pp"):
        del config.evals.recognised[name]
  return config
