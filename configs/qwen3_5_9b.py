"""A decoder of the size of Qwen 3.5 9B, from scratch: its text model.

Three of four layers are Gated DeltaNet, whose time and memory per token do not
grow with the text.

Command: python -m bigtrain.main --workdir=runs/qwen3_5_9b \
  --config=configs/qwen3_5_9b.py:data=data/tokens --config.microbatches=8
Hardware: 64 accelerators with 80 GB, each with a sequence of 8,192 tokens at a
time: 37 GB of an H100 by tools.plan.
Result: none published: neither the data nor the recipe of the original is.
Source: sizes of Qwen3_5TextConfig in transformers, "Qwen3.5-9B style"; Gated
DeltaNet as in arxiv.org/abs/2412.06464; 20 tokens per parameter as in Hoffmann
et al. 2022, arxiv.org/abs/2203.15556; optimizer as in llama_8b.py.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("qwen3_5_9b", arg)
