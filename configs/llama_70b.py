"""A decoder of the size of Llama 3.1 70B, from scratch or from its weights.

Command: python -m bigtrain.main --workdir=runs/llama_70b \
  --config=configs/llama_70b.py:data=data/tokens
  With init=FOLDER (the published model.safetensors) training continues from
  those weights.
Hardware: 512 H100 or 256 TPU v5p, with the state over all of them. That is the
mesh that tools.plan --choose puts first for H100, by formula. On v5p it is the
plan's compiled 2D mesh: 30 GB per chip with --config.microbatches=2.
Result: not measured by us. The 70B of the paper was trained on 15 trillion
tokens.
Source: sizes of meta-llama/Llama-3.1-70B (model card and config.json);
optimizer and learning rate of the paper, arxiv.org/abs/2407.21783, table 3.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("llama_70b", arg)
