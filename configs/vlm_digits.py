"""A small model that answers questions on two pictures of handwritten digits.

Command: python -m bigtrain.main --config=configs/vlm_digits.py \
  --workdir=runs/vlm_digits
Hardware: any; two CPU cores need about ten minutes.
Result: val/exact of 0.93 on held-out digits, one seed; with `scenes`, 0.79, and
boxes overlap the right ones by 0.84 (answers/box_iou).
Source: our own runs. The tower is that of configs/digits.py, the decoder a
small Llama that reads bytes. A row shows two digits and asks, for example,
"What is left of the three?" or "What is the sum?".
"""

import ml_collections

from configs import common


def get_config(arg=None):
  """Arguments: scenes (one picture of both digits, and their boxes), runlocal
  (a few steps, for tests).
  """
  arg = common.parse_arg(arg, scenes=False, runlocal=False)
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = 5000 if arg.scenes else 8000
  if arg.runlocal:
    config.total_steps = 4
  config.log_steps = 100 if not arg.runlocal else 2
  config.ckpt_steps = 1000 if not arg.runlocal else 2
  config.mesh = dict(replica=1, fsdp=-1)

  def rows(split, **others):
    return dict(
      type="supervised",
      name="digit_scenes" if arg.scenes else "digits",
      split=split,
      tokenizer="bytes",
      length=104 if arg.scenes else 48,
      # 2 x 2 image tokens of each picture of 8 x 8 pixels; or one of each half
      # of 10 x 20 pixels.
      pictures=dict(tokens=2 if arg.scenes else 4, pp="value_range(-1, 1)"),
      **others,
    )

  config.task = "language_modeling"
  config.input = dict(
    data=rows("train"), batch_size=32 if not arg.runlocal else 16
  )

  config.model_name = "vision_language"
  config.model = dict(
    image=dict(
      patch_size=2,
      width=64,
      depth=4 if not arg.runlocal else 1,
      mlp_dim=256,
      num_heads=4,
      pool_type="none",
      dropout=0.1,
    ),
    text=dict(
      variant="llama",
      # The ids of bytes, and the image token.
      vocab_size=260,
      width=64,
      depth=3 if not arg.runlocal else 1,
      num_heads=4,
      mlp_dim=176,
    ),
    projector=dict(merge=5 if arg.scenes else 2),
    image_token=259,
  )

  config.optimizer = dict(name="adam", b1=0.9, b2=0.95)
  config.lr = 2e-3
  config.wd = 1e-3
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_percent=5)

  config.evals = {}
  # Whether greedy decoding gives the answer, on held-out digits.
  config.evals.val = dict(
    type="mean", pred="exact", data=rows("test"), log_percent=25
  )
  config.evals.answers = dict(
    type="generate",
    pred="generate",
    pred_kw=dict(max_new=88 if arg.scenes else 8, eos_id=2),
    data=rows("test", references=True, slice="[:200]"),
    prompt_key="tokens",
    reference_key="references",
    image_key="image",
    metrics=["exact_match", "boxes"] if arg.scenes else ["exact_match"],
    log_percent=100,
  )
  return config
