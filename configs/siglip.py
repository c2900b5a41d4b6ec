"""SigLIP B/16: images and texts embedded side by side, by the sigmoid loss.

Command: python -m bigtrain.main --workdir=runs/siglip \
  --config=configs/siglip.py:tokenizer=c4_en.model --config.microbatches=8
Hardware: 32 accelerators with 80 GB or more, for a batch of 32,768 pairs, split
into microbatches, which change neither the loss nor its gradient.
Result: none known. The published models are trained on WebLI, which is not
public. This config makes 100,000 epochs of COCO, which only shows that
everything works.
Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training",
arxiv.org/abs/2303.15343, for the loss, initial temperature and bias, beta2 and
the number of examples; Tschannen et al. 2025, "SigLIP 2",
arxiv.org/abs/2502.14786, for learning rate, decay, clipping and warm-up.

The published files load with
--config.model_init=webli_en_b16_224_63724782.npz and their tokenizer c4_en, a
SentencePiece model with 32,000 pieces. Without a tokenizer, captions are cut to
64 bytes. For other images and texts see docs/images_and_text.md.

Needs coco_captions, prepared by tensorflow-datasets; and for the zero-shot
evaluation imagenet2012 and class_names=FILE, a text file with one class name
per line.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """The config.

  Arguments:
    variant: size of the image tower; the text tower has the same size.
    res: height and width of the images, in pixels.
    tokenizer: path of a SentencePiece model or tokenizer.json, or "bytes".
    class_names: path of a text file of ImageNet's class names.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    variant="B/16",
    res=224,
    tokenizer="bytes",
    class_names="",
    data_dir="",
    runlocal=False,
  )
  size, _, patch = arg.variant.partition("/")
  res = arg.res if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_examples = 9_000_000_000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "contrastive"
  config.loss = dict(kind="sigmoid", chunk=1024)

  # The text tower attends to padding. The published models pad with the end
  # token, 1.
  tokenize = f"tokenize(model={arg.tokenizer!r},max_len=64,eos='sticky',pad=1"
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

  config.input = dict(
    data=data("coco_captions", "train"),
    pp=f"{image}|choice(key='captions/text',key_result='text')"
    f"|canonicalize|{tokenize})|keep('image','labels')",
    batch_size=32_768,
  )

  config.model_name = "two_towers"
  dtype = dict(dtype="bfloat16", scan=True)
  config.model = dict(
    image=dict(variant=arg.variant, pool_type="map", **dtype),
    text=dict(variant=size, vocab_size=32_000, pool_type="last", **dtype),
    out_dim=(None, {"B": 768, "L": 1024, "So400m": 1152}.get(size, 768)),
    temperature_init=10.0,
    bias_init=-10.0,
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95, mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=20_000)

  config.evals = {}
  # Some images have more than five captions; the benchmark uses five.
  config.evals.coco = dict(
    type="retrieval",
    pred="embed",
    data=data("coco_captions", "test"),
    pp=f"{image}|canonicalize(key='captions/text')"
    f"|{tokenize},key='captions/text')|first_rows(5)|keep('image','labels')",
    log_steps=10_000,
    batch_size=1024,
  )
  config.evals.imagenet = dict(
    enabled=bool(class_names),
    type="zeroshot",
    pred="embed",
    data=data("imagenet2012", "validation"),
    pp=f"{image}|keep('image','label')",
    pp_text=f"canonicalize|{tokenize})",
    class_names=class_names,
    prompts=["{}", "a photo of a {}"],
    log_steps=10_000,
    batch_size=1024,
    cache=False,
  )

  if arg.runlocal:
    del config.total_examples
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.model.image.variant = f"mu/{patch}"
    config.model.text.variant = "mu"
    config.model.out_dim = (None, 32)
    config.evals.coco.batch_size = config.evals.imagenet.batch_size = 16
  return config
