"""Fine-tunes a language model on questions and answers, or on chats.

Command: python -m bigtrain.main --config=configs/sft.py --workdir=runs/sft;
with a published model and texts of your own
  --config=configs/sft.py:init=models/SmolLM2,data=chats.jsonl
Hardware: any; two CPU cores need a few minutes without arguments.
Result: without arguments, val/loss of 1.45 nats a byte and val/accuracy of
0.585 on every tenth question, one seed.
Source: our own runs, see docs/finetuning.md. The questions are names and
signatures of Python's library, the answers the first sentences of their
documentation.
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: init (folder of a published model), data, runlocal.

  `data` is a .jsonl or .parquet file of rows, see docs/finetuning.md. The last
  hundredth of it is for evaluation. Without `init`, a small model learns from
  scratch, byte by byte.
  """
  arg = common.parse_arg(arg, init="", data="", runlocal=False)
  length = 2048 if arg.init else 256
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.mesh = dict(replica=1, fsdp=-1)
  if arg.init:
    config.total_epochs = 2.0
    config.log_steps, config.ckpt_steps = 10, 200
  else:
    config.total_steps = 600 if not arg.runlocal else 4
    config.log_steps = 50 if not arg.runlocal else 2
    config.ckpt_steps = 200 if not arg.runlocal else 2

  def rows(part, train):
    rows = dict(
      type="supervised",
      tokenizer=arg.init or "bytes",
      length=length,
      pack=True,
      too_long="drop",
    )
    if arg.data:
      return rows | dict(path=arg.data, slice="[:99%]" if train else "[99%:]")
    return rows | dict(name="pydoc", split="train" if train else "test")

  config.task = "language_modeling"
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

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 2e-5 if arg.init else 2e-3
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=5)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=rows("test", False),
    log_percent=25,
    batch_size=8,
  )
  return config
