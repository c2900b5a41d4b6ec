"""Modules that predict further tokens, against transformers: published_mtp*.

golden/make_published.py made the folders: DeepSeek V3 with two modules, and
Qwen3-Next with one.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import (
  GOLDEN,
  export,
  opened,
  shapes_of,
  variables_of,
  write,
)
from support import rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError

DEEPSEEK = GOLDEN / "published_mtp"
QWEN = GOLDEN / "published_mtp_qwen"
DEPTH = 4  # Of DeepSeek's folder.
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def loaded(mtp, folder=DEEPSEEK, **options):
  module, model = opened(folder, mtp=mtp, **options)
  return module, model, dict(variables_of(module, model, folder))


@pytest.mark.golden
@pytest.mark.parametrize(
  ("folder", "mtp", "scan"),
  [
    (DEEPSEEK, 2, True),
    pytest.param(DEEPSEEK, 2, False, marks=pytest.mark.slow),
    (QWEN, 1, False),
  ],
)
def test_logits_of_the_modules(folder, mtp, scan):
  _, model, variables = loaded(mtp, folder, scan=scan)
  reference = np.load(folder / "reference.npz")
  tokens = reference["tokens"]

  @jax.jit
  def run(variables):
    (logits, out), _ = model.apply(
      variables, tokens, train=True, mutable=["step_sums"]
    )
    kernel = model.head_kernel(variables["params"])
    further = [x[:, : -i - 1] @ kernel for i, x in enumerate(out["mtp"])]
    return [logits, *further]

  names = ["logits", *(f"logits_{i + 1}" for i in range(mtp))]
  rounding.assert_close(run, variables, [reference[name] for name in names])


def test_layers_of_the_file_that_the_model_lacks_are_ignored():
  for folder, mtp in ((DEEPSEEK, 0), (DEEPSEEK, 1), (QWEN, 0)):
    _, model, variables = loaded(mtp, folder)
    names = [name for name, _ in trees.flatten_with_names(variables)]
    modules = {name.split("/")[2] for name in names if "/mtp/" in name}
    assert modules == {f"blocks_{i}" for i in range(mtp)}
  reference = np.load(DEEPSEEK / "reference.npz")
  _, model, variables = loaded(0)
  logits, _ = model.apply(variables, reference["tokens"])
  np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "hy_v3"])
def test_modules_that_the_file_lacks_are_named(family):
  folder = GOLDEN / "published" / family
  with pytest.raises(ConfigError, match="missing +mtp/blocks_0/projection"):
    loaded(1, folder)


@pytest.mark.parametrize(
  ("family", "start"),
  [
    ("ernie4_5_moe", "model.mtp_block.0."),
    ("ernie4_5_moe", "model.mtp_linear_proj.0."),
    ("exaone_moe", "mtp.layers.0."),
    ("mistral", "model.mtp_layers.0."),
    ("glm4_moe_lite", "model.layers.4.eh_proj."),
    ("solar_open", "model.layers.3.eh_proj."),
  ],
)
def test_modules_of_other_families_are_ignored_by_name(family, start, tmp_path):
  folder = GOLDEN / "published" / family
  arrays = dict(safetensors_files.read(str(folder)))
  arrays[start + "weight"] = np.ones((2, 3), np.float32)
  module, model = opened(folder)
  got = variables_of(module, model, write(tmp_path, arrays))
  expected = variables_of(module, model, folder)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("mtp", [0, 2])
def test_exports_have_the_modules_of_the_model(mtp, tmp_path):
  module, model, variables = loaded(mtp, scan=True)
  config, arrays = export(module, model, variables, tmp_path)
  assert config["num_nextn_predict_layers"] == mtp
  layers = tuple(f"model.layers.{DEPTH + i}." for i in range(mtp, 2))
  expected = {
    name: x
    for name, x in safetensors_files.read(str(DEEPSEEK)).items()
    if not name.startswith(layers)
    and not (name.endswith(COPIES) and "layers" in name)
  }
  assert set(arrays) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(arrays[name], array[...], name)
  again = loaded(mtp, tmp_path, scan=True)[2]
  jax.tree.map(np.testing.assert_array_equal, again, variables)


@pytest.mark.parametrize("mtp", [0, 1])
def test_exports_of_qwen_have_its_names(mtp, tmp_path):
  module, model, variables = loaded(mtp, QWEN)
  config, arrays = export(module, model, variables, tmp_path)
  assert config["mtp_num_hidden_layers"] == mtp
  expected = {
    name: x
    for name, x in safetensors_files.read(str(QWEN)).items()
    if mtp or not name.startswith("mtp.")
  }
  assert set(arrays) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(arrays[name], array[...], name)
  again = loaded(mtp, tmp_path)[2]
  jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_names_of_hunyuan(tmp_path):
  """As vLLM reads them: final_layernorm for the norm behind the layer."""
  folder = GOLDEN / "published" / "hy_v3"
  module, model = opened(folder, mtp=1)
  rng = np.random.default_rng(0)
  shapes = shapes_of(model, jnp.zeros((1, 2), jnp.int32))
  variables = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes
  )
  config, arrays = export(module, model, variables, tmp_path, "hy_v3")
  assert config["num_nextn_predict_layers"] == 1
  start = f"model.layers.{model.depth}."
  names = {name for name in arrays if name.startswith(start)}
  rest = {name.removeprefix(start) for name in names}
  assert {f"{x}.weight" for x in ("enorm", "hnorm", "eh_proj")} <= rest
  assert {"final_layernorm.weight", "mlp.router.gate.weight"} <= rest
  again = loaded(1, tmp_path)[2]
  jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_export_drops_modules_that_are_not_wanted(tmp_path):
  module, model, variables = loaded(2)
  del variables["params"]["mtp"], variables["router_state"]["mtp"]
  config, arrays = export(module, model, variables, tmp_path)
  assert config["num_nextn_predict_layers"] == 0
  assert not [name for name in arrays if f"layers.{DEPTH}." in name]
  written = json.loads((tmp_path / "config.json").read_text())
  assert written["num_hidden_layers"] == DEPTH


def test_initial_values_need_no_training():
  _, model = opened(DEEPSEEK, mtp=1)
  tokens = jnp.zeros((1, 4), int)
  variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
  assert "mtp" in variables["params"]
  assert "mtp" in variables["router_state"]
