"""Fine-tunes PaliGemma 2 3B at 224 pixels on questions about pictures.

Command: python -m bigtrain.main --workdir=runs/paligemma2 \
  --config=configs/paligemma2_3b.py:data=questions.jsonl
Hardware: 16 TPU v5e: 10.9 of 16 GB by the TPU's compiler, and 1.0 s for a step.
Result: none of our own; the report has the results on 30 data sets.
Source: sizes of google/paligemma2-3b-pt-224 (config.json); transfers as in the
reports, arxiv.org/abs/2407.07726 and 2412.03555, and in the published config of
VQAv2: batches of 256, 10 epochs at a rate of 1e-5, all parameters. Search the
rate for each data set, from 3e-6 to 1e-4.
"""

from configs import vlm_transfer


def get_config(arg=None):
  """Arguments: init (folder of the published model), data, runlocal."""
  return vlm_transfer.get_config_of("paligemma2_3b", arg)
