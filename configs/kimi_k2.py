"""A mixture of experts of the size of Kimi K2: 1.03T parameters, 33B active.

Like configs/deepseek_v3.py, but with more experts, half as many heads, and
MuonClip: Muon for the matrices, and a limit for the logits of attention.

Command: python -m bigtrain.main \
  --config=configs/kimi_k2.py:data=data/tokens --workdir=runs/kimi_k2
  With init=FOLDER it continues from published weights, in FP8 or bfloat16.
Hardware: 1,024 TPU v5p with --config.microbatches=2, or 2,048 H100. By the
plan's formulas (tools.plan --choose, nothing compiled) a step of 67M tokens
computes for 70 s on the former, with fsdp=256 and tensor=4, and needs 82 of 102
GB. On the H100s 18 s of communication exceed the 16 s of computation.
Result: not measured by us.
Source: sizes of moonshotai/Kimi-K2-Base (config.json); batch, learning rate,
warm-up, tokens and MuonClip of arxiv.org/abs/2507.20534, sections 2.1 and 2.5.
There the learning rate stays constant for 10T tokens.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("kimi_k2", arg)
