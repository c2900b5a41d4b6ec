"""A mixture of experts of the size of gpt-oss-20b.

Command: python -m bigtrain.main \
  --config=configs/gpt_oss_20b.py:init=FOLDER,data=data/tokens \
  --workdir=runs/gpt_oss
  This continues from the published weights in FOLDER, in MXFP4 or bfloat16.
Hardware: 64 TPU v5p, with the state over all of them: 250 GB of parameters and
moments of Adam. Each chip has eight sequences in one microbatch: 71 of 102 GB
by tools.plan, whose compiler plans more than the TPU's.
Result: not measured by us; the original training recipe is not published.
Source: sizes of openai/gpt-oss-20b (config.json) and of the model card,
arxiv.org/abs/2508.10925; losses of the router as in Zoph et al. 2022,
arxiv.org/abs/2202.08906.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("gpt_oss_20b", arg)
