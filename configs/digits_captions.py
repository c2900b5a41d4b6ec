"""A small CapPa that captions pairs of real handwritten digits.

Command: python -m bigtrain.main --config=configs/digits_captions.py \
  --workdir=runs/digits_captions
Hardware: any; two CPU cores need about five minutes.
Result: 0.956 accuracy over the 100 ordered pairs (val/acc), and the same
fraction of exactly right captions (captions/exact), both on held-out digits.
Source: our own runs, see docs/images_and_text.md. An image shows two digits of
the data of configs/digits.py, at slightly varying positions. A caption reads "a
seven left of a three".
"""

import ml_collections

from configs import common

WORDS = "zero one two three four five six seven eight nine".split()
CLASS_NAMES = [
  f"{'an' if left == 'eight' else 'a'} {left} left of "
  f"{'an' if right == 'eight' else 'a'} {right}"
  for left in WORDS
  for right in WORDS
]


def get_config(arg=None):
  """Arguments: runlocal (a few steps, for tests)."""
  arg = common.parse_arg(arg, runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 8000 if not arg.runlocal else 3
  config.log_steps = 100 if not arg.runlocal else 1
  config.ckpt_steps = 1000 if not arg.runlocal else 3
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "captioning"
  config.loss = dict(masked_pred_prob=0.5, masking_ratio=1.0)

  # The longest caption has 25 letters: "an eight left of an eight".
  tokenize = "tokenize(model='bytes',max_len=26,eos='yes')"
  pp = f"value_range(-1,1,0,16)|{tokenize}|keep('image','labels'{{}})"

  def data(split, length):
    return dict(type="digit_pairs", split=split, length=length, margin=1)

  config.input = dict(
    data=data("train", 200_000),
    pp=pp.format(""),
    batch_size=32 if not arg.runlocal else 16,
  )

  config.model_name = "cappa"
  config.model = dict(
    vocab_size=259,
    max_len=26,
    patch_size=5,
    width=64,
    depth=4,
    mlp_dim=128,
    num_heads=4,
    decoder_depth=2,
    decoder_bias=False,
    mask_token=True,
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 3e-3
  config.wd = 3e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=4)

  def held_out(num_examples):
    return data("test", num_examples if not arg.runlocal else 32)

  config.evals = {}
  config.evals.val = dict(
    type="scoring",
    pred="score",
    data=held_out(1000),
    pp=pp.format(",'label'"),
    pp_text=tokenize,
    class_names=CLASS_NAMES,
    log_percent=100,
  )
  config.evals.perplexity = dict(
    type="perplexity",
    pred="perplexity",
    data=held_out(1000),
    pp=pp.format(""),
    log_percent=25,
  )
  config.evals.captions = dict(
    type="captions",
    pred="caption",
    data=held_out(1000),
    pp=pp.format(""),
    tokenizer="bytes",
    log_percent=100,
  )
  return config
