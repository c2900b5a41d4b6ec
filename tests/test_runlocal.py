"""Tiny runs of every config, on one device and on eight.

Runs on made-up data go through the command line. Those on data in the format of
tensorflow-datasets call main.train.
"""

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compile_cache, main_forks

from bigtrain import command, main
from bigtrain.arrays import trees
from bigtrain.checkpoints import folders
from bigtrain.checkpoints.foreign import parameter_files
from bigtrain.config import loading
from bigtrain.config.modules import find_module

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
# These hold what other configs share, and have no arguments of their own.
SHARED = ("__init__", "common", "decoder_lm", "t5_c4", "vlm_transfer")
SPECS = sorted(
  f"{path.stem}:runlocal"
  for path in FOLDER.glob("*.py")
  if path.stem not in SHARED
) + ["pydoc_lm:moe,runlocal", "llama_8b:length=131072,runlocal"]


def load(spec):
  """The config of "name:arguments"."""
  name, _, arguments = spec.partition(":")
  return loading.load(f"{FOLDER / name}.py:{arguments}")


def read_rows(workdir):
  """{step: row} of metrics.jsonl."""
  lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
  return {row["step"]: row for row in map(json.loads, lines)}


def read_parameters(workdir, prefix="params"):
  """{name: array} of a tree in the newest checkpoint."""
  file = parameter_files.open_file(
    str(workdir), step=None, prefix=prefix, key="workdir"
  )
  return file.read([*file.specs])


def check(config, rows, first_loss, rel=1e-3):
  """Asserts that a run reached its end with finite losses and all evaluations.

  Args:
    config: config of the run.
    rows: {step: row} of the run.
    first_loss: expected loss of step 1, before any update.
    rel: relative tolerance of first_loss.
  """
  total, log_steps = config["total_steps"], config["log_steps"]
  assert max(rows) == total >= 3
  assert rows[1]["loss"] == pytest.approx(first_loss, rel=rel, abs=1e-6)
  for step in {1, *range(log_steps, total, log_steps), total}:
    assert math.isfinite(rows[step]["loss"])
    assert rows[step]["grad_norm"] > 0
  newest = {name: value for row in rows.values() for name, value in row.items()}
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
  """Sum over classes of the sigmoid loss, if every logit equals `bias`."""
  return num_classes * math.log1p(math.exp(bias)) - num_labels * bias


# Loss of the first step and its relative tolerance. Where the last layer starts
# at zero the loss is exact. Losses of routers come on top; tied heads prefer
# the token that was just read, and bytes often repeat; in contrastive losses
# nothing is similar yet, so the bias decides.
_BYTES, _TOKENS, _SPANS = (math.log(n) for n in (259, 32_000, 259 + 100))
FIRST_LOSS = {
  "bit": (math.log(1000), 0.05),
  "cap": (_TOKENS, 1e-3),
  "clippo": (0.7, 0.6),  # Made-up pictures of both kinds are alike.
  "cappa": (_TOKENS, 1e-3),
  # Two times the captions' loss, and that of 16 pairs.
  "coca": (2 * math.log(64_000) + math.log(16), 0.2),
  "deepseek_v3": (1.3 * _BYTES, 0.05),  # With a second token's loss.
  "digits": (math.log(10), 1e-3),
  "dinov2_finetune": (math.log(37), 1e-3),
  "digits_captions": (_BYTES, 1e-3),
  "digits_distill": (0.25, 0.5),  # The teacher has a random head.
  "digits_siglip": (5, 0.5),
  "dpo": (math.log(2), 1e-3),
  "flexivit": (0.5, 0.9),  # The teacher has a random head.
  "gemma3_1b": (_BYTES, 0.05),
  "gemma3_4b": (math.log(260), 0.05),
  "gemma4_26b_a4b": (_BYTES, 0.05),
  # The advantages of a prompt's answers sum to zero.
  "grpo": (0.0, 1e-3),
  "gpt2_124m": (_BYTES, 0.05),
  "gpt_oss_20b": (_BYTES, 0.05),
  "ijepa": (0.7, 0.5),  # Half the variance of features and predictions.
  "kimi_k2": (_BYTES, 0.05),
  "lit": (5, 0.9),
  "llama_1b": (_BYTES, 0.05),
  "llava": (math.log(260), 0.05),
  "llama_70b": (_BYTES, 0.05),
  "llama_8b": (_BYTES, 0.05),
  "mixtral_8x7b": (_BYTES, 0.05),
  "dinov2": (6.6, 0.1),  # ln(128), more for a random head, and KoLeo.
  "jit": (2.06, 0.1),  # The model predicts zeros.
  "mae": (1.5, 0.5),  # The variance of pixels, and of predictions.
  # 2 views of twice the temperature; random pixels make all views unlike.
  "moco_v3": (0.8 * math.log(128), 0.1),
  "mixer": (sigmoid_loss(1000, -6.9), 1e-3),
  "naflex": (math.log(1000), 1e-3),
  "paligemma2_3b": (math.log(260), 0.05),
  "pydoc_lm": (_BYTES, 0.05),
  "qwen3_0_6b": (_BYTES, 0.05),
  "qwen3_235b": (_BYTES, 0.05),
  "qwen3_5_9b": (_BYTES, 0.05),
  "qwen3_next_80b": (_BYTES, 0.05),
  "qwen3_vl_2b": (math.log(260), 0.05),
  "smollm3_3b": (_BYTES, 0.05),
  "pydoc_t5": (math.log(259 + 32), 0.15),
  "resnet50_i1k": (math.log(1000), 0.05),
  "sft": (_BYTES, 0.05),
  "siglip": (10, 0.5),
  "siglip2": (5 + math.log(259 + 21), 0.5),  # Two losses.
  "siglip2_naflex": (5 + math.log(259 + 21), 0.5),
  "siglip2_distill": (5, 0.5),
  "siglip2_finetune": (10, 0.5),
  "switch_base": (_SPANS, 0.15),
  "t5_1_1_base": (_SPANS, 0.15),
  "t5_small": (_SPANS, 0.15),
  "transfer": (math.log(10), 1e-3),
  "vlm_digits": (math.log(260), 0.05),
  "vit_i1k": (sigmoid_loss(1000, -6.9), 1e-3),
  "vit_i21k": (sigmoid_loss(21_843, -10, 2), 1e-3),
  "vit_s16_i1k": (math.log(1000), 1e-3),
}


