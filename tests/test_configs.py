"""The configs: published sizes, every documented argument, wrong arguments."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config import lengths as lengths_lib
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError, check_kwargs
from bigtrain.config.modules import find_module
from bigtrain.evaluation import evaluations as evaluators
from bigtrain.inputs import labels, sources
from bigtrain.objective import building, selection, task_functions, task_sum
from bigtrain.optim import chain
from bigtrain.pp import ops_render, parse

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
NAMES = sorted(
  path.stem
  for path in FOLDER.glob("*.py")
  if path.stem not in ("__init__", "common")
)


def load(spec):
  """The config of "name:arguments"."""
  name, colon, arguments = spec.partition(":")
  return loading.load(f"{FOLDER / name}.py{colon}{arguments}")


def model_of(config):
  """The model of a config."""
  module = find_module("models", config["model_name"], "model_name")
  return module.Model(**config["model"])


def tasks_of(config):
  """The tasks of a config, of which most have one."""
  tracked = settings.Config(config)
  return task_sum.entries(building.task(tracked), tracked)


def variables_of(config, model, example):
  """Shapes of the variables that the tasks need."""
  parts = {}
  for entry in tasks_of(config):
    inputs = jax.eval_shape(entry.module.inputs, example)
    variables = jax.eval_shape(model.init, jax.random.key(0), **inputs)
    parts = dict(trees.flatten_with_names(variables)) | parts
  return trees.from_flat(parts)


def ops_of(part):
  """The ops of an input or an evaluation."""
  drawn = {k: x["values"][-1] for k, x in part.get("flexi", {}).items()}
  return sources.fill(part.get("pp", ""), drawn)


def example_of(config):
  """Shapes of one training example: image and token features."""
  pp, data = ops_of(config["input"]), config["input"]["data"]
  if data.get("preferences"):
    ids = jax.ShapeDtypeStruct((1, 2, data["length"]), jnp.int32)
    return dict.fromkeys(("tokens", "targets", "loss_mask"), ids)
  if data["type"] == "prompts":
    return {"prompt": jax.ShapeDtypeStruct((1, data["length"]), jnp.int32)}
  if data["type"] in ("text", "tokens", "supervised"):
    ids = jax.ShapeDtypeStruct((1, data["length"]), jnp.int32)
    example = dict.fromkeys(("tokens", "inputs", "targets"), ids)
    if pictures := data.get("pictures"):
      shape = _shape_of_digits(config["model"], data["name"], pictures["pp"])
      example["image"] = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return example
  naflex = re.findall(r"naflex\((\d+),(\d+)\)", pp)
  if data["type"] == "digit_pairs":
    cell = 8 + 2 * data["margin"]
    shape = (cell, 2 * cell, 1)
  else:
    crops = re.findall(r"crop\((\d+)", pp)
    # Digits that are not cropped have 8 pixels.
    res, *_ = crops or re.findall(r"resize\((\d+)", pp) or ["8"]
    shape = (int(res), int(res), 1 if data["type"] == "arrays" else 3)
  example = {"image": jax.ShapeDtypeStruct((1, *shape), jnp.float32)}
  if naflex:
    ((size, patches),) = naflex
    channels = 1 if data["type"] == "digit_pairs" else 3
    shape = (1, int(patches), int(size) ** 2 * channels)
    example["image"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    example["shapes"] = jax.ShapeDtypeStruct((1, 2), jnp.int32)
  if length := re.findall(r"tokenize\(.*max_len=(\d+)", pp):
    shape = (1, int(length[0]))
    example["labels"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    if "locca(" in pp:
      sequences = (1, 3, int(length[0]))
      example["locca"] = jax.ShapeDtypeStruct(sequences, jnp.int32)
      example["locca_masks"] = jax.ShapeDtypeStruct(sequences, jnp.uint8)
  elif config["model"].get("text_model", "") is None:
    example["labels"] = example["image"]  # A picture of the text.
  return example


def _shape_of_digits(model, name, pp):
  """Shape of the pictures of an example: one of both digits, or two."""
  size = (
    model.get("image_size") or (re.findall(r"resize\((\d+)", pp) or ["8"])[0]
  )
  height, width = size if isinstance(size, list | tuple) else [int(size)] * 2
  return (1 if name == "digit_scenes" else 2, height, width, 3)


def params_of(config):
  """Shapes of the parameters, for examples of the size used in training."""
  example = example_of(config)
  key = json.dumps([config["model_name"], config["model"], str(example)])
  if key not in _params:
    model = model_of(config)
    _params[key] = variables_of(config, model, example)["params"]
  return _params[key]


_params = {}  # Large models take seconds to trace.


def count(params):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


# From torchvision's vit_b_16, vit_b_32, vit_l_16 and resnet50, DeiT-S, and
# timm's vit_tiny_patch16_224, vit_small_patch32_224 and vit_base_patch32_384.
# Those ViTs have one more vector: a position embedding of the class token.
@pytest.mark.parametrize(
  "spec, published",
  [
    ("vit_i1k:Ti/16", 5_717_416 - 192),
    ("vit_i1k:S/32", 22_878_952 - 384),
    ("vit_i1k:S/16", 22_050_664 - 384),
    ("vit_i1k:B/32", 88_224_232 - 768),
    ("vit_i1k:B/16", 86_567_656 - 768),
    ("vit_i1k:L/16", 304_326_632 - 1024),
    # DeiT-S without class token and position embeddings, plus a tanh layer.
    ("vit_s16_i1k", 22_050_664 - 384 - 197 * 384 + 385 * 384),
    ("resnet50_i1k", 25_557_032),
    ("bit", 25_557_032),  # Group norms have as many parameters.
    ("mixer", 59_880_472),  # timm's mixer_b16_224.
    # The vocabulary has 47 more rows than GPT-2's, for a divisible size.
    ("gpt2_124m", 124_439_808 + 47 * 768),
    ("llama_1b", 1_235_814_400),
    ("llama_8b", 8_030_261_248),
    ("llama_70b", 70_553_706_496),
    ("mixtral_8x7b", 46_702_792_704),
    ("qwen3_0_6b", 596_049_920),
    ("gemma3_1b", 999_885_952),
    ("smollm3_3b", 3_075_098_624),
    ("gpt_oss_20b", 20_914_757_184),
    ("qwen3_next_80b", 79_674_391_296),
    ("qwen3_235b", 235_093_634_560),
    ("qwen3_5_9b", 8_953_803_264),
    # Counted by transformers for the published sizes.
    ("qwen3_vl_2b", 2_127_532_032),
    ("qwen3_vl_2b:size=4b", 4_437_815_808),
    ("qwen3_vl_2b:size=8b", 8_767_123_696),
    ("gemma4_26b_a4b", 25_233_141_760 + 30),  # With the layers' scalars.
    # With one module for a further token: a layer, two norms and a projection.
    ("deepseek_v3", 671_026_404_352 + 11_610_067_968),
    ("kimi_k2", 1_026_408_209_408),
    ("paligemma2_3b", 3_032_242_416),
    ("gemma3_4b", 4_300_079_472),
    # Without the 64 rows that transformers adds to the vocabulary.
    ("llava", 7_063_427_072 - 2 * 64 * 4096),
    # Counted by transformers for the released google/switch-base-*.
    ("switch_base", 619_339_008),
    ("switch_base:experts=128", 7_415_217_408),
    ("switch_base:experts=256", 14_664_154_368),
    ("t5_small", 60_506_624),
    ("t5_1_1_base", 247_577_856),
    # Count of big_vision's model, which has one more row for the mask token.
    ("cappa", 191_669_504),
    ("cap", 191_668_736),
    ("siglip", 203_155_970),  # transformers' siglip-base-patch16-224.
    ("transfer:imagenet2012", 88_297_192 - 768),
    ("transfer:imagenet2012,res=224,resize=256", 88_224_232 - 768),
  ],
)
def test_parameter_counts_match_the_published_ones(spec, published):
  assert count(params_of(load(spec))) == published


# Sizes of the released files in MiB, from the README of
# google-research/vision_transformer.
@pytest.mark.parametrize(
  "variant, mib",
  [
    ("Ti/16", 37),
    ("S/32", 118),
    ("S/16", 115),
    ("B/32", 398),
    ("B/16", 391),
    ("L/16", 1243),
  ],
)
def test_i21k_models_have_the_size_of_the_released_files(variant, mib):
  params = params_of(load(f"vit_i21k:{variant}"))
  assert count(params) * 4 / 2**20 == pytest.approx(mib, abs=1)


AUGS = ("none", "light1", "light2", "medium1", "medium2", "strong1", "strong2")
VARIANTS = ("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/16")
SPECS = [
  *NAMES,
  *[f"{name}:runlocal" for name in NAMES],
  *[f"vit_i1k:{variant}" for variant in VARIANTS],
  *[f"vit_i1k:variant=S/16,aug={aug}" for aug in AUGS],
  "vit_i1k:M/16,aug=light1,reg=0.1",
  "vit_i1k:B/16,reg=0.0,res=384,data_dir=sets",
  *[f"vit_i21k:{variant}" for variant in VARIANTS],
  *[f"vit_i21k:variant=S/16,aug={aug}" for aug in AUGS],
  "vit_i21k:M/16,aug=none,res=256,data_dir=sets",
  "vit_s16_i1k:data_dir=sets",
  "dinov2:gram",
  "dinov2:gram,runlocal",
  "cappa:B/16,parallel=0.5,res=256,tokenizer=bytes,data_dir=sets",
  "cap:B/16,res=256,tokenizer=bytes,data_dir=sets",
  "coca:L/14,res=224,tokenizer=bytes,class_names=a.txt,data_dir=sets",
  "siglip:L/16,res=256,tokenizer=bytes,class_names=a.txt,data_dir=sets",
  "siglip2:So400m/16,res=384,tokenizer=bytes,class_names=a.txt,data_dir=sets",
  "siglip2_distill:B/32,init=run,reference=folder,class_names=a.txt",
  "siglip2_distill:keep=1.0,runlocal",
  "lit:init=a/l_16.npz,variant=L/16,loss=softmax,res=256,data_dir=sets",
  "lit:tokenizer=bytes",
  "resnet50_i1k:data_dir=sets",
  "bit:depth=101,width=3.0,data_dir=sets",
  "mixer:variant=L/16,data_dir=sets",
  "pydoc_lm:moe",
  "pydoc_lm:moe,runlocal",
  "llama_8b:init=folder,data=tokens",
  "llama_8b:length=131072",
  "llama_8b:length=131072,runlocal",
  *[f"switch_base:experts={number}" for number in (16, 256)],
  "transfer:cifar100",
  "transfer:imagenet2012",
  "transfer:oxford_iiit_pet",
  "transfer:dataset=oxford_flowers102",
  *[f"transfer:cifar10,crop={c}" for c in ("inception", "resmall", "resize")],
  "transfer:cifar10,variant=L/16,res=224,resize=256,init=a/l_16.npz,data_dir=b",
]


@pytest.mark.parametrize("spec", SPECS)
def test_every_part_accepts_its_part_of_the_config(spec, monkeypatch):
  monkeypatch.setattr(ops_render, "_glyphs", lambda font: {})  # No package.
  monkeypatch.setattr(labels, "of_source", lambda *_: None)  # No data.
  config = load(spec)
  data_dir = re.search(r"data_dir=(\w+)", spec)
  assert config["input"]["data"].get("data_dir") == (data_dir and data_dir[1])
  for evaluation in config["evals"].values():
    evaluation["enabled"] = True
    if evaluation.get("data", {}).get("type") == "tokens":
      evaluation["data"]["path"] = str(FOLDER)  # Any path that exists.
    if evaluation.get("tokenizer", "").startswith("models/"):
      evaluation["tokenizer"] = "bytes"  # In place of a folder.
    if "class_names" in evaluation:  # In place of a file.
      evaluation["class_names"] = ["a cat", "a dog"]
  tracked = settings.Config(config)
  batch_size = config["input"]["batch_size"]
  length = config["input"]["data"].get("length")
  units = lengths_lib.Units(batch_size, 1_000_000, tokens_per_example=length)
  total = lengths_lib.steps(tracked, "total", units)
  units = dataclasses.replace(units, total_steps=total)

  optimizer = chain.make(tracked, params_of(config), units)
  trainable = trees.flatten_with_names(optimizer.trainable)
  locked = "img/" if spec.startswith(("lit", "llava")) else "nothing"
  locked = "embedding/" if spec == "moco_v3" else locked
  assert all(
    is_trainable != name.startswith(locked) for name, is_trainable in trainable
  )
  rate = lambda step: float(optimizer.hparams(step)["lr"]["lr"])
  assert rate(0) == 0
  peak = max(rate(step) for step in range(0, total, total // 100 + 1))
  assert config["lr"] / 2 < peak < config["lr"] * 1.0001
  ends_at_zero = not re.search("rsqrt|constant", str(config["schedule"]))
  if ends_at_zero:
    assert rate(total) == pytest.approx(0, abs=1e-6)

  task = building.task(tracked)
  model = model_of(config)
  teacher = model_of(config["teacher"]) if "teacher" in config else None
  for entry in task_sum.entries(task, tracked):
    # A reference that chooses examples is not an argument of the loss.
    taught = None if selection.is_used(entry) else teacher
    assert task_functions.loss_fn(entry.part, entry.module, model, taught)
  mesh = sharding.from_config(tracked)
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  context = evaluators.Context("", "", mesh, batch_size, (), print)
  predict_fns = task_functions.predict_fns(tracked, task, model, teacher)
  evaluations = evaluators.from_config(
    tracked,
    predict_fns,
    units,
    context,
    weights={"params": None, "ema": None, "teacher": None},
  )
  assert [evaluation.name for evaluation in evaluations] == [*config["evals"]]
  for part in (config["input"], *config["evals"].values()):
    if "data" not in part:  # Samples.
      continue
    # Text and tokens need no preprocessing.
    if part["data"]["type"] not in ("text", "tokens", "supervised", "prompts"):
      assert parse.parse(ops_of(part))
    data = dict(part["data"])
    source = find_module("data", data.pop("type"), "type").Source
    check_kwargs(source, data, "data")


def _leaves(config, prefix=""):
  for key, value in config.items():
    if isinstance(value, dict):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key


# Keys that may differ: lengths, and sizes in place of a variant's.
_LENGTHS = (
  r"total_\w+|schedule\.warmup_\w+"
  r"|model\.((image|text)\.)?(width|depth|mlp_dim|num_heads)"
)


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_run_has_the_keys_of_the_real_one(name):
  """A tiny run refuses unknown keys, so it checks the keys of the real run."""
  real, tiny = load(name), load(f"{name}:runlocal")
  if real["input"]["data"]["type"] == "tfds":  # The tiny data are made up.
    init = "init=x," if "model_init" in real else ""
    prepared = load(f"{name}:{init}runlocal,data_dir=y")
    differ = {*_leaves(real)} ^ {*_leaves(prepared)}
    assert [k for k in differ if not re.fullmatch(_LENGTHS, k)] in (
      [],
      ["model.width"],
    )
    tiny["model_init"] = real.get("model_init", {})
    for config in (real, tiny):
      for part in (config["input"], *config["evals"].values()):
        part.pop("data", None)
        part.pop("test_data", None)
  if name == "siglip2_distill":  # Without data_dir, its data are digits.
    return
  differ = {*_leaves(real)} ^ {*_leaves(tiny)}
  assert [k for k in differ if not re.fullmatch(_LENGTHS, k)] in (
    [],
    ["model.width"],
  )


@pytest.mark.parametrize("arguments", ["", "runlocal"])
@pytest.mark.parametrize(
  ("table", "name"),
  [
    *[("decoder_lm", n) for n in ("gpt2_124m", "llama_1b", "llama_8b")],
    *[("decoder_lm", n) for n in ("llama_70b", "mixtral_8x7b")],
    *[("decoder_lm", n) for n in ("qwen3_0_6b", "gemma3_1b")],
    *[("decoder_lm", n) for n in ("smollm3_3b", "gpt_oss_20b")],
    *[("decoder_lm", n) for n in ("qwen3_next_80b", "qwen3_5_9b")],
    *[("decoder_lm", n) for n in ("gemma4_26b_a4b", "qwen3_235b")],
    *[("decoder_lm", n) for n in ("deepseek_v3", "kimi_k2")],
    *[("t5_c4", n) for n in ("t5_small", "t5_1_1_base")],
    *[("vlm_transfer", n) for n in ("paligemma2_3b", "gemma3_4b")],
  ],
)
def test_models_of_a_table_have_a_config_file_each(table, name, arguments):
  comma = "," if arguments else ""
  assert load(f"{table}:{name}{comma}{arguments}") == load(
    f"{name}:{arguments}"
  )


@pytest.mark.parametrize(
  "spec, message",
  [
    ("vit_i1k:M/16", "variant=M/16: give aug and reg; only Ti/16, S/32"),
    ("vit_i1k:M/16,aug=none", "give aug and reg"),
    ("vit_i1k:aug=lihgt1", "aug=lihgt1: expected one of none, light1"),
    ("vit_i21k:H/14", "variant=H/14: give aug"),
    ("vit_i21k:aug=weak", "aug=weak: expected one of"),
    ("transfer:cifar", "dataset=cifar: expected one of .'cifar10'"),
    ("transfer:cifar10,crop=center", "crop=center: expected one of"),
    ("vit_s16_i1k:runlokal", "Did you mean 'runlocal'"),
    ("resnet50_i1k:depth=101", "unknown name 'depth'"),
    ("decoder_lm:llama_8", "model=llama_8: expected one of .'gpt2_124m'"),
    ("t5_c4:t5_large", "model=t5_large: expected one of .'t5_small'"),
    ("llama_8b:model=llama_1b", "unknown name 'model'"),
    ("llama_8b:length=-1", "length=-1: expected 1 to 4194304"),
  ],
)
def test_wrong_arguments_give_a_one_line_error(spec, message):
  with pytest.raises(ConfigError, match=message) as e:
    load(spec)
  assert "\n" not in str(e.value)


def test_resnet_weight_decay_equals_l2_regularization():
  """The source adds wd * p to the gradient, before the momentum."""
  config = load("resnet50_i1k") | {"schedule": {"decay_type": "constant"}}
  shape = jax.ShapeDtypeStruct((), jnp.float32)
  like = {"head": {"kernel": shape, "bias": shape}, "bn1": {"scale": shape}}
  units = lengths_lib.Units(2048, total_steps=1000)
  optimizer = chain.make(settings.Config(config), like, units)
  ones = jax.tree.map(lambda x: jnp.ones(x.shape), like)
  zeros = jax.tree.map(jnp.zeros_like, ones)

  def step(i, carry):
    params, state = carry
    updates, state = optimizer.tx.update(
      zeros, state, params, step=i, hparams=optimizer.hparams(0)
    )
    return jax.tree.map(jnp.add, params, updates), state

  start = ones, optimizer.tx.init(ones)
  params, _ = jax.jit(lambda c: jax.lax.fori_loop(0, 1000, step, c))(start)
  p, velocity = 1.0, 0.0
  for _ in range(1000):
    velocity = 0.875 * velocity + p / 32768
    p -= 2.048 * velocity
  assert float(params["head"]["kernel"]) == pytest.approx(p, rel=1e-4)
  assert float(params["head"]["bias"]) == pytest.approx(p, rel=1e-4)
  assert p < 0.7 and float(params["bn1"]["scale"]) == 1


def test_long_examples_keep_the_tokens_of_a_batch():
  short, long = load("llama_8b"), load("llama_8b:length=131072")
  tokens = lambda c: c["input"]["batch_size"] * c["input"]["data"]["length"]
  assert tokens(short) == tokens(long) == 2**22
  assert long["mesh"] == dict(replica=1, fsdp=-1, sequence=8)
