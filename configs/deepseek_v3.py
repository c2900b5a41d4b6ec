"""A mixture of experts of the size of DeepSeek V3: 671B parameters, 37B active.

Latent attention, a module that predicts one more token, and 256 experts, of
which a token uses 8 in the best 4 of 8 groups. A selection bias balances them.

Command: python -m bigtrain.main \
  --config=configs/deepseek_v3.py:data=data/tokens --workdir=runs/deepseek_v3
  With init=FOLDER it continues from published weights, in FP8 or bfloat16.
Hardware: 2,048 H100, or 512 TPU v5p with --config.microbatches=4. By the plan's
formulas (tools.plan --choose, nothing compiled) a step of 63M tokens computes
for 20 s on the former, with fsdp=512 and tensor=4, and hides 12 s of
communication; it needs 71 of 80 GB if the policy keeps the results of products.
On 512 v5p it takes 174 s and 92 of 102 GB.
Result: not measured by us.
Source: sizes of deepseek-ai/DeepSeek-V3 (config.json); batch, learning rate,
tokens, weights of losses and change of the bias of arxiv.org/abs/2412.19437,
section 4.2. There the batch grows from 3,072 examples, the learning rate stays
constant for 10T tokens, and the last 4.8T have an mtp_weight of 0.1.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("deepseek_v3", arg)
