"""SigLIP 2's small models: a larger model chooses what they learn from.

Command: python -m bigtrain.main --workdir=runs/siglip2_b32 \
  --config=configs/siglip2_distill.py:variant=B/32,init=RUN,reference=FOLDER,\
tokenizer=FOLDER --config.microbatches=8
Hardware: not known.
Result: not measured. Published zero-shot accuracy on ImageNet after this stage:
79.1% (B/16 at 256 pixels), 74.0% (B/32 at 256). The small run, one seed: 0.828
zero-shot accuracy (zeroshot/acc), and 0.093 with all pairs.
Source: Tschannen et al. 2025, "SigLIP 2", arxiv.org/abs/2502.14786, section
2.5, for the number of examples, the learning rate, no weight decay, the batch
of 32,768 chosen pairs, their share (half for B/16, a quarter for B/32), the
sigmoid loss alone and the score; Evans et al. 2024, "JEST",
arxiv.org/abs/2406.17711, for the choice (16 chunks are those of public
implementations); Udandarao et al. 2024, "ACID", arxiv.org/abs/2411.18674.

Guesses, because the papers that we read do not say: a constant learning rate
after a short warm-up, optimizer and clipping of siglip.py, and a reference
So400m/16 at 256 pixels. The published reference learned from a billion curated
pairs after SigLIP 2; that model is not public, so ours is SigLIP 2 itself.

RUN is a run of siglip2.py of the same size. (Published folders have seen this
stage; to start from one, add --config.model.text.pool_type=last.) FOLDER is one
of Hugging Face, such as google/siglip2-so400m-patch16-256. Needs the data of
siglip.py, which are too small for 4 billion examples: they only show that
everything works.

The small run learns pairs of digits, of which half have a wrong caption, see
docs/images_and_text.md. With `keep=1.0` it learns from all of them. Both
commands need minutes on two CPU cores:

  python -m bigtrain.main --config=configs/digits_siglip.py --workdir=runs/large
  python -m bigtrain.main --workdir=runs/chosen \
    --config=configs/siglip2_distill.py:runlocal,reference=runs/large
"""

from configs import common, digits_siglip, siglip2_finetune

INIT = "runs/siglip2"
REFERENCE = "siglip2-so400m-patch16-256"
CHOSEN = 32_768  # Pairs that a step learns from.
# Parts of a run of siglip2.py that the small models do not need.
UNUSED = [
  "(decoder|class_|patch_).*",
  "pos_embedding_decoder",
  "img/mask_token",
]


def get_config(arg=None):
  """The config.

  Arguments:
    variant: "B/16" or "B/32".
    init: run or folder with the first parameters; default: INIT.
    reference: folder of the larger model; default: REFERENCE. With `runlocal` a
      run of digits_siglip.py, or none for a few steps with a random one.
    keep: share of pairs to learn from, 1 for all; default: 0.5, of B/32 0.25.
    tokenizer: that of both models, or "bytes" for tests.
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/16",
    init="",
    reference="",
    keep=0.0,
    tokenizer="bytes",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  keep = arg.keep or (0.25 if arg.variant == "B/32" else 0.5)
  if not 0 < keep <= 1:
    raise ValueError(f"keep={arg.keep}: expected a share above 0, up to 1")
  if arg.runlocal and not arg.data_dir:
    config, reference = _digits(arg.reference, keep)
  else:
    config, reference = _images(arg, keep)
  if keep < 1:
    config.select = dict(keep=keep, score="learnability", chunks=16)
    config.teacher = reference
    if "is_right" in config.input.pp:
      config.select.report = ("is_right",)  # Of which share the text is right.
  return config


def _images(arg, keep):
  """(config, its teacher)."""
  given = [f"tokenizer={arg.tokenizer}", f"data_dir={arg.data_dir}"]
  given += [f"class_names={arg.class_names}"] * bool(arg.class_names)
  given += ["runlocal"] * arg.runlocal

  def finetuning(variant):
    return siglip2_finetune.get_config(",".join([*given, f"variant={variant}"]))

  config = finetuning(arg.variant)
  config.model.text.pool_type = "map"  # As in siglip2.py.
  if "model_init" in config:
    del config.model_init  # A path, and now a dict.
  if arg.init or not arg.runlocal:
    config.model_init = dict(path=arg.init or INIT, allow_unused=UNUSED)
  chosen = CHOSEN if not arg.runlocal else config.input.batch_size
  config.input.batch_size = round(chosen / keep)
  if not arg.runlocal:
    config.total_steps = 4_000_000_000 // CHOSEN
  warmup_steps = 1000 if not arg.runlocal else 1
  config.schedule = dict(decay_type="constant", warmup_steps=warmup_steps)
  config.lr = 1e-5
  config.wd = 0.0
  model_init = arg.reference or (REFERENCE if not arg.runlocal else None)
  return config, dict(
    model_name=config.model_name,
    model=finetuning("So400m/16").model.to_dict(),
    model_init=model_init,
  )


def _digits(reference, keep):
  """The small run: (config, its teacher)."""
  config = digits_siglip.get_config(None if reference else "runlocal")
  large = config.model.to_dict()
  for tower in (config.model.image, config.model.text):
    tower.update(width=32, mlp_dim=64, num_heads=2)
  config.model.out_dim = (None, 32)
  # All of the chosen pairs, or all of a smaller batch.
  config.input.batch_size = round(config.input.batch_size / keep)
  config.input.data.wrong_captions = 0.5
  config.input.pp = config.input.pp.replace("'labels'", "'labels','is_right'")
  model_init = reference or None
  return config, dict(
    model_name=config.model_name, model=large, model_init=model_init
  )
