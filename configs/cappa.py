"""CapPa B/16: an image encoder trained by captioning.

Command: python -m bigtrain.main --workdir=runs/cappa \
  --config=configs/cappa.py:tokenizer=c4_en.model
Hardware: 64 accelerators with 80 GB or more, for a batch of 8,192 images; on
fewer, split the batch with --config.microbatches=8 or so.
Result: none known. The published models are trained on WebLI, which is not
public. This config makes 36,000 epochs of COCO, which only shows that
everything works.
Source: Tschannen et al. 2023, "Image Captioners Are Scalable Vision Learners
Too", arxiv.org/abs/2306.07915, and pretrain.py of big_vision's cappa project
for the recipe.

Needs coco_captions, prepared by tensorflow-datasets, and a SentencePiece model
with 32,000 pieces; the recipe uses c4_en. Without one, captions are cut to 64
bytes. For other images and captions see docs/images_and_text.md.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the encoder; the decoder has the same width.
    parallel: fraction of examples that are predicted in parallel; 0 is Cap.
    res: height and width of the images, in pixels.
    tokenizer: path of a SentencePiece model or tokenizer.json, or "bytes".
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/16",
    parallel=0.75,
    res=224,
    tokenizer="bytes",
    data_dir="",
    runlocal=False,
  )
  return make(arg)


def make(arg):
  """The config of parsed arguments, for cap.py too."""
  config = ml_collections.ConfigDict()
  res = arg.res if not arg.runlocal else 32
  max_len = 64

  config.seed = 0
  config.total_steps = 366_500
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "captioning"
  config.loss = dict(
    masked_pred_prob=arg.parallel,
    masking_ratio=1.0,
    label_smoothing=0.0,
    label_smoothing_over="others",  # As big_vision smooths.
  )

  tokenize = f"tokenize(model={arg.tokenizer!r},max_len={max_len},eos='sticky')"
  image = f"decode|resize({res})|value_range(-1,1)"

  def data(split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "captions/text": "text[5]"}
      return dict(type="synthetic", features=features, num_examples=32)
    name, data_dir = "coco_captions/2014", arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  captions = (
    f"{image}|choice(key='captions/text',key_result='text')|{tokenize}"
    "|keep('image','labels')"
  )
  config.input = dict(
    data=data("train"),
    pp=captions,
    batch_size=8192,
  )

  config.model_name = "cappa"
  config.model = dict(
    variant=arg.variant,
    vocab_size=32_000,
    max_len=max_len,
    posemb="learn",
    decoder_depth=6,
    decoder_bias=False,
    mask_token=arg.parallel > 0,
    dtype="bfloat16",
    scan=True,
  )

  # Moments in bfloat16 follow big_vision's arithmetic.
  config.optimizer = dict(
    name="big_vision_adafactor", moment_arithmetic="stored"
  )
  config.lr = 1e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=10_000)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=data("val"),
    pp=captions,
    log_steps=1000,
    cache=False,
  )
  config.evals.captions = dict(
    type="captions",
    pred="caption",
    data=data("val"),
    pp=captions,
    tokenizer=arg.tokenizer,
    num_examples=1000,
    log_steps=10_000,
  )

  if arg.runlocal:
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.model.variant = "mu/" + arg.variant.partition("/")[2]
    config.model.decoder_depth = 2
    config.evals.captions.num_examples = 16
  return config
