"""Learns to add from rewards: GRPO on answers that the model writes itself.

Command: first a model that adds badly, from questions with answers,
  python -m bigtrain.main --config=configs/grpo.py:sft --workdir=runs/adds
then python -m bigtrain.main --config=configs/grpo.py --workdir=runs/grpo;
with a published model and prompts of your own
  --config=configs/grpo.py:init=models/SmolLM2,data=math.jsonl
Hardware: any; two CPU cores need a few minutes for each of the first two.
Result: share of right answers among the 512 of a step, at temperature 1: 57% at
step 1, 68% at step 20 and 73 to 77% from step 50 on, one seed. Each prompt is
used once.
Source: our own runs, see docs/rewards.md; GRPO is from
https://arxiv.org/abs/2402.03300.
"""

import ml_collections

from configs import common


def exact(texts, row):
  """The reward 1 of answers that equal the row's completion, else 0."""
  return [text.strip() == row["completion"].strip() for text in texts]


def digits(texts, row):
  """The number of digits, which a model without any training can learn."""
  del row
  return [sum(c.isdigit() for c in text) for text in texts]


def get_config(arg=None):
  """Arguments: sft (trains the first model), init, data, runlocal.

  `data` is a .jsonl or .parquet file of rows with `prompt` and `completion`.
  `init` is the folder of a published model. The last hundredth of the rows is
  for evaluation.
  """
  arg = common.parse_arg(arg, sft=False, init="", data="", runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.mesh = dict(replica=1, fsdp=-1)
  config.total_steps = 4 if arg.runlocal else 1200 if arg.sft else 100
  config.log_steps = 2 if arg.runlocal else 20 if arg.sft else 10
  config.ckpt_steps = 2 if arg.runlocal else 300 if arg.sft else 50
  if arg.sft and not arg.runlocal:
    config.stop_at_steps = 600  # Half of the training: it still errs.

  def rows(kind, train):
    length = dict(prompts=8, supervised=16)[kind]
    rows = dict(
      type=kind,
      tokenizer=arg.init or "bytes",
      length=512 if arg.init else length,
      too_long="drop",
    )
    if arg.data:
      return rows | dict(path=arg.data, slice="[:99%]" if train else "[99%:]")
    return rows | dict(name="arithmetic", split="train" if train else "test")

  if arg.sft:
    config.task = "language_modeling"
    config.input = dict(data=rows("supervised", True), batch_size=128)
  else:
    config.task = "policy_gradient"
    config.loss = dict(
      kind="grpo", samples=8, max_new=256 if arg.init else 6, temperature=1.0
    )
    rewards = "configs.grpo.digits" if arg.runlocal else "configs.grpo.exact"
    config.input = dict(
      data=rows("prompts", True) | dict(rewards=rewards),
      batch_size=64 if not arg.runlocal else 8,
    )

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
    if not arg.sft:
      config.model_init = "runs/adds" if not arg.runlocal else None

  b2 = 0.95 if arg.sft else 0.99
  config.optimizer = dict(name="adam", b1=0.9, b2=b2)
  config.lr = 2e-3 if arg.sft else 1e-6 if arg.init else 1e-4
  config.wd = 0.0
  config.grad_clip_norm = 1.0
  config.schedule = dict(
    decay_type="cosine" if arg.sft else "linear", warmup_percent=5
  )

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=rows("supervised", False),
    log_percent=25,
    batch_size=32,
  )
  return config
