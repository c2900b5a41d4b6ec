"""A decoder of the shape of Llama 3.1 8B, from scratch or from its weights.

Command: python -m bigtrain.main --config=configs/llama_8b.py:data=data/tokens \
  --workdir=runs/llama_8b --config.mesh.fsdp=-1
  With init=FOLDER (model.safetensors as published) it goes on from there.
Hardware: 64 accelerators with 80 GB; eight hold the state (12 GB each for
parameters and Adam's moments), and take eight times as long.
Result: none of ours. The paper's 8B was trained on 15 trillion tokens.
Source: sizes of meta-llama/Llama-3.1-8B (model card and config.json); optimizer
and learning rate of the paper, arxiv.org/abs/2407.21783, table 3.
"""

from pydoc_data import topics

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: data (folder of token files), init, runlocal (for tests)."""
  arg = common.parse_arg(arg, data="data/tokens", init="", runlocal=False)
  length = 8192 if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_tokens = 160_000_000_000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=8)

  def data(split):
    if arg.runlocal:
      return dict(type="text", path=topics.__file__, length=length)
    return dict(type="tokens", path=f"{arg.data}/{split}", length=length)

  config.task = "language_modeling"
  config.loss = dict(z_loss=1e-4)
  config.input = dict(data=data("train"), batch_size=512)

  config.model_name = "decoder"
  config.model = dict(
    variant="llama_8b",
    vocab_size=128_256,
    scan=True,
    remat_policy="nothing_saveable",
    dtype="bfloat16",
  )
  if arg.init:
    config.model_init = arg.init

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 3e-4
  config.wd = 0.1
  config.wd_coupling = "lr"
  config.wd_mults = [(r".*/kernel|.*embedding", 1.0)]
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=2000)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=data("val"),
    num_examples=1024,
    log_steps=1000,
  )

  if arg.runlocal:
    del config.total_tokens
    config.total_steps = 3
    config.log_steps = 1
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.evals.val.num_examples = 16
    config.model.variant = "llama_mu"
    config.model.vocab_size = 259
  return config
