"""Fine-tunes Gemma 3 4B on questions about pictures.

Command: python -m bigtrain.main --workdir=runs/gemma3_4b \
  --config=configs/gemma3_4b.py:data=questions.jsonl
Hardware: not known; no compiler has planned this config yet.
Result: depends on your data.
Source: sizes of google/gemma-3-4b-pt (config.json); the model is that of
arxiv.org/abs/2503.19786. The report has no recipe for fine-tuning: rate, batch
and epochs are our guesses.
"""

from configs import vlm_transfer


def get_config(arg=None):
  """Arguments: init (folder of the published model), data, runlocal."""
  return vlm_transfer.get_config_of("gemma3_4b", arg)
