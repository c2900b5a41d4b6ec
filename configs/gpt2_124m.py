"""GPT-2 124M on 10 billion tokens of web text.

Command: python -m bigtrain.tools.tokenize (see docs/language.md) makes
  data/fineweb with the folders train and val, and then
  python -m bigtrain.main --config=configs/gpt2_124m.py --workdir=runs/gpt2
Hardware: 8 accelerators with 80 GB; the source took 90 minutes on 8 A100.
Result: about 3.28 nats a token on held-out FineWeb (val/loss), which is the
source's; we have not run it.
Source: Karpathy 2024, "Reproducing GPT-2 (124M) in llm.c in 90 minutes",
discussion 481 of karpathy/llm.c: batch, learning rate, schedule, weight decay.
"""

from pydoc_data import topics

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: data (folder of token files), init, runlocal (for tests)."""
  arg = common.parse_arg(arg, data="data/fineweb", init="", runlocal=False)
  length = 1024 if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_tokens = 10_000_000_000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=1)

  def data(split):
    if arg.runlocal:
      return dict(type="text", path=topics.__file__, length=length)
    return dict(type="tokens", path=f"{arg.data}/{split}", length=length)

  # 2**19 tokens a step.
  config.task = "language_modeling"
  config.input = dict(data=data("train"), batch_size=512)

  config.model_name = "decoder"
  config.model = dict(
    variant="gpt2_124m",
    vocab_size=50304,
    scan=False,
    dtype="bfloat16",
  )
  if arg.init:
    config.model_init = arg.init

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 6e-4
  config.wd = 0.1
  config.wd_coupling = "lr"
  config.wd_mults = [(r".*/kernel|.*embedding", 1.0)]
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=700)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=data("val"),
    num_examples=10_240,
    log_steps=250,
  )

  if arg.runlocal:
    del config.total_tokens
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.evals.val.num_examples = 16
    config.model.variant = "gpt2_mu"
    config.model.vocab_size = 259
  return config
