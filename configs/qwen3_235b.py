"""A mixture of experts of the size of Qwen3-235B-A22B, from scratch.

Each token has 8 of 128 experts: 22 of 235 billion parameters.

Command: python -m bigtrain.main --workdir=runs/qwen3_235b \
  --config=configs/qwen3_235b.py:data=data/tokens
Hardware: 256 accelerators with 80 GB, with the state over all of them. Each has
four sequences in one microbatch: 68 GB of an H100 by the GPU's compiler.
Result: none published: neither the data nor the recipe of the original is.
Source: sizes of Qwen/Qwen3-235B-A22B (config.json) and of the report,
arxiv.org/abs/2505.09388; 20 tokens per active parameter as in Hoffmann et al.
2022, arxiv.org/abs/2203.15556; weight of the balance loss as in config.json.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("qwen3_235b", arg)
