"""SigLIP 2 NaFlex: the last tenth, on images in their own aspect ratio.

Command: python -m bigtrain.main --workdir=runs/siglip2_naflex \\
  --config=configs/siglip2_naflex.py:init=runs/siglip2/checkpoints/STEP
Hardware: not known; siglip2.py says what the authors had.
Result: not measured. Published: 78.5% zero-shot accuracy on ImageNet of B/16,
83.5% of So400m/16.
Source: Tschannen et al. 2025, "SigLIP 2", arxiv.org/abs/2502.14786, section
2.4.2: starts from siglip2.py's run at 90%, draws one of `LENGTHS` for each
batch, resizes the positions for each image, and has no self-distillation. Our
guesses: new moments of Adam, a short warm-up, and the rest of the cosine as a
cosine of its own, from its value at 90%.

STEP is nine tenths of siglip2.py's steps; that run keeps it with
--config.keep_ckpt_percent=90. Needs what siglip2.py needs.
"""

from configs import common, siglip2

LENGTHS = (128, 256, 576, 784, 1024)


def get_config(arg=None):
  """Data and models are as in siglip2.py.

  Arguments:
    init: checkpoint, or folder of a run, to start from.
    variant: size of the image tower; the text tower has the same size.
    length: patches of an image in evaluations, at most.
    tokenizer: path of Gemma's tokenizer, or "bytes".
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a small run; on digits without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    init="",
    variant="B/16",
    length=256,
    tokenizer="bytes",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  given = [f"{x}={arg[x]}" for x in ("variant", "tokenizer", "class_names")]
  given += [f"data_dir={arg.data_dir}"] + ["runlocal"] * arg.runlocal
  config = siglip2.get_config(",".join(given))

  patch, length, lengths = 16, arg.length, LENGTHS
  if arg.runlocal:
    digits = not arg.data_dir
    patch, length = (2, 50) if digits else (16, 16)
    lengths = (18, 32, 50) if digits else (9, 16)
  for part in (config.input, *config.evals.values()):
    whole, _, rest = part.pp.partition("|keep('image'")
    ops = [op for op in whole.split("|") if not op.startswith("resize(")]
    number = "{length}" if part is config.input else length
    ops.append(f"naflex({patch},{number})")
    part.pp = "|".join(ops) + f"|keep('image','shapes'{rest}"
  config.input.flexi = dict(length=dict(values=lengths))

  del config.task.distill
  del config.model.num_prototypes, config.model.patch_prototypes
  if arg.init or not arg.runlocal:
    unused = ["(class|patch)_(head|prototypes)/.*", "img/mask_token"]
    config.model_init = dict(
      path=arg.init or "runs/siglip2", allow_unused=unused
    )
  if not arg.runlocal:
    config.total_examples = 4_000_000_000
    config.schedule.warmup_steps = 1000
  # Of 1e-3, the cosine's value at 90%.
  config.lr = 2.4e-5
  return config
