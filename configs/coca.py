"""CoCa-Base: an image encoder trained by captions and by pairs at once.

Command: python -m bigtrain.main --workdir=runs/coca \
  --config=configs/coca.py:tokenizer=FILE --config.microbatches=8
Hardware: 128 accelerators with 80 GB or more, for a batch of 65,536 pairs,
split into microbatches, which change neither the loss nor its gradient.
Result: none known. The published models are trained on JFT-3B and ALIGN, which
are not public. This config makes 400,000 epochs of COCO, which only shows that
everything works.
Source: Yu et al. 2022, "CoCa: Contrastive Captioners are Image-Text Foundation
Models", arxiv.org/abs/2205.01917, sections 3.2 and 4.1.

Needs coco_captions, prepared by tensorflow-datasets, and a tokenizer with up to
64,000 pieces; without one, captions are cut to 64 bytes. For the zero-shot
evaluation it needs imagenet2012 and class_names=FILE, a text file with one
class name per line. For other images and texts see docs/images_and_text.md.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the encoder; both decoders have the same width and depth.
    res: height and width of the images, in pixels.
    tokenizer: path of a SentencePiece model or tokenizer.json, or "bytes".
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/18",
    res=288,
    tokenizer="bytes",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  res = arg.res if not arg.runlocal else 36
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 500_000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "contrastive"
  config.loss = dict(kind="softmax", caption_weight=2.0)

  # The class token sees no padding, which is 0.
  tokenize = f"tokenize(model={arg.tokenizer!r},max_len=64,eos='sticky'"
  image = f"decode|resize({res})|value_range(-1,1)"

  class_names = arg.class_names
  made_up = arg.runlocal and not arg.data_dir
  if made_up and not class_names:
    class_names = [f"thing {i}" for i in range(10)]

  def data(name, split):
    if made_up:
      features = {"image": "jpeg[40,40,3]", "captions/text": "text[5]"}
      if name == "imagenet2012":
        features = {"image": "jpeg[40,40,3]", "label": "int64 < 10"}
      return dict(type="synthetic", features=features, num_examples=32)
    data_dir = arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  captions = (
    f"{image}|choice(key='captions/text',key_result='text')|{tokenize})"
    "|keep('image','labels')"
  )
  config.input = dict(
    data=data("coco_captions/2014", "train"),
    pp=captions,
    batch_size=65_536,
  )

  config.model_name = "coca"
  config.model = dict(
    variant=arg.variant,
    vocab_size=64_000,
    max_len=64,
    num_queries=256,
    out_dim=768,
    temperature_init=1 / 0.07,
    dtype="bfloat16",
    scan=True,
  )

  config.optimizer = dict(name="big_vision_adafactor", beta2_cap=0.999)
  config.lr = 8e-4
  config.wd = 1e-2
  config.wd_coupling = "lr"
  config.schedule = dict(decay_type="linear", warmup_percent=2)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=data("coco_captions/2014", "val"),
    pp=captions,
    log_steps=10_000,
    batch_size=1024,
    cache=False,
  )
  config.evals.captions = dict(
    type="captions",
    pred="caption",
    data=data("coco_captions/2014", "val"),
    pp=captions,
    tokenizer=arg.tokenizer,
    num_examples=1000,
    log_steps=10_000,
    batch_size=1024,
  )
  # Some images have more than five captions; the benchmark uses five.
  config.evals.coco = dict(
    type="retrieval",
    pred="embed",
    data=data("coco_captions/2014", "test"),
    pp=f"{image}|{tokenize},key='captions/text')|first_rows(5)"
    "|keep('image','labels')",
    log_steps=10_000,
    batch_size=1024,
  )
  config.evals.imagenet = dict(
    enabled=bool(class_names),
    type="zeroshot",
    pred="embed",
    data=data("imagenet2012", "validation"),
    pp=f"{image}|keep('image','label')",
    pp_text=f"{tokenize})",
    class_names=class_names,
    prompts=["{}", "a photo of a {}"],
    log_steps=10_000,
    batch_size=1024,
    cache=False,
  )

  if arg.runlocal:
    config.total_steps = 3
    config.log_steps = 1
    config.input.batch_size = 16
    config.model.variant = "mu/" + arg.variant.partition("/")[2]
    config.model.num_queries = 4
    for evaluation in config.evals.values():
      evaluation.batch_size = 16
    config.evals.captions.num_examples = 16
  return config
