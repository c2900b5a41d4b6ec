"""A mixture of experts of the shape of Mixtral 8x7B.

Command: python -m bigtrain.main \
  --config=configs/mixtral_8x7b.py:init=FOLDER,data=data/tokens \
  --workdir=runs/mixtral, to go on from the published weights.
Hardware: 64 accelerators with 80 GB: parameters and Adam's moments take 560 GB.
Result: none of ours, and how it was trained is not published.
Source: sizes of Jiang et al. 2024, arxiv.org/abs/2401.04088, table 1, and of
mistralai/Mixtral-8x7B-v0.1 (config.json); losses of the router as in Zoph et
al. 2022, arxiv.org/abs/2202.08906.
"""

from pydoc_data import topics

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: data (folder of token files), init, runlocal (for tests)."""
  arg = common.parse_arg(arg, data="data/tokens", init="", runlocal=False)
  length = 4096 if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_tokens = 25_000_000_000
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(replica=-1, fsdp=8)
  # Whole experts on each device.
  config.sharding = [
    (r".*/moe/(gate|up|down)/kernel", "shard_dim(-3)"),
    (r".*", "fsdp"),
  ]

  def data(split):
    if arg.runlocal:
      return dict(type="text", path=topics.__file__, length=length)
    return dict(type="tokens", path=f"{arg.data}/{split}", length=length)

  config.task = "language_modeling"
  config.loss = dict(load_balance=0.01, router_z=0.001)
  config.input = dict(data=data("train"), batch_size=512)

  config.model_name = "decoder"
  config.model = dict(
    variant="mixtral_8x7b",
    vocab_size=32_000,
    scan=True,
    remat_policy="nothing_saveable",
    dtype="bfloat16",
  )
  if arg.init:
    config.model_init = arg.init

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 1e-4
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
    config.model.variant = "mixtral_mu"
    config.model.vocab_size = 259
  return config
