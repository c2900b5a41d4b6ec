"""Each family of ViTs against transformers or timm: golden/published_vision.

golden/make_published_vision.py and make_timm.py made the folders: small models,
their outputs, and the gradients of the sum of these times fixed weights.
"""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN, placed, shapes_of
from support import cases, rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import two_towers, vit
from bigtrain.models.published import timm, vit_families
from bigtrain.objective import building, published_sizes

pytestmark = pytest.mark.golden

VISION = GOLDEN / "published_vision"
TWO_TOWERS = ("clip", "siglip", "siglip2")
KNOWN = (*vit_families.FAMILIES, *TWO_TOWERS)


def kind_of(folder):
  values = json.loads((folder / "config.json").read_text())
  return values.get("model_type", timm.MODEL_TYPE)


ALL = [x.name for x in sorted(VISION.iterdir()) if kind_of(x) in KNOWN]
FAMILIES = [name for name in ALL if name not in TWO_TOWERS]


def opened(folder, **options):
  model = dict(published=str(folder), **options)
  name = "two_towers" if kind_of(folder) in TWO_TOWERS else "vit"
  config = settings.Config(dict(model_name=name, model=model))
  return building.model(published_sizes.with_published_sizes(config))[1]


def like_of(model, devices=1):
  inputs = {"image": jnp.zeros((1, 16, 16, 3))}
  if isinstance(model, two_towers.Model):
    inputs["text"] = jnp.zeros((1, 6), jnp.int32)
  return placed(shapes_of(model, **inputs)["params"], devices)


def params_of(model, path):
  convert = module_of(model).from_published
  return warm_start.load_params(str(path), like_of(model), convert=convert)[0]


def module_of(model):
  return two_towers if isinstance(model, two_towers.Model) else vit


def reference(family):
  with np.load(VISION / family / "reference.npz") as file:
    values = dict(file)
  values["image"] = values["pixel_values"]
  if "spatial_shapes" not in values:
    values["image"] = values["image"].transpose(0, 2, 3, 1)
  return values


def layout_of(family):
  """None for the first that fits, of transformers."""
  if not family.startswith("timm"):
    return None
  return "timm_swiglu" if family == "timm_swiglu" else "timm"


def outputs_of(model, params, image):
  """The outputs of transformers' model, by its names."""
  y, out = model.apply({"params": params}, image)
  return {"last_hidden_state": out["encoded"], "pooler_output": y}


def embeddings_of(model, params, expected):
  """The outputs of transformers' models of two towers, by its names."""
  shapes = expected.get("spatial_shapes")
  image, text, out = model.apply(
    {"params": params}, expected["image"], expected["input_ids"], shapes=shapes
  )
  logits = out["t"] * text @ image.T + out.get("b", 0.0)
  return dict(image_embeds=image, text_embeds=text, logits_per_text=logits)


# What differs most from the others is in `make test`.
QUICK = (
  *("beit", "dinov2_swiglu", "dinov2_with_registers", "dinov3_gated"),
  *("timm_clip", "timm_registers", "vit"),
)


@pytest.mark.parametrize("family", cases.quick(FAMILIES, *QUICK))
def test_features(family):
  folder = VISION / family
  model = opened(folder)
  expected = reference(family)
  wanted = {"last_hidden_state": expected["last_hidden_state"][:, -16:]}
  if "pooler_output" in expected:
    wanted["pooler_output"] = expected["pooler_output"]

  @jax.jit
  def run(params):
    outputs = outputs_of(model, params, expected["image"])
    return {name: outputs[name] for name in wanted}

  rounding.assert_close(run, params_of(model, folder), wanted)


def test_deit_3_by_the_names_of_its_authors(tmp_path):
  """Theirs differ from timm's in the layer scales, see docs/checkpoints.md."""
  folder = VISION / "timm_deit3"
  model, expected = opened(folder), reference("timm_deit3")
  arrays = safetensors_files.read(str(folder))
  theirs = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", n): arrays[n] for n in arrays}
  assert theirs.keys() >= {"blocks.0.gamma_1", "blocks.1.gamma_2"}
  file = tmp_path / "deit_3_small_224_21k.safetensors"
  specs = {n: (x.shape, x.dtype.name) for n, x in theirs.items()}
  safetensors_files.write(str(file), specs, theirs.values(), {})
  rename = [(r"(.*)\.gamma_(\d)", r"\1.ls\2.gamma")]
  source = dict(path=str(file), rename=rename)
  params, _ = warm_start.load_params(
    source, like_of(model), convert=vit.from_published
  )
  run = jax.jit(lambda p: [model.apply({"params": p}, expected["image"])[0]])
  rounding.assert_close(run, params, [expected["pooler_output"]])


