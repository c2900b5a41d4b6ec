"""Fine-tunes a published SigLIP 2 on pairs of images and texts.

Command: python -m bigtrain.main --workdir=runs/siglip2_coco \
  --config=configs/siglip2_finetune.py:init=FOLDER,tokenizer=FOLDER
Hardware: 8 accelerators with 80 GB for B/16 and a batch of 2,048 pairs.
Result: not measured. Published zero-shot accuracy on ImageNet before any
fine-tuning: 79.1% (B/16 at 256 pixels), 82.5% (L/16 at 256).
Source: Tschannen et al. 2025, "SigLIP 2", arxiv.org/abs/2502.14786, and
README_siglip2 of big_vision for the results. The fine-tuning recipe is ours: a
tenth of siglip.py's learning rate or less, and no weight decay.

FOLDER is one of Hugging Face, such as google/siglip2-base-patch16-256. Needs
coco_captions, prepared by tensorflow-datasets; and for the zero-shot evaluation
imagenet2012 and class_names=FILE.
"""

from configs import common, siglip


def get_config(arg=None):
  """Input and evaluations are those of siglip.py.

  Arguments:
    init: folder of the published model; default: siglip2-base-patch16-256, or
      none with `runlocal`.
    variant: its size.
    res: height and width of its images, in pixels.
    tokenizer: `init`, whose tokenizer the model knows, or "bytes" for tests.
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    init="",
    variant="B/16",
    res=256,
    tokenizer="bytes",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  given = [f"{x}={arg[x]}" for x in ("variant", "res", "tokenizer")]
  given += [f"data_dir={arg.data_dir}"] + ["runlocal"] * arg.runlocal
  given += [f"class_names={arg.class_names}"] * bool(arg.class_names)
  config = siglip.get_config(",".join(given))

  # The tokenizer of Gemma pads with 0. Texts are in lower case.
  for part in (config.input, *config.evals.values()):
    for key in {"pp", "pp_text"} & {*part}:
      part[key] = part[key].replace("canonicalize", "lower")
      part[key] = part[key].replace(",pad=1", ",pad=0")
  config.model.text.vocab_size = 256_000
  if arg.init or not arg.runlocal:
    config.model_init = arg.init or _INIT

  if not arg.runlocal:
    del config.total_examples
    config.total_steps = 5000
    config.input.batch_size = 2048
    config.schedule.warmup_steps = 500
  config.lr = 1e-5
  config.wd = 0.0
  return config


_INIT = "siglip2-base-patch16-256"
