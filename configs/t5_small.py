"""T5 small, pre-trained on C4 by span corruption.

Command: python -m bigtrain.main --config=configs/t5_small.py:data_dir=DIR \
  --workdir=runs/t5_small
  DIR has the folders c4_train and c4_validation, which python -m
  bigtrain.tools.tokenize makes of C4 with T5's vocabulary.
Hardware: written for 8 accelerators with 16 GB; not run by us at this size.
Result: the paper states no loss. Small T5s that were trained longer, with
labelled tasks mixed in, have a GLUE average of 77.4 after fine-tuning.
Source: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.1: 2^19
steps of 128 sequences, Adafactor, learning rate 1 / sqrt(max(step, 10^4)),
dropout of 0.1; table 14 for the result. Before step 10^4 the learning rate
rises linearly here, and is constant in the paper.
"""

from configs import t5_c4


def get_config(arg=None):
  """Arguments: data_dir; runlocal (tiny, on Python's own documentation)."""
  return t5_c4.get_config_of("t5_small", arg)
