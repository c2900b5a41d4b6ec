"""A decoder of the size of Llama 3.2 1B, from scratch.

Command: python -m bigtrain.main --config=configs/llama_1b.py:data=data/tokens \
  --workdir=runs/llama_1b --config.microbatches=8
Hardware: 8 accelerators with 80 GB.
Result: none published: the released 1B was pruned from 8B and distilled.
docs/benchmarks.md measures the speed of this model.
Source: sizes of meta-llama/Llama-3.2-1B (model card and config.json); 20 tokens
per parameter as in Hoffmann et al. 2022, arxiv.org/abs/2203.15556; optimizer of
the Llama 3 paper, arxiv.org/abs/2407.21783, section 3.4.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("llama_1b", arg)
