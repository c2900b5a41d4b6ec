"""A decoder of the size of Llama 3.1 8B, from scratch or from its weights.

Command: python -m bigtrain.main --config=configs/llama_8b.py:data=data/tokens \
  --workdir=runs/llama_8b --config.mesh.fsdp=-1 --config.microbatches=8
  With init=FOLDER (the published model.safetensors) training continues from
  those weights. With length=131072 a server of eight devices shares each
  example: leave out config.mesh.fsdp, and give config.microbatches the value 4.
  That takes 39 GB on 64 H100, 30 GB on 64 TPU v5p. For a million tokens, 16
  devices share an example: length=1048576, config.model.max_len=1048576 and
  config.mesh=dict(fsdp=4, sequence=16), with one microbatch. It takes 70 GB on
  64 H100.
Hardware: 64 accelerators with 80 GB; eight hold the state (12 GB each for
parameters and moments of Adam), and take eight times as long.
Result: not measured by us. The 8B of the paper was trained on 15 trillion
tokens.
Source: sizes of meta-llama/Llama-3.1-8B (model card and config.json); optimizer
and learning rate of the paper, arxiv.org/abs/2407.21783, table 3.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("llama_8b", arg)
