"""Modules that predict further tokens, against transformers: published_mtp.

golden/make_published.py made the folder, DeepSeek V3 with two modules.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN, export, opened, variables_of
from support import rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError

FOLDER = GOLDEN / "published_mtp"
DEPTH = 4


def loaded(mtp, folder=FOLDER, **options):
  module, model = opened(folder, mtp=mtp, **options)
  return module, model, dict(variables_of(module, model, folder))


@pytest.mark.golden
@pytest.mark.parametrize(
  "scan", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_logits_of_the_modules(scan):
  _, model, variables = loaded(2, scan=scan)
  reference = np.load(FOLDER / "reference.npz")
  tokens = reference["tokens"]

  @jax.jit
  def run(variables):
    (logits, out), _ = model.apply(
      variables, tokens, train=True, mutable=["step_sums"]
    )
    kernel = model.head_kernel(variables["params"])
    further = [x[:, : -i - 1] @ kernel for i, x in enumerate(out["mtp"])]
    return [logits, *further]

  expected = [reference[name] for name in ("logits", "logits_1", "logits_2")]
  rounding.assert_close(run, variables, expected)


def test_layers_of_the_file_that_the_model_lacks_are_ignored():
  for mtp in (0, 1):
    _, model, variables = loaded(mtp)
    names = [name for name, _ in trees.flatten_with_names(variables)]
    modules = {name.split("/")[2] for name in names if "/mtp/" in name}
    assert modules == {f"blocks_{i}" for i in range(mtp)}
  reference = np.load(FOLDER / "reference.npz")
  _, model, variables = loaded(0)
  logits, _ = model.apply(variables, reference["tokens"])
  np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)


def test_modules_that_the_file_lacks_are_named():
  folder = GOLDEN / "published" / "deepseek_v3"
  with pytest.raises(ConfigError, match="missing +mtp/blocks_0/projection"):
    loaded(1, folder)


@pytest.mark.parametrize("mtp", [0, 2])
def test_exports_have_the_modules_of_the_model(mtp, tmp_path):
  module, model, variables = loaded(mtp, scan=True)
  config, arrays = export(module, model, variables, tmp_path)
  assert config["num_nextn_predict_layers"] == mtp
  copies = ("embed_tokens.weight", "shared_head.head.weight")
  layers = tuple(f"model.layers.{DEPTH + i}." for i in range(mtp, 2))
  expected = {
    name: x
    for name, x in safetensors_files.read(str(FOLDER)).items()
    if not name.startswith(layers)
    and not (name.endswith(copies) and "layers" in name)
  }
  assert set(arrays) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(arrays[name], array[...], name)
  again = loaded(mtp, tmp_path, scan=True)[2]
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
  _, model = opened(FOLDER, mtp=1)
  tokens = jnp.zeros((1, 4), int)
  variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
  assert "mtp" in variables["params"]
  assert "mtp" in variables["router_state"]
