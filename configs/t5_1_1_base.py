"""T5 1.1 base, pre-trained on C4 by span corruption.

Command: python -m bigtrain.main --config=configs/t5_1_1_base.py:data_dir=DIR \
  --workdir=runs/t5_1_1_base
  DIR has the folders c4_train and c4_validation, which python -m
  bigtrain.tools.tokenize makes of C4 with T5's vocabulary.
Hardware: written for 64 accelerators with 16 GB; not run by us at this size.
Result: no loss is published.
Source: the notes on version 1.1 in google-research/t5x (docs/models.md): gated
GELUs, separate output head, C4 alone, no dropout; the rest as for the released
models of Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.7:
10^6 steps of 2048 sequences. The z-loss is from T5X.
"""

from configs import t5_c4


def get_config(arg=None):
  """Arguments: data_dir; runlocal (tiny, on Python's own documentation)."""
  return t5_c4.get_config_of("t5_1_1_base", arg)
