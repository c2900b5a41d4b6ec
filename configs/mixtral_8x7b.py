"""A mixture of experts of the size of Mixtral 8x7B.

Command: python -m bigtrain.main \
  --config=configs/mixtral_8x7b.py:init=FOLDER,data=data/tokens \
  --workdir=runs/mixtral
  This continues from the published weights in FOLDER.
Hardware: 64 TPU v5p, with the state over all of them: 560 GB of parameters and
moments of Adam. Each chip has eight sequences in one microbatch, and gathers
the experts of a layer. By the TPU's compiler, 38 of 102 GB.
Result: not measured by us; the original training recipe is not published.
Source: sizes of Jiang et al. 2024, arxiv.org/abs/2401.04088, table 1, and of
mistralai/Mixtral-8x7B-v0.1 (config.json); losses of the router as in Zoph et
al. 2022, arxiv.org/abs/2202.08906.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("mixtral_8x7b", arg)
