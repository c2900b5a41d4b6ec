"""The configs: published sizes, every documented argument, and tiny runs."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import command, main, parts, settings, sharding, trees
from bigtrain import lengths as lengths_lib
from bigtrain.checkpoints import folders, parameter_files
from bigtrain.evaluation import evaluations as evaluators
from bigtrain.optim import chain
from bigtrain.pp import parse

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
NAMES = sorted(
  path.stem
  for path in FOLDER.glob("*.py")
  if path.stem not in ("__init__", "common")
)


def load(spec):
  """The config of "name:arguments"."""
  name, colon, arguments = spec.partition(":")
  return settings.load(f"{FOLDER / name}.py{colon}{arguments}")


def model_of(config):
  """(module, its Model)."""
  module = parts.find_module("models", config["model_name"], "model_name")
  return module.Model(**config["model"])


def example_of(config):
  """One example of training, as shapes: images and tokens."""
  pp, data = config["input"].get("pp", ""), config["input"]["data"]
  if data["type"] in ("text", "tokens"):
    ids = jax.ShapeDtypeStruct((1, data["length"]), jnp.int32)
    return dict.fromkeys(("tokens", "inputs", "targets"), ids)
  if data["type"] == "digit_pairs":
    cell = 8 + 2 * data["margin"]
    shape = (cell, 2 * cell, 1)
  else:
    crops = re.findall(r"crop\((\d+)", pp)
    (res,) = crops or re.findall(r"resize\((\d+)", pp)
    shape = (int(res), int(res), 1 if data["type"] == "arrays" else 3)
  example = {"image": jax.ShapeDtypeStruct((1, *shape), jnp.float32)}
  if length := re.findall(r"tokenize\(.*max_len=(\d+)", pp):
    shape = (1, int(length[0]))
    example["labels"] = jax.ShapeDtypeStruct(shape, jnp.int32)
  return example


def params_of(config):
  """The parameters' shapes, for examples of the size that training has."""
  example = example_of(config)
  key = json.dumps([config["model_name"], config["model"], str(example)])
  if key not in _params:
    task = parts.find_module("tasks", config["task"], "task")
    model, inputs = model_of(config), task.inputs(example)
    variables = jax.eval_shape(model.init, jax.random.key(0), **inputs)
    _params[key] = variables["params"]
  return _params[key]


_params = {}  # Large models take seconds to trace.


def count(params):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


# torchvision's vit_b_16, vit_b_32, vit_l_16 and resnet50, DeiT-S, and timm's
# vit_tiny_patch16_224, vit_small_patch32_224 and vit_base_patch32_384. They
# have a position embedding of the class token beside it, a vector more.
@pytest.mark.parametrize(
  "spec, published",
  [
    ("vit_i1k:Ti/16", 5_717_416 - 192),
    ("vit_i1k:S/32", 22_878_952 - 384),
    ("vit_i1k:S/16", 22_050_664 - 384),
    ("vit_i1k:B/32", 88_224_232 - 768),
    ("vit_i1k:B/16", 86_567_656 - 768),
    ("vit_i1k:L/16", 304_326_632 - 1024),
    # DeiT-S without class token and position embeddings, with a tanh layer.
    ("vit_s16_i1k", 22_050_664 - 384 - 197 * 384 + 385 * 384),
    ("resnet50_i1k", 25_557_032),
    # 47 rows more than GPT-2's, so that the vocabulary divides.
    ("gpt2_124m", 124_439_808 + 47 * 768),
    ("llama_1b", 1_235_814_400),
    ("llama_8b", 8_030_261_248),
    ("mixtral_8x7b", 46_702_792_704),
    # As transformers counts those of the released google/switch-base-*.
    ("switch_base", 619_339_008),
    ("switch_base:experts=128", 7_415_217_408),
    ("switch_base:experts=256", 14_664_154_368),
    ("t5_small", 60_506_624),
    ("t5_1_1_base", 247_577_856),
    # As big_vision's own model has: a row more for the mask token.
    ("cappa", 191_669_504),
    ("cap", 191_668_736),
    ("siglip", 203_155_970),  # transformers' siglip-base-patch16-224.
    ("transfer:imagenet2012", 88_297_192 - 768),
    ("transfer:imagenet2012,res=224,resize=256", 88_224_232 - 768),
  ],
)
def test_parameter_counts_are_the_published_ones(spec, published):
  assert count(params_of(load(spec))) == published


