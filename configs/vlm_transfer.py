"""Fine-tunes a vision-language model on questions about pictures.

Command: python -m bigtrain.main --workdir=runs/answers \
  --config=configs/vlm_transfer.py:paligemma2_3b,data=questions.jsonl
  configs/paligemma2_3b.py:data=questions.jsonl is the same run. The file of
  each model, such as gemma3_4b.py and llava.py, states hardware, result and
  source.

Needs the folder of the published model, `init`. `data` are rows with `images`,
`prompt` and `completion`, see docs/vision_language.md; without it, the rows are
questions on two digits, and their boxes.
"""

from typing import Any, NamedTuple

import ml_collections

from configs import common


class Recipe(NamedTuple):
  """The settings in which the models differ.

  Attributes:
    init: folder of the published model, unless given.
    model: arguments of the model.
    tiny: those that differ with `runlocal`.
    loss: arguments of the loss, if any.
    tiny_tokens: image tokens of a picture with `runlocal`.
    pictures: how pictures stand in texts, see bigtrain/text/pictures.py.
    length: tokens of an example.
    prefix: whether the tokens of a prompt see each other.
    batch_size: examples per step.
    epochs: passes over the rows.
    lr, wd: peak learning rate, and weight decay.
    warmup_percent: share of the steps with linear warm-up.
    frozen: regex of parameters that do not train; None for none.
    mesh: sizes of the mesh's axes.
  """

  init: str
  model: dict[str, Any]
  tiny: dict[str, Any]
  pictures: dict[str, Any]
  length: int
  prefix: bool
  batch_size: int
  epochs: float
  lr: float
  wd: float
  warmup_percent: float
  frozen: str | None = None
  loss: dict[str, Any] | None = None
  tiny_tokens: int = 8
  mesh: dict[str, int] = dict(replica=1, fsdp=-1)


_SO400M = dict(
  width=1152,
  depth=27,
  num_heads=16,
  mlp_dim=4304,
  patch_size=14,
  pool_type="none",
  use_bias=("qkv", "out", "mlp", "patch"),
)
# Sizes for pictures of 10 x 20 pixels, and the ids of bytes.
_TINY = dict(
  image=dict(width=16, depth=1, num_heads=2, mlp_dim=32, patch_size=5),
  text=dict(
    width=16,
    depth=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    vocab_size=260,
    kinds=dict(local=dict(window=64)),
  ),
  image_size=(10, 20),
  image_token=259,
)
_TINY_PICTURES = dict(token=259, pp="value_range(-1, 1)", placeholder="<image>")
_GEMMA = dict(
  norm="rmsnorm",
  norm_eps=1e-6,
  norm_offset=1.0,
  norm_at="sandwich",
  posemb="rope",
  mlp="geglu",
  use_bias=False,
  tied_head=True,
  embed_multiplier="sqrt_width",
)
_GEMMA2 = dict(
  _GEMMA,
  attention_softcap=50.0,
  logits_softcap=30.0,
  attention_scale=256**-0.5,
  layers=("local", "global"),
)
_GEMMA3 = dict(
  _GEMMA,
  qk_norm="head",
  attention_scale=256**-0.5,
  rope_theta=1e6,
  layers=(*("local",) * 5, "global"),
)


def merged(options, others):
  """The options, where `others` take the place of equal names."""
  result = dict(options)
  for name, value in others.items():
    both = isinstance(value, dict) and isinstance(result.get(name), dict)
    result[name] = merged(result[name], value) if both else value
  return result


RECIPES = {
  "paligemma2_3b": Recipe(
    init="models/paligemma2-3b-pt-224",
    model=dict(
      image=_SO400M,
      text=dict(
        _GEMMA2,
        width=2304,
        depth=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        mlp_dim=9216,
        vocab_size=257_216,
        kinds={"local": dict(window=4096), "global": {}},
      ),
      image_size=224,
      image_token=257_152,
      mask="prefix",
    ),
    tiny=_TINY,
    pictures=dict(token=257_152, tokens=256, placeholder="<image>", first=True),
    length=384,
    prefix=True,
    batch_size=256,
    epochs=10.0,
    lr=1e-5,
    wd=3e-7,
    warmup_percent=5,
    # 2,048 tokens of a device's 16 rows at a time: the gradient of a kernel
    # with 257,216 columns is read and written for each part of the logits. Most
    # tokens are the picture's or the question's, which need no logits.
    loss=dict(chunk=128, only_weighted=True),
  ),
  "gemma3_4b": Recipe(
    init="models/gemma-3-4b-pt",
    model=dict(
      image=_SO400M,
      projector=dict(pool=4, norm_eps=1e-6, use_bias=False),
      text=dict(
        _GEMMA3,
        width=2560,
        depth=34,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        mlp_dim=10_240,
        vocab_size=262_208,
        rope_scaling=dict(type="linear", factor=8.0),
        kinds={
          "local": dict(window=1024, rope_theta=1e4, rope_scaling=None),
          "global": {},
        },
      ),
      image_size=896,
      image_token=262_144,
      mask="image",
    ),
    tiny=merged(_TINY, dict(image=dict(patch_size=2), projector=dict(pool=5))),
    pictures=dict(
      token=262_144,
      tokens=256,
      placeholder="<start_of_image>",
      before="\n\n<start_of_image>",
      after="<end_of_image>\n\n",
    ),
    length=1024,
    prefix=False,
    batch_size=64,
    epochs=2.0,
    lr=1e-5,
    wd=0.0,
    warmup_percent=5,
    tiny_tokens=2,
  ),
}


