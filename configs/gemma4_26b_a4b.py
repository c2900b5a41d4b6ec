"""A mixture of experts of the size of Gemma 4 26B-A4B, from scratch.

Only the text model. Each layer has an MLP and 128 experts, and each token uses
8 of them: 3.8 of 25 billion parameters.

Command: python -m bigtrain.main --workdir=runs/gemma4_26b_a4b \
  --config=configs/gemma4_26b_a4b.py:data=data/tokens
Hardware: 64 accelerators with 80 GB, with the state over all of them: 303 GB of
parameters and moments of Adam.
Result: none published. The original's data and recipe are not public either.
Source: sizes of google/gemma-4-26B-A4B (config.json); 20 tokens per active
parameter as in Hoffmann et al. 2022, arxiv.org/abs/2203.15556.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("gemma4_26b_a4b", arg)
