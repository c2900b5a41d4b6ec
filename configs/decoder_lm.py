"""Decoder-only language models of published sizes, on tokenized text.

Command: python -m bigtrain.main --workdir=runs/llama_8b \
  --config=configs/decoder_lm.py:llama_8b,data=data/tokens
  configs/llama_8b.py:data=data/tokens is the same run. The file of each model,
  such as gpt2_124m.py and gpt_oss_20b.py, states hardware, result and source.

Needs the token files that python -m bigtrain.tools.tokenize writes, in the
folders train and val of `data` (see docs/tokens.md).
"""

from pydoc_data import topics
from typing import Any, NamedTuple

import ml_collections

from configs import common


class Recipe(NamedTuple):
  """The settings in which the models differ.

  Attributes:
    length: tokens per example.
    batch_size: examples per step.
    total_tokens: length of the run.
    lr: peak learning rate.
    vocab_size: rows of the embedding.
    model: further arguments of the model.
    tiny: variant of the model with `runlocal`.
    loss: arguments of the loss, if any.
    mesh: sizes of the mesh's axes.
    tiny_mesh: the same with `runlocal`, for any number of devices.
    opt_sharding: "replica" to split the optimizer's state over all devices.
    warmup_steps: steps of linear warm-up.
    eval_steps: steps between evaluations.
    eval_examples: examples per evaluation.
    data: folder of the token files, unless given.
    optimizer: its name and options.
    qk_clip: options of query-key clipping, if any.
  """

  length: int
  batch_size: int
  total_tokens: int
  lr: float
  vocab_size: int
  model: dict[str, Any]
  tiny: str
  loss: dict[str, float] | None = None
  mesh: dict[str, int] = dict(replica=-1, fsdp=8)
  tiny_mesh: dict[str, int] = dict(replica=1, fsdp=-1)
  opt_sharding: str = "fsdp"
  warmup_steps: int = 2000
  eval_steps: int = 1000
  eval_examples: int = 1024
  data: str = "data/tokens"
  optimizer: dict[str, Any] = dict(name="adam", b1=0.9, b2=0.95)
  qk_clip: dict[str, Any] | None = None


