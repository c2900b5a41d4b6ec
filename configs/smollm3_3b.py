"""A decoder of the size of SmolLM3 3B, from scratch.

Command: python -m bigtrain.main --workdir=runs/smollm3_3b \
  --config=configs/smollm3_3b.py:data=data/tokens --config.microbatches=3
Hardware: 64 H100, with 25 of 80 GB by tools.plan.
Result: not measured by us. The published model was trained on 11.2 trillion
tokens, with a constant rate and a linear decay at the end.
Source: sizes of HuggingFaceTB/SmolLM3-3B (config.json); batch, rate and decay
of its announcement, huggingface.co/blog/smollm3; 20 tokens per parameter as in
Hoffmann et al. 2022, arxiv.org/abs/2203.15556.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("smollm3_3b", arg)