# Sizes in MiB of the released files, from the README of
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
def test_i21k_models_are_as_large_as_the_released_files(variant, mib):
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
  "cappa:B/16,parallel=0.5,res=256,tokenizer=bytes,data_dir=sets",
  "cap:B/16,res=256,tokenizer=bytes,data_dir=sets",
  "siglip:L/16,res=256,tokenizer=bytes,class_names=a.txt,data_dir=sets",
  "lit:init=a/l_16.npz,variant=L/16,loss=softmax,res=256,data_dir=sets",
  "lit:tokenizer=bytes",
  "resnet50_i1k:data_dir=sets",
  "pydoc_lm:moe",
  "pydoc_lm:moe,runlocal",
  "llama_8b:init=folder,data=tokens",
  *[f"switch_base:experts={number}" for number in (16, 256)],
  "transfer:cifar100",
  "transfer:imagenet2012",
  "transfer:oxford_iiit_pet",
  "transfer:dataset=oxford_flowers102",
  *[f"transfer:cifar10,crop={c}" for c in ("inception", "resmall", "resize")],
  "transfer:cifar10,variant=L/16,res=224,resize=256,init=a/l_16.npz,data_dir=b",
]


@pytest.mark.parametrize("spec", SPECS)
def test_every_part_accepts_what_the_config_says(spec):
  config = load(spec)
  data_dir = re.search(r"data_dir=(\w+)", spec)
  assert config["input"]["data"].get("data_dir") == (data_dir and data_dir[1])
  for evaluation in config["evals"].values():
    evaluation["enabled"] = True
    if evaluation["data"]["type"] == "tokens":
      evaluation["data"]["path"] = str(FOLDER)  # Something that is there.
    if "class_names" in evaluation:  # Files are looked at; these are not.
      evaluation["class_names"] = ["a cat", "a dog"]
  tracked = settings.Config(config)
  batch_size = config["input"]["batch_size"]
  length = config["input"]["data"].get("length")
  units = lengths_lib.Units(batch_size, 1_000_000, tokens_per_example=length)
  total = lengths_lib.steps(tracked, "total", units)
  units = dataclasses.replace(units, total_steps=total)

  optimizer = chain.make(tracked, params_of(config), units)
  trainable = trees.flatten_with_names(optimizer.trainable)
  locked = "img/" if spec.startswith("lit") else "nothing"
  assert all(on != name.startswith(locked) for name, on in trainable)
  rate = optimizer.schedules["lr"]
  assert float(rate(0)) == 0
  peak = max(float(rate(step)) for step in range(0, total, total // 100 + 1))
  assert config["lr"] / 2 < peak < config["lr"] * 1.0001
  if "rsqrt" not in str(config["schedule"]):  # Which is never done.
    assert float(rate(total)) == pytest.approx(0, abs=1e-6)

  task = parts.find_module("tasks", config["task"], "task")
  given = ("variables", "batch", "rng", "model", "train")
  loss = config.get("loss", {})
  settings.check_kwargs(task.loss_fn, loss, "config.loss", given)
  mesh = sharding.make_mesh(**config["mesh"])
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  context = evaluators.Context("", "", mesh, batch_size, (), print)
  predict_fns = task.predict_fns(model_of(config))
  found = evaluators.from_config(
    tracked, predict_fns, units, context, weights={"params": None}
  )
  assert [evaluation.name for evaluation in found] == [*config["evals"]]
  for part in (config["input"], *config["evals"].values()):
    # Text and tokens are what models read as they are.
    if part["data"]["type"] not in ("text", "tokens"):
      assert parse.parse(part["pp"])
    data = dict(part["data"])
    source = parts.find_module("data", data.pop("type"), "type").Source
    settings.check_kwargs(source, data, "data")


def _leaves(config, prefix=""):
  for key, value in config.items():
    if isinstance(value, dict):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_run_has_the_keys_of_the_real_one(name):
  """So that a tiny run, which refuses unknown keys, speaks for the real one."""
  differ = set(_leaves(load(name))) ^ set(_leaves(load(f"{name}:runlocal")))
  lengths = r"total_\w+|schedule\.warmup_\w+"
  assert [k for k in differ if not re.fullmatch(lengths, k)] in (
    [],
    ["model.width"],
  )


@pytest.mark.parametrize(
  "spec, message",
  [
    ("vit_i1k:M/16", "variant=M/16: give aug and reg, which are known for Ti"),
    ("vit_i1k:M/16,aug=none", "give aug and reg"),
    ("vit_i1k:aug=lihgt1", "aug=lihgt1: expected one of none, light1"),
    ("vit_i21k:H/14", "variant=H/14: give aug"),
    ("vit_i21k:aug=weak", "aug=weak: expected one of"),
    ("transfer:cifar", "dataset=cifar: expected one of .'cifar10'"),
    ("transfer:cifar10,crop=center", "crop=center: expected one of"),
    ("vit_s16_i1k:runlokal", "Did you mean 'runlocal'"),
    ("resnet50_i1k:depth=101", "unknown name 'depth'"),
  ],
)
def test_wrong_arguments_are_told_in_a_line(spec, message):
  with pytest.raises(settings.ConfigError, match=message) as e:
    load(spec)
  assert "\n" not in str(e.value)


def test_resnet_decay_is_that_of_l2_regularisation():
  """The source adds wd * p to the gradient, in front of the momentum."""
  config = load("resnet50_i1k") | {"schedule": {"decay_type": "constant"}}
  shape = jax.ShapeDtypeStruct((), jnp.float32)
  like = {"head": {"kernel": shape, "bias": shape}, "bn1": {"scale": shape}}
  units = lengths_lib.Units(2048, total_steps=1000)
  optimizer = chain.make(settings.Config(config), like, units)
  ones = jax.tree.map(lambda x: jnp.ones(x.shape), like)
  zeros = jax.tree.map(jnp.zeros_like, ones)

  def step(i, carry):
    params, state = carry
    updates, state = optimizer.tx.update(zeros, state, params, step=i)
    return jax.tree.map(jnp.add, params, updates), state

  begin = ones, optimizer.tx.init(ones)
  params, _ = jax.jit(lambda c: jax.lax.fori_loop(0, 1000, step, c))(begin)
  p, velocity = 1.0, 0.0
  for _ in range(1000):
    velocity = 0.875 * velocity + p / 32768
    p -= 2.048 * velocity
  assert float(params["head"]["kernel"]) == pytest.approx(p, rel=1e-4)
  assert float(params["head"]["bias"]) == pytest.approx(p, rel=1e-4)
  assert p < 0.7 and float(params["bn1"]["scale"]) == 1


# Tiny runs on data that tensorflow-datasets would have prepared.


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Compiling is nearly all that the runs below do."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  """A folder of data sets of noise, named and built like the real ones."""
  from tensorflow_datasets import features as tfds

  folder = tmp_path_factory.mktemp("sets")
  jpeg = tfds.Image(shape=(None, None, 3), encoding_format="jpeg")
  png = tfds.Image(shape=(32, 32, 3), encoding_format="png")
  label = tfds.ClassLabel(num_classes=1000)
  many = tfds.Sequence(tfds.ClassLabel(num_classes=21843))
  names = dict(file_name=tfds.Text())
  captions = tfds.Sequence(dict(text=tfds.Text(), id=np.int64))
  coco = dict(image=jpeg, captions=captions)
  imagenet = dict(image=jpeg, label=label, **names)
  cifar = dict(image=png, label=tfds.ClassLabel(num_classes=10), id=tfds.Text())
  _prepare(folder, "imagenet2012", imagenet, dict(train=64, validation=20))
  _prepare(folder, "imagenet_v2/matched-frequency", imagenet, dict(test=9))
  _prepare(folder, "imagenet21k", dict(image=jpeg, labels=many), dict(full=40))
  _prepare(folder, "cifar10", cifar, dict(train=50, test=20))
  _prepare(folder, "coco_captions/2014", coco, dict(train=40, val=20, test=10))
  return folder


def _prepare(data_dir, name, features, splits):
  """Writes a data set of one TFRecord file for each split."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  rng = np.random.default_rng(0)
  folder = data_dir / name / "1.0.0"
  name = name.partition("/")[0]
  folder.mkdir(parents=True)

  def template(**split):
    return tfds.core.ShardedFileTemplate(
      dataset_name=name, data_dir=folder, filetype_suffix="tfrecord", **split
    )

  values = {
    "image": lambda i: rng.integers(0, 256, (32, 32, 3), np.uint8),
    "label": lambda i: i % 10,
    "labels": lambda i: [i, i + 5000],
    "file_name": lambda i: f"{i}.jpg",
    "id": lambda i: f"{i}",
    "captions": lambda i: [dict(text=f"{i} {c}", id=i) for c in "cats"],
  }
  features = tfds.features.FeaturesDict(features)
  for split, size in splits.items():
    path = str(folder / f"{name}-{split}.tfrecord-00000-of-00001")
    with tf.io.TFRecordWriter(path) as writer:
      for i in range(size):
        example = {key: values[key](i) for key in features}
        encoded = features.encode_example(example)
        writer.write(features.serialize_example(encoded))
  tfds.folder_dataset.write_metadata(
    data_dir=str(folder),
    features=features,
    split_infos=[
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=[size],
        num_bytes=0,
        filename_template=template(split=split),
      )
      for split, size in splits.items()
    ],
    filename_template=template(),
    check_data=False,
  )


def train(config, workdir):
  """(what main.train returned, the rows that it wrote, by step)."""
  config |= {"compile_cache": False, "tensorboard": False}
  newest = main.train(config, str(workdir))
  rows = [
    json.loads(line)
    for line in (workdir / "metrics.jsonl").read_text().splitlines()
  ]
  return newest, {row["step"]: row for row in rows}


def check(config, result, first_loss, rel=1e-3):
  """The run ended, with finite losses and all of its evaluations.

  Args:
    config: of the run.
    result: of `train`.
    first_loss: that of step 1, which the initialisation of the head decides.
    rel: its relative tolerance.
  """
  newest, rows = result
  assert newest["step"] == config["total_steps"] == max(rows)
  assert rows[1]["loss"] == pytest.approx(first_loss, rel=rel)
  for step in range(1, config["total_steps"] + 1):
    assert math.isfinite(rows[step]["loss"])
    assert rows[step]["grad_norm"] > 0
  for name, evaluation in config["evals"].items():
    if not evaluation.get("enabled", True):
      continue
    if evaluation["type"] in ("classification", "scoring", "zeroshot"):
      assert 0 <= newest[f"{name}/acc"] <= newest[f"{name}/top5_acc"] <= 1
    if evaluation["type"] in ("classification", "perplexity"):
      assert math.isfinite(newest[f"{name}/loss"])
    if evaluation["type"] == "retrieval":
      for way in ("img2txt", "txt2img"):
        recalls = [newest[f"{name}/{way}_recall@{k}"] for k in (1, 5, 10)]
        assert 0 <= recalls[0] <= recalls[1] <= recalls[2] <= 1
    if evaluation["type"] == "captions":
      assert 0 <= newest[f"{name}/exact"] <= 1


def sigmoid_loss(num_classes, bias, num_labels=1):
  """Sum of the losses of all classes when each logit is `bias`."""
  return num_classes * math.log1p(math.exp(bias)) - num_labels * bias


def test_vit_s16_i1k_trains(data_dir, tmp_path):
  config = load(f"vit_s16_i1k:runlocal,data_dir={data_dir}")
  config["evals"]["v2"]["enabled"] = True
  check(config, train(config, tmp_path), math.log(1000))


@pytest.mark.slow
def test_vit_i21k_trains(data_dir, tmp_path):
  config = load(f"vit_i21k:S/16,runlocal,data_dir={data_dir}")
  check(config, train(config, tmp_path), sigmoid_loss(21843, -10, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cappa", "cap"])
def test_captioners_train(name, data_dir, tmp_path):
  config = load(f"{name}:runlocal,data_dir={data_dir}")
  config["loss"]["chunk"] = 64
  check(config, train(config, tmp_path), math.log(32_000))
  # The pictures are named, the captions of all examples are there.
  files = {file.name for file in (tmp_path / "captions").iterdir()}
  assert files == {"captions-00000003.jsonl", "captions-00000003.png"}
  text = (tmp_path / "captions/captions-00000003.jsonl").read_text()
  rows = [json.loads(line) for line in text.splitlines()]
  assert len(rows) == 16
  for number, row in enumerate(rows):
    (reference,) = row["references"]
    assert reference in [f"{number} {c}" for c in "cats"]


@pytest.mark.slow
def test_digits_captions_trains(tmp_path):
  config = load("digits_captions:runlocal")
  check(config, train(config, tmp_path), math.log(259))
  names = {file.suffix for file in (tmp_path / "captions").iterdir()}
  assert names == {".jsonl", ".png"}


@pytest.mark.slow
def test_resnet50_i1k_trains(data_dir, tmp_path):
  config = load(f"resnet50_i1k:runlocal,data_dir={data_dir}")
  check(config, train(config, tmp_path), math.log(1000), rel=0.05)
  state = parameters(tmp_path, "mutable")
  mean = state["batch_stats/stage1_block1/bn1/mean"]
  assert np.abs(mean).max() > 1e-3  # From 0; so the statistics are saved.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch_base", "pydoc_t5"])
def test_t5_trains(name, tmp_path):
  config = load(f"{name}:runlocal")
  # Logits are as far apart as normal numbers, and bytes are often repeated.
  first_loss = math.log(config["model"]["vocab_size"])
  check(config, train(config, tmp_path), first_loss, rel=0.15)


@pytest.mark.parametrize(
  "spec",
  [
    "pydoc_lm",
    *[
      pytest.param(spec, marks=pytest.mark.slow)
      for spec in ("pydoc_lm:moe", "gpt2_124m", "llama_8b", "mixtral_8x7b")
    ],
  ],
)
def test_language_models_train(spec, tmp_path):
  config = load(f"{spec}{',' if ':' in spec else ':'}runlocal")
  config["log_steps"] = 1
  # The losses of routers come on top, and tied heads like to repeat.
  check(config, train(config, tmp_path), math.log(259), rel=0.05)


@pytest.mark.slow
def test_siglip_trains(data_dir, tmp_path):
  names = tmp_path / "names.txt"
  names.write_text("".join(f"thing {i}\n" for i in range(10)))
  config = load(f"siglip:runlocal,class_names={names},data_dir={data_dir}")
  # Nothing is similar yet, so the bias decides: 10 for the one that belongs.
  check(config, train(config, tmp_path / "run"), 10, rel=0.5)


@pytest.mark.slow
def test_lit_learns_to_read_what_a_locked_tower_sees(data_dir, tmp_path):
  model = load("lit:runlocal")["model"]["image"]
  vit = parts.find_module("models", "vit", "").Model(**model, num_classes=3)
  image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
  shapes = jax.eval_shape(vit.init, jax.random.key(0), image)["params"]
  rng = np.random.default_rng(0)
  tower = {
    name: rng.normal(size=x.shape, scale=0.1).astype(np.float32)
    for name, x in trees.flatten_with_names(shapes)
  }
  np.savez(tmp_path / "vit.npz", **tower)
  config = load(f"lit:runlocal,init={tmp_path}/vit.npz,data_dir={data_dir}")
  check(config, train(config, tmp_path / "run"), 5, rel=0.9)
  params = parameters(tmp_path / "run")
  for name, value in tower.items():
    if not name.startswith("head/"):
      np.testing.assert_array_equal(params[f"img/{name}"], value)
  assert "img/head/kernel" not in params and params["b"] != np.float32(-2.71)
  state = parameters(tmp_path / "run", "opt")
  assert any("txt/" in name for name in state)
  assert not any("img/" in name for name in state)


@pytest.mark.slow
def test_digits_siglip_trains(tmp_path):
  config = load("digits_siglip:runlocal")
  for tower in ("image", "text"):
    config["model"][tower]["depth"] = 1
  check(config, train(config, tmp_path), 5, rel=0.5)


@pytest.fixture(scope="module")
def pretrained(data_dir, tmp_path_factory):
  """(config, workdir, result) of a tiny run of vit_i1k."""
  workdir = tmp_path_factory.mktemp("pretrained")
  config = load(f"vit_i1k:B/16,runlocal,data_dir={data_dir}")
  return config, workdir, train(config, workdir)


def test_vit_i1k_trains(pretrained):
  config, _, result = pretrained
  check(config, result, sigmoid_loss(1000, -6.9))


def parameters(workdir, prefix="params"):
  """{name: array} of a tree in the newest checkpoint."""
  file = parameter_files.open_file(
    str(workdir), step=None, prefix=prefix, key="workdir"
  )
  return file.read([*file.specs])


def test_transfer_goes_on_from_a_pretrained_model(
  pretrained, data_dir, tmp_path
):
  _, old_workdir, _ = pretrained
  config = load(
    f"transfer:cifar10,variant=B/16,init={old_workdir},runlocal,"
    f"data_dir={data_dir}"
  )
  check(config, train(config, tmp_path), math.log(10))
  old, new = parameters(old_workdir), parameters(tmp_path)
  assert {*old} == {*new}
  assert old["head/kernel"].shape == (32, 1000)
  assert new["head/kernel"].shape == (32, 10)
  assert old["pos_embedding"].shape[1] == 4
  assert new["pos_embedding"].shape[1] == 16  # Resampled.
  moved = {
    name: np.abs(old[name] - new[name]).max()
    for name in old
    if not re.match("head|pos_embedding", name)
  }
  # Three steps of clipped gradients; kernels of another seed are off by 0.1.
  assert 0 < max(moved.values()) < 0.02
  assert moved["embedding/kernel"] > 0


def test_digits_takes_what_the_command_line_says(tmp_path):
  changes = {
    "total_steps": 5,
    "ckpt_steps": 3,
    "log_steps": 2,
    "seed": 7,
    "mesh.replica": 2,
    "mesh.fsdp": 4,
    "model.depth": 1,
  }
  flags = [f"--config.{key}={value}" for key, value in changes.items()]
  config, workdir = command.parse(
    [
      "main",
      f"--config={FOLDER / 'digits'}.py:runlocal",
      f"--workdir={tmp_path}",
      *flags,
    ]
  )
  for key, value in changes.items():
    node = config
    for part in key.split("."):
      node = node[part]
    assert node == value
  newest, rows = train(config, pathlib.Path(workdir))
  assert newest["step"] == 5
  assert [step for step, row in rows.items() if "loss" in row] == [1, 2, 4, 5]
  listing = folders.listing(workdir)
  assert [*listing.checkpoints] == [3, 5]
  saved = json.loads((tmp_path / "config.json").read_text())
  assert saved["seed"] == 7 and saved["mesh"] == {"replica": 2, "fsdp": 4}
  shapes = trees.flatten_with_names(params_of(config))
  assert {name for name, _ in shapes} == {*parameters(workdir)}