RECIPES = {
  "gpt2_124m": Recipe(
    length=1024,
    batch_size=512,  # 2**19 tokens per step.
    total_tokens=10_000_000_000,
    lr=6e-4,
    vocab_size=50_304,
    model=dict(scan=False),
    tiny="gpt2_mu",
    mesh=dict(replica=-1, fsdp=1),
    tiny_mesh=dict(replica=-1, fsdp=1),
    warmup_steps=700,
    eval_steps=250,
    eval_examples=10_240,
    data="data/fineweb",
  ),
  "llama_1b": Recipe(
    length=4096,
    batch_size=256,
    total_tokens=25_000_000_000,
    lr=6e-4,
    vocab_size=128_256,
    model=dict(
      scan=True, remat_policy="inner_projections_and_attention_saveable"
    ),
    tiny="llama_mu",
    loss=dict(z_loss=1e-4),
  ),
  "llama_8b": Recipe(
    length=8192,
    batch_size=512,
    total_tokens=160_000_000_000,
    lr=3e-4,
    vocab_size=128_256,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="llama_mu",
    loss=dict(z_loss=1e-4),
  ),
  "llama_70b": Recipe(
    length=8192,
    batch_size=512,
    total_tokens=1_400_000_000_000,
    lr=1.5e-4,
    vocab_size=128_256,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="llama_mu",
    loss=dict(z_loss=1e-4),
    mesh=dict(replica=1, fsdp=-1),
  ),
  "mixtral_8x7b": Recipe(
    length=4096,
    batch_size=512,
    total_tokens=25_000_000_000,
    lr=1e-4,
    vocab_size=32_000,
    model=dict(
      moe=dict(num_experts=8, top_k=2),
      scan=True,
      remat_policy="nothing_saveable",
    ),
    tiny="mixtral_mu",
    loss=dict(load_balance=0.01, router_z=0.001),
    # With so few experts it is cheaper to gather them than to send tokens.
    mesh=dict(replica=1, fsdp=-1),
  ),
  "qwen3_0_6b": Recipe(
    length=4096,
    batch_size=256,
    total_tokens=12_000_000_000,
    lr=6e-4,
    vocab_size=151_936,
    model=dict(
      scan=True, remat_policy="inner_projections_and_attention_saveable"
    ),
    tiny="qwen3_mu",
    loss=dict(z_loss=1e-4),
  ),
  "gemma3_1b": Recipe(
    length=4096,
    batch_size=256,
    total_tokens=20_000_000_000,
    lr=6e-4,
    vocab_size=262_144,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="gemma3_mu",
    # Half a sequence at a time: the gradient of a kernel with 262,144 columns
    # is read and written for each part of the logits.
    loss=dict(z_loss=1e-4, chunk=2048),
  ),
  "gemma4_26b_a4b": Recipe(
    length=4096,
    batch_size=512,
    total_tokens=76_000_000_000,  # 20 per active parameter.
    lr=2e-4,
    vocab_size=262_144,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="gemma4_mu",
    loss=dict(load_balance=0.001, router_z=0.001, chunk=2048),
    mesh=dict(replica=1, fsdp=-1),
  ),
  "smollm3_3b": Recipe(
    length=4096,
    batch_size=576,  # 2.36 million tokens per step.
    total_tokens=60_000_000_000,
    lr=2e-4,
    vocab_size=128_256,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="smollm3_mu",
    loss=dict(z_loss=1e-4),
  ),
  "gpt_oss_20b": Recipe(
    length=4096,
    batch_size=512,
    total_tokens=25_000_000_000,
    lr=1e-4,
    vocab_size=201_088,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="gpt_oss_mu",
    # 2,048 tokens of a device's eight sequences at a time, as for gemma3_1b.
    loss=dict(load_balance=0.01, router_z=0.001, chunk=256),
    mesh=dict(replica=1, fsdp=-1),
  ),
  "qwen3_235b": Recipe(
    length=4096,
    batch_size=1024,
    total_tokens=440_000_000_000,  # 20 per active parameter.
    lr=2e-4,
    vocab_size=151_936,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="qwen3_moe_mu",
    loss=dict(load_balance=0.001, router_z=0.001, chunk=1024),
    mesh=dict(replica=1, fsdp=-1),
  ),
  "qwen3_5_9b": Recipe(
    length=8192,
    batch_size=512,
    total_tokens=180_000_000_000,
    lr=3e-4,
    vocab_size=248_320,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="qwen3_5_mu",
    loss=dict(z_loss=1e-4),
    mesh=dict(replica=1, fsdp=-1),
  ),
  "qwen3_next_80b": Recipe(
    length=4096,
    batch_size=1024,
    total_tokens=60_000_000_000,  # 20 per active parameter.
    lr=2e-4,
    vocab_size=151_936,
    # A device has few tokens at a time, and 512 experts of a layer are far more
    # bytes: it is cheaper to send the tokens.
    model=dict(
      moe=dict(axis="fsdp"), scan=True, remat_policy="nothing_saveable"
    ),
    tiny="qwen3_next_mu",
    loss=dict(load_balance=0.001, router_z=0.001, chunk=2048),
    mesh=dict(replica=1, fsdp=-1),
  ),
  "deepseek_v3": Recipe(
    length=4096,
    batch_size=15_360,
    total_tokens=14_800_000_000_000,
    lr=2.2e-4,
    vocab_size=129_280,
    model=dict(mtp=1, scan=True, remat_policy="nothing_saveable"),
    tiny="deepseek_mu",
    # The selection bias balances the load; the loss only prevents extremes.
    loss=dict(load_balance=1e-4, router_z=0.0, mtp_weight=0.3),
    mesh=dict(replica=1, fsdp=-1, tensor=4),
    tiny_mesh=dict(replica=1, fsdp=-1, tensor=1),
  ),
  "kimi_k2": Recipe(
    length=4096,
    batch_size=16_384,  # 67 million tokens per step.
    total_tokens=15_500_000_000_000,
    lr=2e-4,
    vocab_size=163_840,
    model=dict(scan=True, remat_policy="nothing_saveable"),
    tiny="deepseek_mu",
    loss=dict(load_balance=0.0, router_z=0.0),
    mesh=dict(replica=1, fsdp=-1, tensor=4),
    tiny_mesh=dict(replica=1, fsdp=-1, tensor=1),
    warmup_steps=500,
    optimizer=dict(name="muon", consistent_rms=0.2, adam_b2=0.95),
    qk_clip=dict(tau=100.0),
  ),
}


