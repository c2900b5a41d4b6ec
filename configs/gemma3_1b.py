"""A decoder of the size of Gemma 3 1B, from scratch.

Command: python -m bigtrain.main --workdir=runs/gemma3_1b \
  --config=configs/gemma3_1b.py:data=data/tokens --config.microbatches=8
Hardware: 8 accelerators with 80 GB; 18 GB of an H100 by the GPU's compiler.
Result: none published: the released 1B was distilled, from 2 trillion tokens.
Source: sizes of google/gemma-3-1b-pt (config.json) and of the report,
arxiv.org/abs/2503.19786; 20 tokens per parameter as in Hoffmann et al. 2022,
arxiv.org/abs/2203.15556; optimizer as in llama_1b.py.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("gemma3_1b", arg)