@pytest.mark.parametrize("family", cases.quick(TWO_TOWERS, "clip", "siglip2"))
def test_embeddings_logits_and_their_gradients(family):
  folder = VISION / family
  model = opened(folder)
  expected = reference(family)

  def total(params):
    outputs = embeddings_of(model, params, expected)
    weighted = [
      jnp.sum(value * expected[f"weight of {name}"])
      for name, value in outputs.items()
    ]
    return sum(weighted), outputs

  @jax.jit
  def run(params):
    grads, outputs = jax.grad(total, has_aux=True)(params)
    return {"grads": grads, "outputs": outputs}

  names = ("image_embeds", "text_embeds", "logits_per_text")
  gradients = params_of(model, folder / "gradients.safetensors")
  published = {
    "grads": gradients,
    "outputs": {name: expected[name] for name in names},
  }
  rounding.assert_close(run, params_of(model, folder), published)


@pytest.mark.parametrize(
  "family", cases.quick(FAMILIES, "beit", "dinov3_gated")
)
def test_gradients_of_stacked_layers(family):
  folder = VISION / family
  model = opened(folder, scan=True)
  expected = reference(family)

  def total(params):
    outputs = outputs_of(model, params, expected["image"])
    # The class token's features are the pooled ones, before a tanh layer.
    total = 0.0
    if "weight of pooler_output" in expected:
      weight = expected["weight of pooler_output"]
      total = jnp.sum(outputs["pooler_output"] * weight)
    hidden = expected["weight of last_hidden_state"][:, -16:]
    return total + jnp.sum(outputs["last_hidden_state"] * hidden)

  # MAE's positions are fixed.
  without = ["pos_embedding"] if family == "vit_mae" else []
  trained = lambda tree: {n: x for n, x in tree.items() if n not in without}
  run = jax.jit(lambda params: trained(jax.grad(total)(params)))
  published = params_of(model, folder / "gradients.safetensors")
  rounding.assert_close(run, params_of(model, folder), trained(published))


@pytest.mark.parametrize(
  ("family", "scan"),
  [
    pytest.param(name, scan, marks=pytest.mark.slow)
    if scan and name not in QUICK
    else (name, scan)
    for scan in (False, True)
    for name in (FAMILIES if scan else ALL)
  ],
)
def test_exported_arrays_and_config_are_those_of_the_folder(family, scan):
  folder = VISION / family
  model = opened(folder, **{"scan": True} if scan else {})
  params = dict(trees.flatten_with_names(params_of(model, folder)))
  shapes = {name: x.shape for name, x in params.items()}
  layout = layout_of(family)
  config, tensors = module_of(model).to_published(model, shapes, layout)
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
  # timm has several names of the same models.
  named = {"architecture", "model_args", "pretrained_cfg"}
  for key in set(config) & set(published) - initial - {"mlp_ratio"} - named:
    of_parts = isinstance(config[key], dict)
    read = published[key]
    if of_parts:
      read = {name: x for name, x in read.items() if name in config[key]}
    assert config[key] == read, key


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
    ("timm_gap", dict(architecture="vit_base_patch16_xp_224"), "none of the V"),
    ("timm_gap", dict(model_args=dict(qk_norm=True)), "qk_norm=True: unknown"),
    (
      "timm_augreg",
      dict(model_args=dict(reg_tokens=2)),
      "no_embed_class: expected true",
    ),
  ],
)
def test_what_a_vit_does_not_compute_is_refused(
  tmp_path, family, changes, message
):
  values = json.loads((VISION / family / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(values | changes))
  with pytest.raises(ConfigError, match=message):
    opened(tmp_path)


def test_a_contradiction_is_an_error(tmp_path):
  shutil.copytree(VISION / "vit", tmp_path / "vit")
  model = opened(tmp_path / "vit").clone(norm_eps=1e-3)
  with pytest.raises(ConfigError, match="norm_eps=0.001, but config"):
    warm_start.check_published(str(tmp_path / "vit"), vit, model)


def test_a_timm_export_has_the_nearest_architecture():
  """And the arguments in which it differs."""
  model = opened(VISION / "timm_augreg", posemb_grid=None)
  deit3 = dict(width=384, depth=12, num_heads=6, patch_size=16, mlp_dim=1536)
  model = model.clone(**deit3, posemb_class=False, layer_scale=0.1)
  init = lambda key: model.init(key, jnp.zeros((1, 64, 64, 3)))
  like = jax.eval_shape(init, jax.random.key(0))["params"]
  shapes = {n: x.shape for n, x in trees.flatten_with_names(like)}
  config, _ = vit.to_published(model, shapes, "timm")
  assert config["architecture"] == "deit3_small_patch16_224"
  assert config["model_args"] == {"num_classes": 3, "img_size": [64, 64]}
  assert config["pretrained_cfg"]["input_size"] == [3, 64, 64]


def test_a_timm_model_has_no_biases_of_patches_before_a_norm():
  model = opened(VISION / "timm_clip").clone(use_bias=True)
  shapes = {n: x.shape for n, x in trees.flatten_with_names(like_of(model))}
  with pytest.raises(ConfigError, match="biases of the patches, or"):
    vit.to_published(model, shapes, "timm")
