"""T5 small, pre-trained on C4 by span corruption.

Command: python -m bigtrain.main --config=configs/t5_small.py:data_dir=DIR \
  --workdir=runs/t5_small, where DIR has the folders c4_train and c4_validation
  that python -m bigtrain.tools.tokenize made of C4 with T5's vocabulary
Hardware: written for 8 accelerators of 16 GB; not run by us at this size.
Result: the paper tells none of the loss. Small T5s that were trained longer,
with labelled tasks mixed in, have a GLUE average of 77.4 when fine-tuned.
Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.1: 2^19
steps of 128 sequences, Adafactor, the rate 1 / sqrt(max(step, 10^4)), dropout
of 0.1; table 14 for the result. Before step 10^4 the rate rises linearly here,
and is constant there.
"""

import importlib.util

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: data_dir; runlocal (tiny, on Python's own documentation)."""
  arg = common.parse_arg(arg, data_dir="data", runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 524_288 if not arg.runlocal else 4
  config.log_steps = 100 if not arg.runlocal else 1
  config.ckpt_steps = 5000 if not arg.runlocal else 4
  config.mesh = dict(replica=1, fsdp=-1)

  # A window of 568 tokens gives 512 inputs and 114 targets.
  pp = (
    "span_corruption({length},density=0.15,mean_span=3.0,sentinel={sentinel},"
    "num_sentinels=100,eos_id={eos_id})|keep('inputs','targets')"
  )
  if arg.runlocal:  # Bytes, and sentinels above them.
    length, vocab_size = 64, 259 + 100
    pp = pp.format(length=length, sentinel=vocab_size - 1, eos_id=2)
  else:
    length, vocab_size = 568, 32_128
    pp = pp.format(length=length, sentinel=32_099, eos_id=1)

  config.task = "seq2seq"
  config.loss = dict(z_loss=1e-4)
  config.input = dict(
    data=_data(arg, "train", length),
    pp=pp,
    batch_size=128 if not arg.runlocal else 8,
  )

  config.model_name = "t5"
  config.model = dict(
    variant="t5_small",
    vocab_size=vocab_size,
    depth=6,
    mlp_dim=2048,
    dropout=0.1,
    scan=True,
    dtype="bfloat16",
  )
  if arg.runlocal:
    config.model.update(width=32, depth=1, mlp_dim=64)

  config.optimizer = dict(name="adafactor")
  config.lr = 0.01
  config.schedule = dict(
    decay_type="rsqrt",
    warmup_steps=10_000 if not arg.runlocal else 1,
    timescale_steps=10_000,
  )

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=_data(arg, "validation", length),
    pp=pp,
    log_steps=5000 if not arg.runlocal else 4,
    num_examples=16_384 if not arg.runlocal else 16,
  )
  return config


def _data(arg, split, length):
  if arg.runlocal:
    topics = importlib.util.find_spec("pydoc_data.topics").origin
    return dict(type="text", path=topics, length=length, last="drop")
  path = f"{arg.data_dir}/c4_{split}"
  return dict(type="tokens", path=path, length=length, last="drop")
