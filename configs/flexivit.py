"""FlexiViT: one ViT for patches of many sizes, distilled from a DeiT III.

Command: python -m bigtrain.main --workdir=runs/flexivit \
  --config=configs/flexivit.py:init=bv_deit_3_base_384_1k.npz \
  [--config.total_epochs=300]
Hardware: 8 accelerators with 80 GB; the authors needed 10 hours on a TPU v3-32
for S and 90 epochs.
Result: 84.7% top-1 accuracy of B with patches of 16 after 1200 epochs, as timm
measures the published file (flexivit_base.1200ep_in1k); not measured here.
Source: Beyer et al. 2022, "FlexiViT: One Model for All Patch Sizes",
arxiv.org/abs/2212.08013, and i1k_deit3_distill.py of big_vision.

`init` is big_vision's DeiT III at 384 pixels with patches of 16:
storage.googleapis.com/big_vision/zoo/deit3/bv_deit_3_base_384_1k.npz
It is the teacher, and the student starts from it.

Needs imagenet2012, prepared by tensorflow-datasets.
"""

import ml_collections

from configs import common

INIT = "bv_deit_3_base_384_1k.npz"
SEQHWS = (5, 6, 8, 10, 12, 15, 16, 20, 24, 30)


def get_config(arg=None):
  """The config.

  Arguments:
    init: the teacher; default: INIT, or none with `runlocal`.
    variant: size of student and teacher.
    res: height and width of the student's images, in pixels.
    data_dir: folder of the data set.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg, init="", variant="B", res=240, data_dir="", runlocal=False
  )
  res, teacher_res = (arg.res, 384) if not arg.runlocal else (60, 96)
  seqhws = SEQHWS if not arg.runlocal else (3, 15)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_epochs = 90
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  config.task = "distillation"
  config.loss = dict(distance="kl", temperature=1.0, mixup_alpha=1.0)

  def data(split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[70,70,3]", "label": "int64 < 1000"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(
      type="tfds", name="imagenet2012", split=split, data_dir=data_dir
    )

  label = "|copy('label','labels')|keep('image','teacher_image','labels')"
  # The fast transform of JPEGs, as in the runs with these results.
  decode = "decode(precise=False)"
  config.input = dict(
    data=data("train[:99%]"),
    pp=f"{decode}|inception_crop|flip_lr|copy('image','teacher_image')"
    f"|resize({res})|value_range(-1,1)"
    f"|resize({teacher_res},key='teacher_image')"
    f"|value_range(-1,1,key='teacher_image')" + label,
    batch_size=1024,
  )

  config.model_name = "vit"
  model = dict(
    variant=f"{arg.variant}/16",
    num_classes=1000,
    pool_type="tok",
    dtype="bfloat16",
  )
  grid = teacher_res // 16
  config.teacher = dict(
    model_name="vit", model=dict(model, posemb_grid=grid), model_init=None
  )
  # A fresh teacher whose head is zeros would teach nothing.
  config.teacher.model.head_zeroinit = not arg.runlocal
  config.model = dict(model, posemb_grid=7, seqhw=15)
  config.flexi = dict(seqhw=dict(values=seqhws))
  if arg.init or not arg.runlocal:
    config.teacher.model_init = arg.init or INIT
    config.model_init = arg.init or INIT

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-4
  config.wd = 1e-5
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=5000)

  def evaluate(seqhw):
    return dict(
      type="classification",
      pred=f"logits_seqhw={seqhw}",
      data=data("validation"),
      pp=f"{decode}|resize({res // 7 * 8})|central_crop({res})"
      "|value_range(-1,1)|copy('label','labels')|keep('image','labels')",
      log_percent=5,
      cache=False,
    )

  # Patches of 48, 16 and 8 pixels.
  names = dict(coarse=seqhws[0], val=15, fine=seqhws[-1])
  config.evals = {name: evaluate(seqhw) for name, seqhw in names.items()}

  if arg.runlocal:
    del config.total_epochs
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.model.variant = config.teacher.model.variant = "mu/16"
  return config
