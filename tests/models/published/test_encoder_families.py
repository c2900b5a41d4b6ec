"""BERTs, BiT, ConvNeXt and Swin against transformers: golden/published_vision.

golden/make_published_vision.py made the folders: small models, their outputs,
and the gradients of the sum of these times fixed weights.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN, placed, shapes_of
from support import rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.models import text_transformer, two_towers
from bigtrain.objective import building, published_sizes

pytestmark = pytest.mark.golden

VISION = GOLDEN / "published_vision"
MODELS = {
  "bert": "text_transformer",
  "roberta": "text_transformer",
  "bit": "resnet",
  **dict.fromkeys(("convnext", "convnextv2"), "convnext"),
  **dict.fromkeys(("swin", "swinv2"), "swin"),
}
KINDS = {
  path.name: json.loads((path / "config.json").read_text()).get("model_type")
  for path in sorted(VISION.iterdir())
}
FAMILIES = [name for name, kind in KINDS.items() if kind in MODELS]


def opened(family, **options):
  folder = VISION / family
  config = settings.Config(
    dict(
      model_name=MODELS[KINDS[family]],
      model=dict(published=str(folder), **options),
    )
  )
  return building.model(published_sizes.with_published_sizes(config))


def reference(family):
  with np.load(VISION / family / "reference.npz") as file:
    values = dict(file)
  if "input_ids" in values:
    types = jnp.asarray(values["token_type_ids"])
    inputs = dict(text=jnp.asarray(values["input_ids"]), types=types)
  else:
    inputs = dict(image=values["pixel_values"].transpose(0, 2, 3, 1))
  return inputs, values


def params_of(module, model, inputs, path, devices=1):
  like = placed(shapes_of(model, **inputs)["params"], devices)
  convert = module.from_published
  return warm_start.load_params(str(path), like, convert=convert)[0]


def outputs_of(model, params, inputs, expected):
  """The outputs of transformers' model, by its names."""
  y, out = model.apply({"params": params}, **inputs)
  encoded = out["encoded"]
  if np.ndim(expected.get("last_hidden_state")) == 4:
    encoded = encoded.transpose(0, 3, 1, 2)
  results = {"logits": y, "pooler_output": y, "last_hidden_state": encoded}
  return {
    name: value.reshape(expected[name].shape)
    for name, value in results.items()
    if name in expected
  }


FAST = ("bert", "bit", "convnextv2", "swinv2")
STACKED = ("bert_mlm", "roberta")


@pytest.mark.parametrize(
  ("family", "scan"),
  [
    pytest.param(
      name, scan, marks=() if name in FAST and not scan else pytest.mark.slow
    )
    for name in FAMILIES
    for scan in (False, True)
    if not scan or name in STACKED
  ],
)
def test_outputs_and_gradients(family, scan):
  module, model = opened(family, **{"scan": True} if scan else {})
  inputs, expected = reference(family)
  folder = VISION / family

  def total(params):
    outputs = outputs_of(model, params, inputs, expected)
    weighted = [
      jnp.sum(value * expected[f"weight of {name}"])
      for name, value in outputs.items()
    ]
    return sum(weighted), outputs

  def used(outputs):
    """Without those of padding, which nobody reads."""
    weights = {n: expected[f"weight of {n}"] for n in outputs}
    return {n: x * (weights[n] != 0) for n, x in outputs.items()}

  @jax.jit
  def run(params):
    grads, outputs = jax.grad(total, has_aux=True)(params)
    return {"grads": grads, "outputs": used(outputs)}

  params = params_of(module, model, inputs, folder, devices=8)
  names = [name for name in expected if f"weight of {name}" in expected]
  gradients = folder / "gradients.safetensors"
  published = {
    "grads": params_of(module, model, inputs, gradients),
    "outputs": used({name: expected[name] for name in names}),
  }
  rounding.assert_close(run, params, published)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_arrays_and_config_are_those_of_the_folder(family):
  module, model = opened(family)
  inputs, _ = reference(family)
  folder = VISION / family
  loaded = params_of(module, model, inputs, folder)
  params = dict(trees.flatten_with_names(loaded))
  shapes = {name: x.shape for name, x in params.items()}
  config, tensors = module.to_published(model, shapes)
  arrays = safetensors_files.read(str(folder))
  assert {tensor.name for tensor in tensors} == set(arrays)
  for tensor in tensors:
    pieces = [np.asarray(params[name])[index] for name, index in tensor.parts]
    value = tensor.build(pieces)
    assert value.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(value, arrays[tensor.name], tensor.name)
  published = json.loads((folder / "config.json").read_text())
  assert len(set(config) & set(published)) >= 6
  # An initial value says nothing of trained models.
  for key in set(config) & set(published) - {"layer_scale_init_value"}:
    assert config[key] == published[key], key


def test_a_bert_is_a_text_tower():
  """Its arrays are below txt/, and its features are those of the file."""
  family = "bert"
  inputs, expected = reference(family)
  text = dict(post_norm=True, token_types=2, max_len=9, pad_id=0, depth=2)
  text |= dict(mlp="gelu_erf", norm_eps=1e-12, pool_type="first", rep_size=True)
  text |= dict(width=16, mlp_dim=24, num_heads=2, vocab_size=41)
  model = two_towers.Model(
    image=dict(variant="mu/4"), text=text, out_dim=(16, None)
  )
  tokens = dict(text=inputs["text"])
  init = lambda key: model.init(key, jnp.zeros((1, 8, 8, 3)), **tokens)
  like = jax.eval_shape(init, jax.random.key(0))["params"]
  source = dict(path=str(VISION / family), rename=[("(.*)", r"txt/\1")])
  source["allow_missing"] = ["img/.*", "t", "b"]
  warm_start.check_published(source, two_towers, model)
  flat = safetensors_files.read(str(VISION / family))
  loaded = two_towers.from_published(
    {f"txt/{name}": x for name, x in flat.items()},
    dict(trees.flatten_with_names(like)),
  )
  params = {n.removeprefix("txt/"): np.asarray(loaded[n][...]) for n in loaded}
  tower = text_transformer.Model(**text)
  y, _ = tower.apply({"params": trees.from_flat(params)}, **inputs)
  close = dict(rtol=0, atol=1e-5)
  np.testing.assert_allclose(y, expected["pooler_output"], **close)