# On made-up data, through the command line.


@pytest.fixture(scope="module")
def server():
  """Runs of bigtrain.main with a compilation cache."""
  result = main_forks.Server(XDG_CACHE_HOME=str(compile_cache.FOLDER / "home"))
  yield result
  result.close()


# Layers in a scan under fsdp in `make test`; a decoder and an encoder-decoder
# with tied heads in bfloat16 in `make test-faults`; all in `make test-configs`.
MARKS = {
  ("llama_8b:runlocal", 8): (),
  ("gpt2_124m:runlocal", 1): (pytest.mark.slow, pytest.mark.configs),
  ("t5_small:runlocal", 1): (pytest.mark.slow, pytest.mark.configs),
}
# Longer runs end here; test_results.py has their results.
MOST_STEPS = 100


@pytest.mark.parametrize(
  ("spec", "num_devices"),
  [
    pytest.param(spec, n, marks=MARKS.get((spec, n), pytest.mark.configs))
    for n in (1, 8)
    for spec in SPECS
  ],
)
def test_runlocal_trains(spec, num_devices, server, tmp_path):
  name, _, arguments = spec.partition(":")
  config = load(spec)
  words = [f"--config={FOLDER / name}.py:{arguments}"]
  if config["total_steps"] > MOST_STEPS:
    config["total_steps"] = MOST_STEPS
    words.append(f"--config.total_steps={MOST_STEPS}")
  run = server.run(
    [*words, f"--workdir=./runs/{name}"],
    tmp_path,
    {"XLA_FLAGS": compile_cache.flags(num_devices)},
  )
  assert run.code == 0, run.output
  workdir = tmp_path / "runs" / name
  check(config, read_rows(workdir), *FIRST_LOSS[name])
  record = json.loads((workdir / "run.json").read_text())
  assert record["starts"][-1]["devices"] == num_devices
  assert {path.name for path in tmp_path.iterdir()} == {"runs", "main.log"}
  if "captions" in load(spec)["evals"]:
    suffixes = {file.suffix for file in (workdir / "captions").iterdir()}
    assert suffixes == {".jsonl", ".png"}


# On prepared data, in this process.


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  """A folder with data sets of noise in the format of the real ones."""
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
  """Writes a data set with one TFRecord file per split."""
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
  """Trains; returns {step: row}."""
  config |= {"compile_cache": False, "tensorboard": False}
  newest = main.train(config, str(workdir))
  assert newest["step"] == config["total_steps"]
  return read_rows(workdir)


@pytest.mark.configs
def test_vit_s16_i1k_trains_on_prepared_data(data_dir, tmp_path):
  config = load(f"vit_s16_i1k:runlocal,data_dir={data_dir}")
  config["evals"]["v2"]["enabled"] = True
  check(config, train(config, tmp_path), *FIRST_LOSS["vit_s16_i1k"])


@pytest.mark.configs
def test_vit_i21k_trains_on_prepared_data(data_dir, tmp_path):
  config = load(f"vit_i21k:S/16,runlocal,data_dir={data_dir}")
  check(config, train(config, tmp_path), *FIRST_LOSS["vit_i21k"])


