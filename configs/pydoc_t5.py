"""A small T5 that fills gaps in Python's own documentation, byte by byte.

Command: python -m bigtrain.main --config=configs/pydoc_t5.py \
  --workdir=runs/pydoc_t5
Hardware: any; two CPU cores need a few minutes.
Result: val/loss of about 2.23 nats a token, val/accuracy of 0.38, on the last
  tenth of the topics.
Source: our own runs. The text is pydoc_data.topics, a module of every Python.
The objective is span corruption as in https://arxiv.org/abs/1910.10683, with
longer spans, because bytes are shorter than words.
"""

import ml_collections

from configs import common

_VOCAB_SIZE = 259 + 32  # Bytes, and sentinels above them.


def get_config(arg=None):
  """Arguments: runlocal (a few steps, for tests)."""
  arg = common.parse_arg(arg, runlocal=False)
  length = 192 if not arg.runlocal else 48
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 600 if not arg.runlocal else 4
  config.log_steps = 50 if not arg.runlocal else 1
  config.ckpt_steps = 300 if not arg.runlocal else 4
  config.mesh = dict(replica=1, fsdp=-1)

  pp = (
    f"span_corruption({length},density=0.15,mean_span=8.0,"
    f"sentinel={_VOCAB_SIZE - 1},num_sentinels=32,eos_id=2)"
    "|keep('inputs','targets')"
  )
  config.task = "seq2seq"
  config.loss = dict(z_loss=1e-4)
  config.input = dict(
    data=dict(type="text", name="pydoc", split="train", length=length),
    pp=pp,
    batch_size=16 if not arg.runlocal else 8,
  )

  config.model_name = "t5"
  config.model = dict(
    variant="t5_1_1",
    vocab_size=_VOCAB_SIZE,
    width=128 if not arg.runlocal else 32,
    depth=3 if not arg.runlocal else 1,
    num_heads=4,
    mlp_dim=256,
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.98)
  config.lr = 3e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=5)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=dict(type="text", name="pydoc", split="test", length=length),
    pp=pp,
    log_steps=300 if not arg.runlocal else 4,
    batch_size=64 if not arg.runlocal else 8,
  )
  return config
