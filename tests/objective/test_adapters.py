"""Runs with adapters: the base stays out of them, and they resume exactly."""

import json
import os

import jax
import numpy as np
import pytest
from flax import traverse_util
from support import rounding

import bigtrain
from bigtrain import main
from bigtrain.checkpoints import folders
from bigtrain.checkpoints.foreign import peft_files, safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.layers import lora
from bigtrain.tools import checkpoint

_MODEL = dict(
  variant="llama",
  vocab_size=259,
  width=16,
  mlp_dim=32,
  num_heads=2,
  depth=2,
  max_len=64,
  scan=True,
)
_OPTIONS = dict(targets=r".*(query|value|up)/kernel", rank=2, alpha=4)


def flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


def config_of(source, **options):
  return dict(
    seed=0,
    total_steps=4,
    log_steps=1,
    ckpt_steps=2,
    mesh=dict(replica=1, fsdp=-1),
    task="language_modeling",
    input=dict(
      data=dict(type="text", name="pydoc", split="train", length=16),
      batch_size=8,
    ),
    model_name="decoder",
    model=_MODEL,
    model_init=source,
    adapters={**_OPTIONS, **options},
    optimizer=dict(name="adam"),
    schedule=dict(decay_type="constant"),
    lr=1e-2,
  )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """The path of a base's arrays, and of another one's."""
  result = []
  for seed in (0, 1):
    tokens = np.zeros((1, 4), np.int32)
    model = decoder.Model(**_MODEL)
    params = model.init(jax.random.key(seed), tokens)["params"]
    path = tmp_path_factory.mktemp("base") / "params.npz"
    np.savez(path, **flat(params))
    result.append(str(path))
  return result


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("runs") / "whole")
  main.train(config_of(base[0]), workdir)
  return workdir


def arrays(workdir):
  with np.load(_exported(workdir)) as file:
    return dict(file)


def _exported(workdir):
  out = workdir + ".npz"
  if not os.path.exists(out):
    checkpoint.main(["export", workdir, out, "--prefix="])
  return out


def test_a_checkpoint_has_adapters_alone(whole):
  manifest = folders.read_manifest(folders.find(whole, None))
  params = [n for n in manifest.arrays if n.startswith("params/")]
  assert {n.rpartition("/")[2] for n in params} == {"lora_a", "lora_b"}
  assert len(params) == 2 * 3
  assert max(np.prod(a.shape) for a in manifest.arrays.values()) <= 2 * 32 * 2
  assert "params/blocks/mlp/up/lora_a" in manifest.arrays


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one(base, whole, tmp_path):
  workdir = str(tmp_path / "run")
  main.train({**config_of(base[0]), "stop_at_steps": 2}, workdir)
  with pytest.raises(ConfigError, match="config.model_init: expected"):
    main.train(config_of(base[1]), workdir)
  main.train(config_of(base[0]), workdir)
  expected = arrays(whole)
  for name, x in arrays(workdir).items():
    np.testing.assert_array_equal(x, expected[name], err_msg=name)


def losses_of(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    rows = [json.loads(line) for line in file]
  return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(base="nf4", dora=True)])
def test_the_mesh_and_microbatches_change_nothing(base, options, tmp_path):
  config = config_of(base[0], **options) | dict(total_steps=2, log_steps=1)
  main.train(config, str(tmp_path / "eight"))
  eight = losses_of(tmp_path / "eight")
  assert len(eight) == 2 and eight[0] != eight[1]
  mesh = dict(fsdp=2, tensor=2, pipeline=2)
  main.train(config | dict(mesh=mesh, microbatches=2), str(tmp_path / "split"))
  np.testing.assert_allclose(losses_of(tmp_path / "split"), eight, rtol=1e-5)


def test_export_and_load(base, whole, tmp_path):
  tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
  model = bigtrain.load(whole)
  want = model.run("logits", {"tokens": tokens})
  folder = str(tmp_path / "hf")
  checkpoint.main(["export", whole, folder, "--layout=llama"])
  weights = safetensors_files.read(folder)
  assert "model.layers.0.self_attn.q_proj.weight" in weights
  merged = str(tmp_path / "merged.npz")
  checkpoint.main(["export", whole, merged, "--prefix=params"])
  plain = bigtrain.load(merged)
  assert "base" not in plain.variables
  got = plain.run("logits", {"tokens": tokens})
  np.testing.assert_allclose(got, want, atol=1e-6)
  # Off again, and another way on: the file of PEFT.
  peft = str(tmp_path / "peft")
  checkpoint.main(["export", whole, peft, "--format=peft"])
  assert peft_files.is_folder(peft)
  other = model.with_adapter(peft)
  got = other.run("logits", {"tokens": tokens})
  np.testing.assert_allclose(got, want, atol=1e-6)
  first = jax.tree.leaves(model.variables["base"])[0]
  assert jax.tree.leaves(other.variables["base"])[0] is first
  assert abs(want).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantized_base_is_its_dequantized_one(base, kind, tmp_path):
  workdir = str(tmp_path / "run")
  options = dict(base=kind, double_quantization=True, dora=True)
  main.train(config_of(base[0], **options), workdir)
  model = bigtrain.load(workdir)
  variables = model.variables
  tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
  want = model.run("logits", {"tokens": tokens})
  dense = {**variables, "base": lora.unquantized(variables["base"])}
  model.variables = dense
  got = model.run("logits", {"tokens": tokens})
  # Two programs, with rounding of their own.
  atol = rounding.ROUNDINGS * rounding.EPSILON * abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)
  original = dict(np.load(base[0]))
  for name, x in flat(dense["base"]).items():
    scale = np.abs(original[name]).max()
    error = np.abs(np.asarray(x, np.float32) - original[name]).max() / scale
    if "/kernel" in name and "blocks" in name:
      assert 1e-4 < error < (0.01 if kind == "int8" else 0.2), name
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(variables["base"]))
  assert num_bytes < sum(x.nbytes for x in original.values()) * 0.6


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(targets=".*qery/kernel"), "matches no kernel"),
    (dict(base="int4"), "config.adapters.base"),
    (dict(rank=0), "config.adapters.rank"),
    (dict(alhpa=2), "Did you mean .alpha."),
  ],
)
def test_mistakes_are_named(base, options, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    main.train(config_of(base[0], **options), str(tmp_path / "run"))


class Classifies:
  """A hook that applies a predict function in each row."""

  losses: list[float] = []

  def __init__(self, context):
    self._context = context

  def after_row(self, step, row):
    del step, row
    context = self._context
    batch = {name: np.ones((8, 16), np.int32) for name in ("tokens", "targets")}
    predict = context.predict_fns["perplexity"]
    result = predict(context.variables(), batch)
    self.losses.append(float(np.sum(jax.tree.leaves(result)[0])))


def test_hooks_predict_with_the_base(base, tmp_path):
  hook = dict(type=f"{__name__}.Classifies")
  config = config_of(base[0]) | dict(total_steps=1, ckpt_steps=1)
  main.train(config | dict(hooks=dict(x=hook)), str(tmp_path / "x"))
  assert len(Classifies.losses) == 1 and np.isfinite(Classifies.losses[0])
