"""LiT: a text tower trained to match a locked, pretrained image tower.

Command: python -m bigtrain.main --workdir=runs/lit \
  --config=configs/lit.py:init=B_16.npz,tokenizer=c4_en.model
Hardware: 4 accelerators with 80 GB; 5,000 steps take less than an hour.
Result: not measured. In the recipe the text tower is a pretrained BERT; with
it, big_vision's README_lit reports 47.2% (image to text) and 32.1% (text to
image) recall at 1 on COCO's test images. This text tower starts from scratch,
so expect lower recall.
Source: Zhai et al. 2022, "LiT: Zero-Shot Transfer with Locked-image text
Tuning", arxiv.org/abs/2111.07991, and siglip_lit_coco.py of big_vision for the
recipe, which has the sigmoid loss of arxiv.org/abs/2303.15343.

`init` is a published ViT with a class token (.npz), such as this one of Steiner
et al. 2021, arxiv.org/abs/2106.10270:
storage.googleapis.com/vit_models/augreg/
  B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz
or the workdir of a run of vit_i21k.py or vit_i1k.py. The LiT models with a
small text tower (LiT-L16S and LiT-L16Ti) load as a whole, with
--config.model_init=FILE, their sizes and a vocabulary of 16,000.

Needs coco_captions, prepared by tensorflow-datasets.
"""

import ml_collections

from configs import common

INIT = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz"


def get_config(arg=None):
  """The config.

  Arguments:
    init: checkpoint of the image tower; default: INIT, or with `runlocal` none,
      so that the locked tower keeps its random initial values.
    variant: size of the image tower; the text tower has the same size.
    loss: "sigmoid", or "softmax" as in the paper.
    res: height and width of the images, in pixels.
    tokenizer: path of a SentencePiece model or tokenizer.json, or "bytes".
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    init="",
    variant="B/16",
    loss="sigmoid",
    res=224,
    tokenizer="bytes",
    data_dir="",
    runlocal=False,
  )
  size, _, patch = arg.variant.partition("/")
  res = arg.res if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 5000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "contrastive"
  config.loss = dict(kind=arg.loss)

  max_len = 16 if arg.tokenizer != "bytes" else 64
  tokenize = f"tokenize(model={arg.tokenizer!r},max_len={max_len},eos='sticky'"
  image = f"resize({res}){{}}|value_range(-1,1)"

  def data(split):
    if arg.runlocal and not arg.data_dir:
      features = {"image": "jpeg[40,40,3]", "captions/text": "text[5]"}
      return dict(type="synthetic", features=features, num_examples=32)
    name, data_dir = "coco_captions", arg.data_dir or None
    return dict(type="tfds", name=name, split=split, data_dir=data_dir)

  config.input = dict(
    data=data("train"),
    pp=f"decode|{image.format('|flip_lr|randaug(2,10)')}"
    "|choice(key='captions/text',key_result='text')"
    f"|canonicalize|{tokenize})|keep('image','labels')",
    batch_size=512,
  )

  config.model_name = "two_towers"
  config.model = dict(
    image=dict(variant=arg.variant, pool_type="tok", dtype="bfloat16"),
    text=dict(variant=size, vocab_size=32_000, dtype="bfloat16"),
    out_dim=(None, {"S": 384, "B": 768, "L": 1024}.get(size, 768)),
    temperature_init=10.0,
    bias_init=-2.71,
  )
  if arg.init or not arg.runlocal:
    config.model_init = dict(
      path=arg.init or INIT,
      rename=[("(head|pre_logits)/.*", None), ("(.*)", r"img/\1")],
      allow_missing=["txt/.*", "t", "b"],
    )

  config.optimizer = dict(name="big_vision_adafactor")
  config.lr = 1e-3
  config.wd = 1e-2
  config.grad_clip_norm = 1.0
  config.schedule = [
    ("img/.*", None),  # Locked: no gradient and no optimizer state.
    (".*", dict(decay_type="cosine", warmup_percent=3)),
  ]

  config.evals = {}
  # Some images have more than five captions; the benchmark uses five.
  config.evals.coco = dict(
    type="retrieval",
    pred="embed",
    data=data("test"),
    pp=f"decode|{image.format('')}|canonicalize(key='captions/text')"
    f"|{tokenize},key='captions/text')|first_rows(5)|keep('image','labels')",
    log_steps=1000,
  )

  if arg.runlocal:
    config.total_steps = 3
    config.log_steps = 1
    config.input.batch_size = 16
    config.model.image.variant = f"mu/{patch}"
    config.model.text.variant = "mu"
    config.model.out_dim = (None, 32)
  return config