@pytest.mark.configs
@pytest.mark.parametrize("name", ["cappa", "cap", "coca"])
def test_captioners_train_on_prepared_data(name, data_dir, tmp_path):
  config = load(f"{name}:runlocal,data_dir={data_dir}")
  config["loss"]["chunk"] = 64
  check(config, train(config, tmp_path), *FIRST_LOSS[name])
  # One grid of images, and one line for the captions of each image.
  files = {file.name for file in (tmp_path / "captions").iterdir()}
  assert files == {"captions-00000003.jsonl", "captions-00000003.png"}
  text = (tmp_path / "captions/captions-00000003.jsonl").read_text()
  rows = [json.loads(line) for line in text.splitlines()]
  assert len(rows) == 16
  for number, row in enumerate(rows):
    (reference,) = row["references"]
    assert reference in [f"{number} {c}" for c in "cats"]


@pytest.mark.configs
def test_resnet50_i1k_trains_on_prepared_data(data_dir, tmp_path):
  config = load(f"resnet50_i1k:runlocal,data_dir={data_dir}")
  check(config, train(config, tmp_path), *FIRST_LOSS["resnet50_i1k"])
  state = read_parameters(tmp_path, "mutable")
  mean = state["batch_stats/stage1_block1/bn1/mean"]
  assert np.abs(mean).max() > 1e-3  # It starts at 0: statistics are saved.


@pytest.mark.configs
def test_siglip_trains_on_prepared_data(data_dir, tmp_path):
  names = tmp_path / "names.txt"
  names.write_text("".join(f"thing {i}\n" for i in range(1000)))
  config = load(f"siglip:runlocal,class_names={names},data_dir={data_dir}")
  check(config, train(config, tmp_path / "run"), *FIRST_LOSS["siglip"])


@pytest.mark.configs
def test_lit_keeps_the_image_tower_of_init(data_dir, tmp_path):
  model = load("lit:runlocal")["model"]["image"]
  vit = find_module("models", "vit", "").Model(**model, num_classes=3)
  image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
  shapes = jax.eval_shape(vit.init, jax.random.key(0), image)["params"]
  rng = np.random.default_rng(0)
  tower = {
    name: rng.normal(size=x.shape, scale=0.1).astype(np.float32)
    for name, x in trees.flatten_with_names(shapes)
  }
  np.savez(tmp_path / "vit.npz", **tower)
  config = load(f"lit:runlocal,init={tmp_path}/vit.npz,data_dir={data_dir}")
  check(config, train(config, tmp_path / "run"), *FIRST_LOSS["lit"])
  params = read_parameters(tmp_path / "run")
  for name, value in tower.items():
    if not name.startswith("head/"):
      np.testing.assert_array_equal(params[f"img/{name}"], value)
  assert "img/head/kernel" not in params and params["b"] != np.float32(-2.71)
  state = read_parameters(tmp_path / "run", "opt")
  assert any("txt/" in name for name in state)
  assert not any("img/" in name for name in state)


@pytest.fixture(scope="module")
def pretrained(data_dir, tmp_path_factory):
  """(config, workdir, rows) of a tiny run of vit_i1k."""
  workdir = tmp_path_factory.mktemp("pretrained")
  config = load(f"vit_i1k:B/16,runlocal,data_dir={data_dir}")
  return config, workdir, train(config, workdir)


@pytest.mark.configs
def test_vit_i1k_trains_on_prepared_data(pretrained):
  config, _, rows = pretrained
  check(config, rows, *FIRST_LOSS["vit_i1k"])


@pytest.mark.configs
def test_transfer_starts_from_a_pretrained_model(
  pretrained, data_dir, tmp_path
):
  _, old_workdir, _ = pretrained
  config = load(
    f"transfer:cifar10,variant=B/16,init={old_workdir},runlocal,"
    f"data_dir={data_dir}"
  )
  check(config, train(config, tmp_path), *FIRST_LOSS["transfer"])
  old, new = read_parameters(old_workdir), read_parameters(tmp_path)
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
  # Three steps of clipped gradients; kernels of another seed differ by 0.1.
  assert 0 < max(moved.values()) < 0.02
  assert moved["embedding/kernel"] > 0


def test_digits_obeys_the_command_line(tmp_path):
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
  config, workdir, _ = command.parse(
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
  rows = train(config, pathlib.Path(workdir))
  assert [step for step, row in rows.items() if "loss" in row] == [1, 2, 4, 5]
  listing = folders.listing(workdir)
  assert [*listing.checkpoints] == [3, 5]
  saved = json.loads((tmp_path / "config.json").read_text())
  assert saved["seed"] == 7 and saved["mesh"] == {"replica": 2, "fsdp": 4}
  module = find_module("models", config["model_name"], "model_name")
  image = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
  model = module.Model(**config["model"])
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  names = {name for name, _ in trees.flatten_with_names(shapes)}
  assert names == {*read_parameters(workdir)}


@pytest.mark.configs
@pytest.mark.parametrize("name", ["bit", "mixer"])
def test_bit_and_mixer_train_on_prepared_data(name, data_dir, tmp_path):
  config = load(f"{name}:runlocal,data_dir={data_dir}")
  check(config, train(config, tmp_path), *FIRST_LOSS[name])
