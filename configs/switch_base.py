"""Switch Transformer base: T5 base with experts in every second layer, on C4.

Command: python -m bigtrain.main \
  --config=configs/switch_base.py:experts=128,data_dir=DIR \
  --workdir=runs/switch_base_128
  DIR has the folders c4_train and c4_validation, which python -m
  bigtrain.tools.tokenize makes of C4 with T5's vocabulary.
Hardware: written for 64 accelerators with 16 GB; not run by us at this size.
Result: losses on C4 in the paper, in nats per token, are 1.505 with 16 experts,
1.474 with 32, 1.444 with 64, 1.432 with 128 and 1.427 with 256, and 1.636 for
T5 base (table 7). None is published for 8.
Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, sections 2 and 4.1:
550,000 steps of 2^20 tokens (as the released models, except the one with 8
experts, which stopped at 500,100: docs/models.md of google-research/t5x), load
balancing loss, jitter, scale of the initial values; capacities, z-loss and
sizes of the released models: google/flaxformer, switch_classic_base.gin.
"""

from configs import common, t5_c4

RECIPE = t5_c4.Recipe(
  total_steps=550_000,
  batch_size=2048,
  model=dict(variant="t5_base", depth=12, mlp_dim=3072, dropout=0.0),
  tiny_depth=2,  # Experts are in every second layer.
)


def get_config(arg=None):
  """Arguments: experts, data_dir; runlocal (tiny, on Python's own topics)."""
  arg = common.parse_arg(arg, experts=8, data_dir="data", runlocal=False)
  config = t5_c4.make(RECIPE, arg)
  if not arg.runlocal:
    config.mesh = dict(replica=-1, fsdp=8)
  config.loss.update(load_balance=0.01, router_z=0.0)
  config.model.init_scale = 0.1
  config.model.moe = dict(
    num_experts=arg.experts,
    top_k=1,
    axis="fsdp",
    every=2,
    capacity_factor=1.25,
    eval_capacity_factor=2.0,
    jitter=0.01,
  )
  return config
