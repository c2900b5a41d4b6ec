"""Direct preference optimization with adapters, on pairs of answers.

Command: first the model of configs/sft.py,
  python -m bigtrain.main --config=configs/sft.py --workdir=runs/sft
then python -m bigtrain.main --config=configs/dpo.py --workdir=runs/dpo;
with a published model and pairs of your own
  --config=configs/dpo.py:init=models/SmolLM2,data=pairs.jsonl
Hardware: any; two CPU cores need a few minutes without arguments.
Result: without arguments, val/accuracy, the share of held-out pairs whose
chosen answer has the larger reward, is 0.865 over 155 pairs, and val/loss is
0.311; at the start they are 0.5 and log 2 = 0.693. One seed. For comparison,
the shorter answer is the chosen one in 0.66 of the held-out pairs.
Source: DPO (https://arxiv.org/abs/2305.18290), see docs/finetuning.md. The
questions are those of configs/sft.py whose documentation has several sentences.
The chosen answer is the first sentence, and the rejected one a later sentence,
which describes a detail.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: init (folder of a published model), data, runlocal.

  `data` is a .jsonl or .parquet file of rows with `prompt`, `chosen` and
  `rejected`. The last hundredth of it is for evaluation.
  """
  arg = common.parse_arg(arg, init="", data="", runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.mesh = dict(replica=1, fsdp=-1)
  if arg.init:
    config.total_epochs = 1.0
    config.log_steps, config.ckpt_steps = 10, 200
  else:
    config.total_steps = 200 if not arg.runlocal else 4
    config.log_steps = 20 if not arg.runlocal else 2
    config.ckpt_steps = 100 if not arg.runlocal else 2

  def rows(part, train):
    rows = dict(
      type="supervised",
      tokenizer=arg.init or "bytes",
      length=1024 if arg.init else 256,
      preferences=True,
      too_long="drop",
    )
    if arg.data:
      return rows | dict(path=arg.data, slice="[:99%]" if train else "[99%:]")
    return rows | dict(name="pydoc", split=part)

  config.task = "preference"
  config.loss = dict(kind="sigmoid", beta=0.1)
  config.input = dict(data=rows("train", True), batch_size=8)

  config.model_name = "decoder"
  if arg.init:
    config.model = dict(published=arg.init)
    config.model_init = arg.init
  else:
    config.model = dict(
      variant="llama",
      vocab_size=259,
      width=128,
      depth=4 if not arg.runlocal else 2,
      num_heads=2,
      mlp_dim=344,
    )
    config.model_init = "runs/sft" if not arg.runlocal else None
  config.adapters = dict(
    targets=r".*attention/(query|key|value|out)/kernel", rank=16, alpha=32
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 5e-5 if arg.init else 5e-4
  config.wd = 0.0
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=10)

  config.evals = {}
  config.evals.val = dict(
    type="mean",
    pred="preference",
    data=rows("test", False),
    log_percent=25,
    batch_size=8,
  )
  return config
