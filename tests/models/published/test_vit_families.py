"""Each family of ViTs against transformers: golden/published_vision.

golden/make_published_vision.py made the folders: small models, their outputs,
and the gradients of the sum of these times fixed weights.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN

from bigtrain import parts, settings, sharding, trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.models import vit

VISION = GOLDEN / "published_vision"
# The others have two towers.
FAMILIES = sorted(
  path.name
  for path in VISION.iterdir()
  if not path.name.startswith(("clip", "siglip"))
)


def opened(folder, **options):
  model = dict(published=str(folder), **options)
  config = settings.Config(dict(model_name="vit", model=model))
  return parts.model(parts.with_published_sizes(config))[1]


def like_of(model, devices=1):
  image = jnp.zeros((1, 16, 16, 3))
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  places, _ = sharding.state_shardings(shapes, mesh)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    places,
  )


def params_of(model, path):
  load = warm_start.load_params
  return load(str(path), like_of(model), convert=vit.from_published)[0]


def reference(family):
  with np.load(VISION / family / "reference.npz") as file:
    values = dict(file)
  values["image"] = values["pixel_values"].transpose(0, 2, 3, 1)
  return values


def outputs_of(model, params, image):
  """The outputs of transformers' model, by its names."""
  y, out = model.apply({"params": params}, image)
  return {"last_hidden_state": out["encoded"], "pooler_output": y}


def close(actual, expected, tolerance, name=""):
  atol = tolerance * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_features(family):
  folder = VISION / family
  model = opened(folder)
  expected = reference(family)
  outputs = outputs_of(model, params_of(model, folder), expected["image"])
  patches = expected["last_hidden_state"][:, -16:]
  close(outputs["last_hidden_state"], patches, 1e-5)
  if "pooler_output" in expected:
    close(outputs["pooler_output"], expected["pooler_output"], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_stacked_layers(family):
  folder = VISION / family
  model = opened(folder, scan=True)
  expected = reference(family)

  @jax.jit
  @jax.grad
  def gradients(params):
    outputs = outputs_of(model, params, expected["image"])
    # The class token's features are the pooled ones, before a tanh layer.
    total = 0.0
    if "weight of pooler_output" in expected:
      weight = expected["weight of pooler_output"]
      total = jnp.sum(outputs["pooler_output"] * weight)
    hidden = expected["weight of last_hidden_state"][:, -16:]
    return total + jnp.sum(outputs["last_hidden_state"] * hidden)

  published = params_of(model, folder / "gradients.safetensors")
  actual = dict(trees.flatten_with_names(gradients(params_of(model, folder))))
  expected_flat = dict(trees.flatten_with_names(published))
  largest = max(np.abs(x).max() for x in expected_flat.values())
  if family == "vit_mae":  # Its positions are fixed.
    del expected_flat["pos_embedding"]
  for name, value in expected_flat.items():
    # Those of keys' biases are zero but for rounding.
    scale = max(np.abs(value).max(), 1e-2 * largest)
    np.testing.assert_allclose(
      actual[name], value, rtol=0, atol=1e-4 * scale, err_msg=name
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scan", [False, True])
def test_exported_arrays_and_config_are_those_of_the_folder(family, scan):
  folder = VISION / family
  model = opened(folder, scan=scan)
  params = dict(trees.flatten_with_names(params_of(model, folder)))
  shapes = {name: x.shape for name, x in params.items()}
  config, tensors = vit.to_published(model, shapes)
  arrays = safetensors_files.read(str(folder))
  unused = {name for name in arrays if name.endswith("mask_token")}
  assert {tensor.name for tensor in tensors} == set(arrays) - unused
  for tensor in tensors:
    pieces = [np.asarray(params[name])[index] for name, index in tensor.parts]
    value = tensor.build(pieces)
    assert value.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(value, arrays[tensor.name], tensor.name)
  published = json.loads((folder / "config.json").read_text())
  # Initial values say nothing of trained models.
  initial = {"layerscale_value", "layer_scale_init_value"}
  for key in set(config) & set(published) - initial - {"mlp_ratio"}:
    assert config[key] == published[key], key


def test_a_classifier_has_the_classes_of_its_file(tmp_path):
  values = json.loads((VISION / "dinov2" / "config.json").read_text())
  values["architectures"] = ["Dinov2ForImageClassification"]
  values["id2label"] = {str(i): str(i) for i in range(5)}
  (tmp_path / "config.json").write_text(json.dumps(values))
  model = opened(tmp_path)
  assert (model.num_classes, model.pool_type) == (5, "tok_gap")
  shapes = dict(trees.flatten_with_names(like_of(model)))
  config, tensors = vit.to_published(
    model, {name: x.shape for name, x in shapes.items()}
  )
  assert config["architectures"] == ["Dinov2ForImageClassification"]
  assert len(config["id2label"]) == 5
  by_name = {tensor.name: tuple(tensor.shape) for tensor in tensors}
  assert by_name["classifier.weight"] == (5, 32)
  assert by_name["dinov2.embeddings.cls_token"] == (1, 1, 16)


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("vit", dict(hidden_act="relu"), "hidden_act='relu': .*'gelu'"),
    ("vit", dict(attn_gate=True), "attn_gate=True: unknown key"),
    ("dinov3_vit", dict(query_bias=False), "query_bias, key_bias, value_bias"),
    ("beit", dict(use_mean_pooling=False), "use_mean_pooling=False"),
    (
      "beit",
      dict(use_shared_relative_position_bias=True),
      "use_shared_relative_position_bias: expected one of them",
    ),
    ("vit", dict(model_type="swin"), "does not compute .*'swin'"),
  ],
)
def test_what_a_vit_does_not_compute_is_refused(
  tmp_path, family, changes, message
):
  values = json.loads((VISION / family / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(values | changes))
  with pytest.raises(settings.ConfigError, match=message):
    opened(tmp_path)


def test_a_contradiction_is_an_error(tmp_path):
  shutil.copytree(VISION / "vit", tmp_path / "vit")
  model = opened(tmp_path / "vit").clone(norm_eps=1e-3)
  with pytest.raises(settings.ConfigError, match="norm_eps=0.001, but config"):
    warm_start.check_published(str(tmp_path / "vit"), vit, model)