_ARGUMENTS = dict(init="", data="", runlocal=False)


def get_config(arg=None):
  """The config of a model.

  Arguments:
    model: a key of RECIPES.
    init: folder of the published model; default: see RECIPES.
    data: a file of rows, of which the last hundredth is for evaluation.
    runlocal: a tiny run from scratch, for tests.
  """
  arg = common.parse_arg(arg, model="paligemma2_3b", **_ARGUMENTS)
  if arg.model not in RECIPES:
    raise ValueError(f"model={arg.model}: expected one of {[*RECIPES]}")
  return make(RECIPES[arg.model], arg)


def get_config_of(model, arg):
  """The config of one model, for its own file; `arg` has no `model`."""
  return make(RECIPES[model], common.parse_arg(arg, **_ARGUMENTS))


def make(recipe, arg):
  """The config of a recipe, with the arguments of `get_config`."""
  init = arg.init or recipe.init
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.log_steps = 10 if not arg.runlocal else 2
  config.ckpt_steps = 500 if not arg.runlocal else 2
  if arg.runlocal:
    config.total_steps = 4
  else:
    config.total_epochs = recipe.epochs
  config.mesh = dict(recipe.mesh)

  pictures = dict(recipe.pictures, pp=f"published({init!r}, precise=True)")
  if arg.runlocal:
    neutral = dict(tokens=recipe.tiny_tokens, before="", after="", first=False)
    pictures = {
      name: _TINY_PICTURES.get(name, neutral.get(name)) for name in pictures
    }

  def rows(train, **others):
    rows = dict(
      type="supervised",
      tokenizer=init if not arg.runlocal else "bytes",
      pictures=pictures,
      length=recipe.length if not arg.runlocal else 112,
      prefix=recipe.prefix,
      too_long="drop",
      **others,
    )
    if arg.data:
      return rows | dict(path=arg.data, slice="[:99%]" if train else "[99%:]")
    return rows | dict(name="digit_scenes", split="train" if train else "test")

  config.task = "language_modeling"
  if recipe.loss:
    config.loss = dict(recipe.loss)
  config.input = dict(
    data=rows(True, pack=True),
    batch_size=recipe.batch_size if not arg.runlocal else 16,
  )

  config.model_name = "vision_language"
  config.model = merged(recipe.model, recipe.tiny if arg.runlocal else {})
  if not arg.runlocal:
    config.model.update(
      dtype="bfloat16", scan=True, remat_policy="nothing_saveable"
    )
  else:
    config.model.update(dtype="float32", scan=False, remat_policy=None)
  config.model_init = init if not arg.runlocal else None

  config.optimizer = dict(name="adam", b1=0.9, b2=0.999)
  config.lr = recipe.lr
  config.wd = recipe.wd
  config.grad_clip_norm = 1.0
  decay = dict(decay_type="cosine", warmup_percent=recipe.warmup_percent)
  frozen = [(recipe.frozen, None)] if recipe.frozen else []
  config.schedule = [*frozen, (".*", decay)]

  config.evals = {}
  # Whether greedy decoding gives the answer.
  config.evals.val = dict(
    type="mean", pred="exact", data=rows(False), log_percent=25
  )
  config.evals.answers = dict(
    type="generate",
    pred="generate",
    pred_kw=dict(max_new=96),
    data=rows(False, references=True),
    tokenizer=init if not arg.runlocal else "bytes",
    prompt_key="tokens",
    reference_key="references",
    metrics=["vqa", "boxes"],
    image_key="image",
    num_examples=1000 if not arg.runlocal else 16,
    log_percent=50,
  )
  return config
