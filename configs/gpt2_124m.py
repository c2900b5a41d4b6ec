"""GPT-2 124M on 10 billion tokens of web text.

Command: python -m bigtrain.tools.tokenize (see docs/tokens.md) writes
  data/fineweb with the folders train and val; then
  python -m bigtrain.main --config=configs/gpt2_124m.py --workdir=runs/gpt2
Hardware: 8 accelerators with 80 GB; the source needed 90 minutes on 8 A100.
Result: about 3.28 nats per token on held-out FineWeb (val/loss) at the source;
we have not run it.
Source: Karpathy 2024, "Reproducing GPT-2 (124M) in llm.c in 90 minutes",
discussion 481 of karpathy/llm.c: batch, learning rate, schedule, weight decay.
"""

from configs import decoder_lm


def get_config(arg=None):
  """Arguments: data (folder of token files), length, init, runlocal."""
  return decoder_lm.get_config_of("gpt2_124m", arg)
