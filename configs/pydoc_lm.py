"""A small GPT on Python's own documentation, byte by byte: the quickstart.

A modern GPT: rotary positions, norms of queries and keys, gated MLPs, and Muon
for the matrices.

Command: python -m bigtrain.main --config=configs/pydoc_lm.py \
  --workdir=runs/pydoc_lm; then python -m bigtrain.tools.generate \
  --workdir=runs/pydoc_lm --prompt="The with statement"
Hardware: any; two CPU cores need two to three minutes.
Result: 1.54 bits per byte (val/bits_per_byte) on the last tenth of the topics,
sorted by name; 1.57 with :moe.
Source: our own runs, see docs/language.md. The text is pydoc_data.topics, a
module of every Python.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: moe (four experts replace each MLP), runlocal (for tests)."""
  arg = common.parse_arg(arg, runlocal=False, moe=False)
  length = 128 if not arg.runlocal else 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 600 if not arg.runlocal else 4
  config.log_steps = 50 if not arg.runlocal else 2
  config.ckpt_steps = 200 if not arg.runlocal else 2
  config.mesh = dict(replica=1, fsdp=-1)

  config.task = "language_modeling"
  config.input = dict(
    data=dict(type="text", name="pydoc", split="train", length=length),
    batch_size=16,
  )

  config.model_name = "decoder"
  config.model = dict(
    variant="llama",
    vocab_size=259,
    width=128,
    depth=4 if not arg.runlocal else 2,
    num_heads=2,
    mlp_dim=344,
    qk_norm=True,
  )

  mlps = (r".*/mlp/(gate|up|down)/kernel", 0, 1)
  if arg.moe:
    config.model.moe = dict(num_experts=4, top_k=1, capacity_factor=1.25)
    mlps = (r".*/moe/(gate|up|down)/kernel", 1, 2)

  # Input and output dimensions of each matrix, for Muon. Its updates are scaled
  # to the RMS of Adam's, which the other parameters use.
  config.optimizer = dict(
    name="muon",
    consistent_rms=0.2,
    adam_b2=0.98,
    muon_weight_dimension_numbers=[
      (r".*/(query|key|value)/kernel", 0, (1, 2)),
      (r".*/out/kernel", (0, 1), 2),
      mlps,
    ],
  )
  config.lr = 6e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=5)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=dict(type="text", name="pydoc", split="test", length=length),
    log_steps=200 if not arg.runlocal else 2,
    batch_size=64,
  )
  return config
