"""A small SigLIP that matches captions and pairs of handwritten digits.

Command: python -m bigtrain.main --config=configs/digits_siglip.py \
  --workdir=runs/digits_siglip
Hardware: any; two CPU cores need one to two minutes.
Result: at least 0.95 zero-shot accuracy over the 100 ordered pairs
(zeroshot/acc), on images of held-out digits; 0.978 with seed 0. After 1,000
steps it is 0.89 to 0.94, depending on the processor.
Source: our own runs, see docs/images_and_text.md. An image shows two digits of
the data of configs/digits.py, at slightly varying positions. A caption reads "a
seven left of a three".
"""

import ml_collections

from configs import common

WORDS = "zero one two three four five six seven eight nine".split()
NOUNS = ["an eight" if word == "eight" else f"a {word}" for word in WORDS]


def get_config(arg=None):
  """Arguments: runlocal (a few steps, for tests)."""
  arg = common.parse_arg(arg, runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 1500 if not arg.runlocal else 3
  config.log_steps = 50 if not arg.runlocal else 1
  config.ckpt_steps = 250 if not arg.runlocal else 3
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "contrastive"
  config.loss = dict(kind="sigmoid")

  # The longest caption has 25 letters: "an eight left of an eight".
  tokenize = "tokenize(model='bytes',max_len=28,eos='sticky')"
  pp = f"value_range(-1,1,0,16)|{tokenize}|keep('image','labels'{{}})"

  def data(split, length):
    return dict(type="digit_pairs", split=split, length=length, margin=1)

  # Without shuffling, any hundred consecutive examples show all hundred pairs.
  # So no batch has the same caption twice, which would count as a mismatch.
  config.input = dict(
    data=data("train", 200_000),
    pp=pp.format(""),
    shuffle=False,
    batch_size=96 if not arg.runlocal else 16,
  )

  tower = dict(width=64, mlp_dim=128, num_heads=4)
  config.model_name = "two_towers"
  config.model = dict(
    image=dict(patch_size=5, depth=3, pool_type="map", **tower),
    text=dict(vocab_size=259, depth=1, pool_type="last", **tower),
    out_dim=(None, 64),
    temperature_init=10.0,
    bias_init=-5.0,
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 3e-3 if not arg.runlocal else 3e-4
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=8)

  num_examples = 1000 if not arg.runlocal else 32
  held_out = data("test", num_examples)
  config.evals = {}
  config.evals.zeroshot = dict(
    type="zeroshot",
    pred="embed",
    data=held_out,
    pp="value_range(-1,1,0,16)|keep('image','label')",
    pp_text=tokenize,
    class_names=[f"{a} left of {b}" for a in NOUNS for b in NOUNS],
    log_percent=20 if not arg.runlocal else 100,
  )
  return config
