"""A decoder of the size of Qwen3 0.6B, from scratch.

Command: python -m bigtrain.main --workdir=runs/qwen3_0_6b \
  --config=configs/qwen3_0_6b.py:data=data/tokens --config.microbatches=8
Hardware: 8 accelerators with 80 GB; by tools.plan, 30 GB of an H100.
Result: none published: the released 0.6B was distilled.
Source: sizes of Qwen/Qwen3-0.6B (config.json); 20 tokens per parameter as in
Hoffmann et al. 2022, arxiv.org/abs/2203.15556; optimizer as in llama_1b.py.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("qwen3_0_6b", arg)
