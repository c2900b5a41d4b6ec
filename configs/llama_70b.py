"""A decoder of the size of Llama 3.1 70B, from scratch or from its weights.

Command: python -m bigtrain.main --workdir=runs/llama_70b \
  --config=configs/llama_70b.py:data=data/tokens --config.mesh.fsdp=256 \
  --config.mesh.tensor=2 --config.microbatches=2 \
  --config.model.remat_policy=none
  With init=FOLDER (the published model.safetensors) training continues from
  those weights.
Hardware: 512 H100. tools.plan --choose --compiler=gpu puts this mesh first,
with 74 of 80 GB. Or 256 TPU v5p with the state over all of them, which is the
default: 30 GB per chip with --config.microbatches=2 as the only option.
Result: not measured by us. The 70B of the paper was trained on 15 trillion
tokens.
Source: sizes of meta-llama/Llama-3.1-70B (model card and config.json);
optimizer and learning rate of the paper, arxiv.org/abs/2407.21783, table 3.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("llama_70b", arg)
