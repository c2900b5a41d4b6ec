"""Runs that began with a published folder return in its layout."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util

import bigtrain
from bigtrain import main
from bigtrain.checkpoints import changes
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.models import decoder
from bigtrain.objective import published_sizes
from bigtrain.tools import checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PHI3 = GOLDEN / "peft" / "base_phi3"


def config_of(init, **others):
  features = {"tokens": "int32[8] < 67", "targets": "int32[8] < 67"}
  return dict(
    seed=0,
    total_steps=1,
    log_steps=1,
    task="language_modeling",
    input=dict(data=dict(type="synthetic", features=features), batch_size=8),
    model_name="decoder",
    model=dict(published=str(PHI3)),
    model_init=str(init),
    optimizer=dict(name="adam"),
    schedule=dict(decay_type="constant"),
    lr=1e-3,
    **others,
  )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run that began with a copy of the folder, which is gone."""
  folder = tmp_path_factory.mktemp("models") / "phi3"
  shutil.copytree(PHI3, folder)
  workdir = str(tmp_path_factory.mktemp("runs") / "phi3")
  config = config_of(folder)
  config["model"] = dict(published=str(folder))
  main.train(config, workdir)
  shutil.rmtree(folder)
  return workdir


def exported(workdir, out, *flags):
  assert checkpoint.main(["export", workdir, str(out), *flags]) == 0
  return json.loads((out / "config.json").read_text())


def test_an_export_has_the_layout_and_arrays_of_the_folder(run, tmp_path):
  config = exported(run, tmp_path / "out", "--format=hf")
  theirs = json.loads((PHI3 / "config.json").read_text())
  assert config["model_type"] == "phi3"
  assert config["architectures"] == theirs["architectures"]
  arrays = safetensors_files.read(str(tmp_path / "out"))
  originals = safetensors_files.read(str(PHI3))
  shapes = {name: x.shape for name, x in arrays.items()}
  assert shapes == {name: x.shape for name, x in originals.items()}
  # Another layout may be asked for.
  other = exported(run, tmp_path / "llama", "--layout=llama")
  assert other["model_type"] == "llama"


def test_the_layout_passes_from_run_to_run(run, tmp_path):
  single = str(tmp_path / "single.safetensors")
  assert checkpoint.main(["export", run, single, "--prefix=params"]) == 0
  for source in (run, single, dict(path=run, step=1)):
    config = dict(model_name="decoder", model={}, model_init=source)
    assert published_sizes.layout_of(config) == "phi3", source
  config = dict(model_name="decoder", model={}, model_init="no/such/folder")
  assert published_sizes.layout_of(config) is None


def test_adapters_have_the_modules_of_the_folder(tmp_path):
  adapters = dict(
    targets=[r".*/(query|value)/kernel", ".*/up/kernel"],
    rank=2,
    train=["head/kernel", "norm/scale"],
  )
  lr_mults = [("head/.*", 10.0)]
  config = config_of(PHI3, adapters=adapters, lr_mults=lr_mults)
  workdir = str(tmp_path / "run")
  main.train(config, workdir)
  out = tmp_path / "peft"
  assert checkpoint.main(["export", workdir, str(out), "--format=peft"]) == 0
  about = json.loads((out / "adapter_config.json").read_text())
  assert about["target_modules"] == ["gate_up_proj", "qkv_proj"]
  assert about["modules_to_save"] == ["lm_head", "model.norm"]
  # Query and value have matrices A of their own.
  assert about["r"] == 4 or "qkv_proj" in str(about["rank_pattern"])
  tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
  want = bigtrain.load(workdir).run("logits", {"tokens": tokens})
  again = bigtrain.load(PHI3, adapter=out).run("logits", {"tokens": tokens})
  np.testing.assert_allclose(again, want, rtol=0, atol=1e-5)
  base = bigtrain.load(PHI3).run("logits", {"tokens": tokens})
  assert np.abs(base - want).max() > 1e-4


def test_a_model_that_has_changed_says_why(caplog):
  # Phi 3 has no biases; Qwen 2 has these.
  model = decoder.Model(
    variant="llama",
    vocab_size=67,
    width=16,
    depth=1,
    num_heads=2,
    mlp_dim=24,
    max_len=32,
    use_bias=("qkv",),
  )
  tokens = np.zeros((1, 4), np.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  flat = traverse_util.flatten_dict(params, sep="/")
  shapes = {name: x.shape for name, x in flat.items()}
  config, _ = decoder.to_published(model, shapes, None, "phi3")
  assert config["model_type"] == "qwen2"
  assert "began as phi3, which no longer expresses it" in caplog.text
  assert "use_bias=()" in caplog.text
  caplog.clear()
  decoder.to_published(model, shapes, None, "qwen2")
  assert not caplog.text


def test_the_layout_is_no_part_of_what_a_run_learns():
  config = config_of(PHI3)
  before = changes.identity(config)
  assert changes.identity({**config, "published_layout": "phi3"}) == before