_ARGUMENTS = dict(data="", length=0, init="", runlocal=False)

# Examples of at least this length are split over the devices of a server, and
# the state over all devices.
_LONG = 65_536
_LONG_MESH = dict(replica=1, fsdp=-1, sequence=8)
_LONG_TINY_MESH = dict(replica=1, fsdp=1, sequence=-1)


def get_config(arg=None):
  """The config of a model.

  Arguments:
    model: a key of RECIPES.
    data: folder of the token files; default: see RECIPES.
    length: tokens of an example; default: see RECIPES. A batch keeps its number
      of tokens.
    init: folder of published weights to start from; default: from scratch.
    runlocal: a tiny run on Python's own documentation, for tests.
  """
  arg = common.parse_arg(arg, model="llama_8b", **_ARGUMENTS)
  if arg.model not in RECIPES:
    raise ValueError(f"model={arg.model}: expected one of {[*RECIPES]}")
  return _make(arg.model, arg)


def get_config_of(model, arg):
  """The config of one model, for llama_8b.py and the other files.

  Args:
    model: a key of RECIPES.
    arg: as for `get_config`, without `model`.
  """
  return _make(model, common.parse_arg(arg, **_ARGUMENTS))


def _make(model, arg):
  recipe = RECIPES[model]
  length = arg.length or recipe.length
  if length < 1 or length > recipe.batch_size * recipe.length:
    raise ValueError(
      f"length={length}: expected 1 to {recipe.batch_size * recipe.length}, "
      "the tokens of a batch"
    )
  batch_size = recipe.batch_size * recipe.length // length
  mesh, tiny_mesh = recipe.mesh, recipe.tiny_mesh
  if length >= _LONG:
    mesh, tiny_mesh = _LONG_MESH, _LONG_TINY_MESH
  if arg.runlocal:
    length = 32
  config = ml_collections.ConfigDict()

  config.seed = 0
  config.total_tokens = recipe.total_tokens
  config.log_steps = 50
  config.ckpt_steps = 1000
  config.mesh = dict(mesh)
  if recipe.opt_sharding != "fsdp":
    config.opt_sharding = recipe.opt_sharding

  def data(split):
    if arg.runlocal:
      return dict(type="text", path=topics.__file__, length=length)
    path = f"{arg.data or recipe.data}/{split}"
    return dict(type="tokens", path=path, length=length)

  config.task = "language_modeling"
  if recipe.loss:
    config.loss = recipe.loss
  config.input = dict(data=data("train"), batch_size=batch_size)

  config.model_name = "decoder"
  config.model = dict(
    variant=model,
    vocab_size=recipe.vocab_size,
    dtype="bfloat16",
    **recipe.model,
  )
  if arg.init:
    config.model_init = arg.init

  config.optimizer = dict(recipe.optimizer)
  config.lr = recipe.lr
  config.wd = 0.1
  config.wd_coupling = "lr"
  config.wd_mults = [(r".*/kernel|.*embedding", 1.0)]
  config.grad_clip_norm = 1.0
  if recipe.qk_clip:
    config.qk_clip = recipe.qk_clip
  config.schedule = dict(decay_type="cosine", warmup_steps=recipe.warmup_steps)

  config.evals = {}
  config.evals.val = dict(
    type="perplexity",
    pred="perplexity",
    data=data("val"),
    num_examples=recipe.eval_examples,
    log_steps=recipe.eval_steps,
  )

  if arg.runlocal:
    del config.total_tokens
    config.total_steps = 3
    config.log_steps = 1
    config.mesh = dict(tiny_mesh)
    config.schedule.warmup_steps = 1
    config.input.batch_size = 16
    config.evals.val.num_examples = 16
    config.model.variant = recipe.tiny
    if "axis" in config.model.get("moe", {}):
      # Eight devices of a CPU compile the exchange of tokens for a minute.
      config.model.moe.axis = None
    config.model.vocab_size = 259
  return config
