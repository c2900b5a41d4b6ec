"""Views of parameters: defaults, and those of every model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optim.small_training import make, train

from bigtrain.arrays import trees
from bigtrain.config.settings import Config
from bigtrain.models.published import blocks
from bigtrain.objective import building
from bigtrain.optim import views

IMAGE = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
TEXT = jax.ShapeDtypeStruct((1, 6), jnp.int32)
VIT = dict(variant="mu/4", num_classes=10)
EXPERTS = dict(num_experts=4, every=2, shared_experts=1)
MODELS = {
  "vit": (dict(VIT, pool_type="map"), dict(image=IMAGE)),
  "text_transformer": (dict(variant="mu", vocab_size=20), dict(text=TEXT)),
  "decoder": (
    dict(variant="gpt2_mu", vocab_size=20, moe=EXPERTS),
    dict(tokens=TEXT),
  ),
  "t5": (
    dict(vocab_size=20, width=8, depth=2, num_heads=2, moe=EXPERTS),
    dict(inputs=TEXT, targets=TEXT),
  ),
  "cappa": (
    dict(variant="mu/4", vocab_size=20, max_len=6),
    dict(image=IMAGE, text=TEXT),
  ),
  "two_towers": (
    dict(image=dict(variant="mu/4"), text=dict(variant="mu", vocab_size=20)),
    dict(image=IMAGE, text=TEXT),
  ),
  "resnet": (dict(depth=50, num_classes=10, width=0.25), dict(image=IMAGE)),
}


def views_of(name, options, inputs):
  config = Config(dict(model_name=name, model=options))
  module, model = building.model(config)
  init = lambda **inputs: model.init(jax.random.key(0), **inputs)["params"]
  params = jax.eval_shape(init, **inputs)
  shapes = {n: x.shape for n, x in trees.flatten_with_names(params)}
  return shapes, views.of_model(module, model, params)


def arrays(shapes, param_views):
  """{(shape of an array, its rows, its columns, hidden): how many}."""
  counts = {}
  for name, view in param_views.items():
    shape, number = shapes[name], 1
    for d in view.stack:
      number *= shape[d]
    key = (
      tuple(shape[d] for d in view.rows),
      tuple(shape[d] for d in view.columns),
      view.hidden,
    )
    counts[key] = counts.get(key, 0) + number
  return counts


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"resnet"}))
def test_models_have_the_same_arrays_with_and_without_scan(name):
  options, inputs = MODELS[name]
  results = []
  for scan in (True, False):
    scanned = dict(options, scan=scan)
    if name == "two_towers":
      scanned = {k: dict(v, scan=scan) for k, v in options.items()}
    shapes, param_views = views_of(name, scanned, inputs)
    assert any(view.stack for view in param_views.values()) == (
      scan or "moe" in options
    )
    results.append(arrays(shapes, param_views))
  assert results[0] == results[1]
  hidden = [key for key in results[0] if key[0] and key[2]]
  assert all(len(rows + columns) <= 3 for rows, columns, _ in hidden)


def test_views_of_a_decoder_by_hand():
  options, inputs = MODELS["decoder"]
  _, param_views = views_of("decoder", dict(options, scan=True), inputs)
  expected = {
    "blocks/0/attention/query/kernel": views.View(
      (0,), (1,), (2, 3), heads=(2,)
    ),
    "blocks/0/attention/query/bias": views.View((0,), (), (1, 2), heads=(1,)),
    "blocks/0/attention/out/kernel": views.View((0,), (1, 2), (3,), heads=(1,)),
    "blocks/0/mlp/up/kernel": views.View((0,), (1,), (2,)),
    "blocks/1/moe/down/kernel": views.View((0, 1), (2,), (3,)),
    "blocks/1/moe/router/kernel": views.View((0,), (), (1, 2), False),
    "blocks/1/shared_experts/up/kernel": views.View((0,), (1,), (2,)),
    "norm/scale": views.View((), (), (0,)),
    "token_embedding": views.View((), (0,), (1,), False),
    "pos_embedding": views.View((), (0,), (1,), False),
  }
  assert {n: param_views[n] for n in expected} == expected


def test_first_and_last_layers_are_not_hidden():
  for name, outer in {
    "vit": {"embedding/kernel", "head/kernel", "pos_embedding"},
    "resnet": {"conv_root/kernel", "head/kernel"},
    "t5": {"token_embedding", "head/kernel"},
    "cappa": {"encoder/embedding/kernel", "decoder/LogitsDense/kernel"},
    "two_towers": {"img/embedding/kernel", "txt/Embed_0/embedding"},
  }.items():
    _, param_views = views_of(name, *MODELS[name])
    assert not any(param_views[param].hidden for param in outer)
    matrices = [v for v in param_views.values() if v.rows]
    assert sum(v.hidden for v in matrices) > len(matrices) / 2


def test_a_description_must_fit_the_shape():
  class Module:
    @staticmethod
    def param_dims(model):
      return {"kernel": "E; D -> H K"}

  params = {"kernel": jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)}
  with pytest.raises(
    ValueError, match=r"'kernel' .* has the shape \(2, 3, 4\)"
  ):
    views.of_model(Module, None, params)
  del Module.param_dims
  assert views.of_model(Module, None, params) == {
    "kernel": views.View((), (0, 1), (2,))
  }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "t5"])
def test_models_train_alike_with_and_without_scan(name):
  """Adafactor's clipping and scales act on each layer of the model."""
  options, inputs = MODELS[name]
  stacked, stacked_views = views_of(name, dict(options, scan=True), inputs)
  separate, separate_views = views_of(name, options, inputs)

  def arrays(step):
    """Layers of different sizes, stacked and separate."""
    flat = {}
    for number, (param, shape) in enumerate(stacked.items()):
      values = np.random.default_rng([step, number]).normal(size=shape)
      if param.count("blocks/"):
        sizes = 10.0 ** np.arange(len(values))
        values *= sizes.reshape(-1, *[1] * (len(shape) - 1)) ** -(step > 0)
      flat[param] = values.astype(np.float32)
    return flat, blocks.restack_blocks(flat, separate, block="blocks")

  results = []
  for scan, param_views in ((0, stacked_views), (1, separate_views)):
    grads = lambda step, scan=scan: trees.from_flat(arrays(step)[scan])
    optimizer = make(
      grads(0),
      param_views=param_views,
      optimizer=dict(name="adafactor", min_dim_size_to_factor=4),
    )
    trained, _ = train(optimizer, grads(0), 2, grads, jit=True)
    results.append(dict(trees.flatten_with_names(trained)))
  restacked = blocks.restack_blocks(results[0], separate, block="blocks")
  assert set(restacked) == set(separate)
  for param, value in restacked.items():
    np.testing.assert_allclose(
      value, results[1][param], rtol=1e-5, atol=1e-6, err_msg=param
    )
