"""Adapters of every kind of model, and bases in 8 and 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.scipy.special import ndtri
from support import cases, random_variables, rounding

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import block_quantization, lora
from bigtrain.objective import building, trained_adapters

_IDS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
_IMAGE = np.linspace(-1, 1, 2 * 8 * 8 * 3, dtype=np.float32)
_VIT = dict(
  num_classes=3, width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(4, 4)
)
_DECODER = dict(vocab_size=31, width=16, depth=2, num_heads=2, mlp_dim=24)
_T5 = dict(vocab_size=31, width=16, num_heads=2, head_dim=8, mlp_dim=24)
_EXPERTS = dict(num_experts=4, top_k=2, capacity_factor=None)
MODELS = {
  "vit": ("vit", _VIT, [_IMAGE.reshape(2, 8, 8, 3)]),
  "vit_scan": ("vit", _VIT | dict(scan=True), [_IMAGE.reshape(2, 8, 8, 3)]),
  "t5": ("t5", _T5 | dict(depth=2, scan=True), [_IDS, _IDS]),
  "llama": ("decoder", _DECODER | dict(variant="llama"), [_IDS]),
  "experts": (
    "decoder",
    _DECODER | dict(variant="llama", scan=True, moe=_EXPERTS),
    [_IDS],
  ),
}


def made(name, **options):
  """(config, model, random variables, inputs)."""
  model_name, fields, inputs = MODELS[name]
  targets = r".*(query|value|up|gate|down|Dense_\d|head|router)/kernel"
  adapters = dict(targets=targets, rank=2, alpha=3) | options
  config = dict(model_name=model_name, model=fields, adapters=adapters)
  _, model = building.model(settings.Config(config))
  return config, model, random_variables.of(model, *inputs, std=0.2), inputs


@pytest.mark.parametrize(
  "dora", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", cases.quick(MODELS, "vit", "llama", "experts"))
def test_any_model_computes_what_the_merged_one_does(name, dora):
  config, model, variables, inputs = made(name, dora=dora)
  apply = jax.jit(lambda variables: model.apply(variables, *inputs)[0])
  want = apply(variables)
  lora.check(model)  # Every target was used.
  plain = trained_adapters.Adapted.of(trained_adapters.plain(config)).model

  @jax.jit
  def run(variables):
    merged = trained_adapters.merged(config, variables)
    params = traverse_util.unflatten_dict(merged, sep="/")
    return [plain.apply({"params": params}, *inputs)[0]]

  rounding.assert_close(run, variables, [want])
  scale = np.abs(want).max()
  off = apply(lora.reference(variables))
  assert np.abs(off - want).max() / scale > 1e-3


def test_only_adapters_and_what_trains_in_full_are_parameters():
  _, model, variables, inputs = made("vit", train=["head/bias", "cls"][:1])
  names = set(traverse_util.flatten_dict(variables["params"], sep="/"))
  assert "head/bias" in names
  assert {n.rpartition("/")[2] for n in names} == {"bias", "lora_a", "lora_b"}
  base = traverse_util.flatten_dict(variables["base"], sep="/")
  assert "head/kernel" in base and "head/bias" not in base
  loss = lambda params: jnp.sum(
    model.apply({**variables, "params": params}, *inputs)[0] ** 2
  )
  grads = jax.jit(jax.grad(loss))(variables["params"])
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_initial_factors():
  _, fields, inputs = MODELS["llama"]
  adapters = dict(targets=".*up/kernel", rank=64)
  config = dict(model_name="decoder", model=fields, adapters=adapters)
  _, model = building.model(settings.Config(config))
  init = lambda key: model.init(key, *inputs)["params"]["blocks_0"]["mlp"]["up"]
  up = jax.jit(init)(jax.random.key(0))
  # kaiming_uniform_ with a = sqrt(5) is uniform up to 1 / sqrt(inputs).
  bound = 1 / np.sqrt(16)
  assert 0.9 * bound < np.abs(up["lora_a"]).max() <= bound
  np.testing.assert_allclose(np.std(up["lora_a"]), bound / np.sqrt(3), rtol=0.1)
  assert not np.any(up["lora_b"])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(targets=[]), "config.adapters.targets: expected the names"),
    (dict(targets=None), "config.adapters.targets: expected the names"),
    (dict(alpha=0), "config.adapters.alpha: expected a number above 0"),
    (dict(dora="no"), "config.adapters.dora: expected True or False"),
    (dict(rank=[("x", 4)]), "config.adapters: .*'x', 4.* no match for 'block"),
    (dict(alpha=[("x", 4)]), "config.adapters: .*'x', 4.* no match for 'block"),
    (dict(double_quantization=True), "double_quantization: the base is not"),
  ],
)
def test_mistakes_are_told(change, message):
  _, fields, inputs = MODELS["llama"]
  adapters = dict(targets=".*up/kernel", rank=2) | change
  config = dict(model_name="decoder", model=fields, adapters=adapters)
  with pytest.raises(ConfigError, match=message):
    _, model = building.model(settings.Config(config))
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    jax.eval_shape(model.apply, variables, *inputs)


def test_kernels_alone_are_quantized():
  _, fields, inputs = MODELS["llama"]
  adapters = dict(targets=".*up/kernel", rank=2, base="int8", quantized=".*")
  config = dict(model_name="decoder", model=fields, adapters=adapters)
  _, model = building.model(settings.Config(config))
  variables = jax.jit(lambda key: model.init(key, *inputs))(jax.random.key(0))
  assert np.isfinite(jax.jit(model.apply)(variables, *inputs)[0]).all()


def test_a_kernel_that_no_dense_layer_has_is_refused():
  _, fields, inputs = MODELS["vit"]
  adapters = dict(targets=r"embedding/kernel", rank=2)
  config = dict(model_name="vit", model=fields, adapters=adapters)
  _, model = building.model(settings.Config(config))
  with pytest.raises(ConfigError, match="embedding"):
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    jax.eval_shape(model.apply, variables, *inputs)
    lora.check(model)


def test_dropout_is_of_what_the_adapters_read():
  _, model, variables, inputs = made("llama", dropout=0.5)
  run = lambda key: model.apply(
    variables, *inputs, train=True, rngs={"dropout": jax.random.key(key)}
  )[0]
  assert np.abs(run(0) - run(1)).max() > 1e-4
  np.testing.assert_array_equal(run(0), run(0))
  _, model, variables, inputs = made("llama")
  np.testing.assert_array_equal(run(0), run(1))


def test_the_values_of_nf4_are_quantiles():
  # The paper's: 8 quantiles above 0 and 7 below, from this probability on.
  offset = 0.9677083
  above = ndtri(np.linspace(offset, 0.5, 9)[:-1])
  below = -ndtri(np.linspace(offset, 0.5, 8)[:-1])
  values = np.sort(np.concatenate([above, below, [0.0]]))
  np.testing.assert_allclose(
    block_quantization.NF4, values / values.max(), atol=2e-6
  )


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", block_quantization.KINDS)
def test_blocks_keep_values_to_half_a_step(kind, double):
  x = jax.random.normal(jax.random.key(0), (3, 10, 33))
  stack = block_quantization.quantize(x, kind, double=double, stacked=1)
  one = block_quantization.quantize(x[1], kind, double=double)
  got = jax.tree.map(lambda leaf: leaf[1], stack).dequantized()
  np.testing.assert_array_equal(got, one.dequantized())
  error = np.abs(got - x[1]).reshape(-1)
  largest = np.abs(np.pad(np.asarray(x[1]).reshape(-1), (0, 54)))
  scale = np.repeat(largest.reshape(-1, 64).max(axis=1), 64)[:330]
  steps = np.diff(block_quantization.NF4).max()
  half = 0.5 / 127 if kind == "int8" else steps / 2
  slack = 0.02 if double else 1e-6
  assert np.all(error <= (half + slack) * scale)
  if not double:
    assert np.all(np.abs(got).reshape(-1).max() == np.abs(x[1]).max())
