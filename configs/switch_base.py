"""Switch Transformer base: T5 base with experts in every second layer, on C4.

Command: python -m bigtrain.main \
  --config=configs/switch_base.py:experts=128,data_dir=DIR \
  --workdir=runs/switch_base_128, where DIR has the folders c4_train and
  c4_validation that python -m bigtrain.tools.tokenize made of C4 with T5's
  vocabulary
Hardware: written for 64 accelerators of 16 GB; not run by us at this size.
Result: the paper's losses on C4, in nats a token, are 1.505 with 16 experts,
1.474 with 32, 1.444 with 64, 1.432 with 128 and 1.427 with 256, and 1.636 of
T5 base (table 7). None is published for 8.
Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, sections 2 and 4.1:
550,000 steps of 2^20 tokens (as the released models, but for that with 8, which
stopped at 500,100: docs/models.md of google-research/t5x), the balance loss,
jitter, the scale of the initial values; capacities, z-loss and sizes of the
released models: google/flaxformer, switch_classic_base.gin.
"""

import importlib.util

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: experts, data_dir; runlocal (tiny, on Python's own topics)."""
  arg = common.parse_arg(arg, experts=8, data_dir="data", runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 550_000 if not arg.runlocal else 4
  config.log_steps = 100 if not arg.runlocal else 1
  config.ckpt_steps = 5000 if not arg.runlocal else 4
  config.mesh = dict(replica=-1, fsdp=8)
  if arg.runlocal:
    config.mesh = dict(replica=1, fsdp=-1)
  # Whole experts on each device. Adafactor's factors have other dimensions.
  config.sharding = [
    (r"opt/.*/v(_row|_col)?/.*", "fsdp"),
    (r".*/moe/(gate|up|down)/kernel", "shard_dim(-3)"),
    (r".*", "fsdp"),
  ]

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
  config.loss = dict(z_loss=1e-4, load_balance=0.01, router_z=0.0)
  config.input = dict(
    data=_data(arg, "train", length),
    pp=pp,
    batch_size=2048 if not arg.runlocal else 8,
  )

  config.model_name = "t5"
  config.model = dict(
    variant="t5_base",
    vocab_size=vocab_size,
    depth=12,
    mlp_dim=3072,
    moe=dict(
      num_experts=arg.experts,
      top_k=1,
      every=2,
      capacity_factor=1.25,
      eval_capacity_factor=2.0,
      jitter=0.01,
    ),
    init_scale=0.1,
    dropout=0.0,
    scan=True,
    dtype="bfloat16",
  )
  if arg.runlocal:
    config.model.update(width=32, depth=2, mlp_dim=64)

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
