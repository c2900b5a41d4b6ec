"""T5 models of published sizes, pre-trained on C4 by span corruption.

Command: python -m bigtrain.main --workdir=runs/t5_small \
  --config=configs/t5_c4.py:t5_small,data_dir=DIR
  configs/t5_small.py:data_dir=DIR is the same run. t5_small.py, t5_1_1_base.py
  and switch_base.py state hardware, result and source of each model.

Needs the folders c4_train and c4_validation in `data_dir`: C4 tokenized with
T5's vocabulary by python -m bigtrain.tools.tokenize (see docs/tokens.md).
"""

from pydoc_data import topics
from typing import Any, NamedTuple

import ml_collections

from configs import common


class Recipe(NamedTuple):
  """The settings in which the models differ.

  Attributes:
    total_steps: length of the run.
    batch_size: examples per step.
    model: arguments of the model.
    tiny_depth: layers of the model with `runlocal`.
  """

  total_steps: int
  batch_size: int
  model: dict[str, Any]
  tiny_depth: int = 1


RECIPES = {
  "t5_small": Recipe(
    total_steps=524_288,
    batch_size=128,
    model=dict(variant="t5_small", depth=6, mlp_dim=2048, dropout=0.1),
  ),
  "t5_1_1_base": Recipe(
    total_steps=1_000_000,
    batch_size=2048,
    model=dict(variant="t5_1_1_base", depth=12, mlp_dim=2048, dropout=0.0),
  ),
}


def get_config(arg=None):
  """The config of a model.

  Arguments:
    model: a key of RECIPES.
    data_dir: parent folder of c4_train and c4_validation.
    runlocal: a tiny run on Python's own documentation, for tests.
  """
  arg = common.parse_arg(arg, model="t5_small", data_dir="data", runlocal=False)
  if arg.model not in RECIPES:
    raise ValueError(f"model={arg.model}: expected one of {[*RECIPES]}")
  return make(RECIPES[arg.model], arg)


def get_config_of(model, arg):
  """The config of one model, for t5_small.py and t5_1_1_base.py.

  Args:
    model: a key of RECIPES.
    arg: as for `get_config`, without `model`.
  """
  arg = common.parse_arg(arg, data_dir="data", runlocal=False)
  return make(RECIPES[model], arg)


def make(recipe, arg):
  """The config of a recipe, for switch_base.py too.

  Args:
    recipe: a Recipe.
    arg: data_dir and runlocal.
  """
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_steps = recipe.total_steps if not arg.runlocal else 4
  config.log_steps = 100 if not arg.runlocal else 1
  config.ckpt_steps = 5000 if not arg.runlocal else 4
  config.mesh = dict(replica=1, fsdp=-1)

  if arg.runlocal:  # Bytes, and sentinels above them.
    length, vocab_size, sentinel, eos_id = 64, 259 + 100, 259 + 99, 2
  else:  # A window of 568 tokens gives 512 inputs and 114 targets.
    length, vocab_size, sentinel, eos_id = 568, 32_128, 32_099, 1
  pp = (
    f"span_corruption({length},density=0.15,mean_span=3.0,sentinel={sentinel},"
    f"num_sentinels=100,eos_id={eos_id})|keep('inputs','targets')"
  )

  def data(split):
    if arg.runlocal:
      path = topics.__file__
      return dict(type="text", path=path, length=length, last="drop")
    path = f"{arg.data_dir}/c4_{split}"
    return dict(type="tokens", path=path, length=length, last="drop")

  config.task = "seq2seq"
  config.loss = dict(z_loss=1e-4)
  config.input = dict(
    data=data("train"),
    pp=pp,
    batch_size=recipe.batch_size if not arg.runlocal else 8,
  )

  config.model_name = "t5"
  config.model = dict(
    vocab_size=vocab_size, scan=True, dtype="bfloat16", **recipe.model
  )
  if arg.runlocal:
    config.model.update(width=32, depth=recipe.tiny_depth, mlp_dim=64)

  config.optimizer = dict(name="adafactor")
  config.lr = 0.01
  config.schedule = dict(
    decay_type="rsqrt",
    warmup_steps=10_000 if not arg.runlocal else 1,
    timescale_steps=10_000,
  )

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=data("validation"),
    pp=pp,
    log_steps=5000 if not arg.runlocal else 4,
    num_examples=16_384 if not arg.runlocal else 16,
  )
  return config
