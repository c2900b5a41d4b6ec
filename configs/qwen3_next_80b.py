"""A mixture of experts of the size of Qwen3-Next-80B-A3B, from scratch.

Three of four layers are Gated DeltaNet. Each token has 10 of 512 experts, and
one that is shared: 3 of 80 billion parameters.

Command: python -m bigtrain.main --workdir=runs/qwen3_next_80b \
  --config=configs/qwen3_next_80b.py:data=data/tokens --config.microbatches=4
Hardware: 256 accelerators with 80 GB, with the state over all of them. Each has
four sequences, one at a time: 67 GB of an H100 by tools.plan with gathered
experts, and less with the config's exchange of tokens, which was not compiled.
Result: none published: neither the data nor the recipe of the original is.
Source: sizes of Qwen/Qwen3-Next-80B-A3B-Instruct (config.json); Gated DeltaNet
as in arxiv.org/abs/2412.06464; 20 tokens per active parameter as in Hoffmann et
al. 2022, arxiv.org/abs/2203.15556; weight of the balance loss as in the
config.json.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("qwen3_next_80b", arg)
