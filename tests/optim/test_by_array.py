"""Optimizers by array: stacked layers train like separate ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optim.small_training import assert_close, make, train
from support import cases

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.optim import views

SHAPES = {
  "blocks/attention/query/kernel": (8, 2, 8),
  "blocks/attention/query/bias": (2, 8),
  "blocks/mlp/kernel": (8, 12),
  "blocks/norm/scale": (8,),
  "head/kernel": (8, 5),
}
NUM_LAYERS = 3
OPTIMIZERS = {
  "adafactor": dict(min_dim_size_to_factor=8),
  "big_vision_adafactor": dict(min_dim_size_to_factor=3),
  "fromage": {},
  "galore": dict(rank=4),
  "lamb": {},
  "lars": {},
  "muon": {},
  "novograd": {},
  "scale_by_factored_rms": dict(min_dim_size_to_factor=8),
  "scale_by_param_block_norm": {},
  "scale_by_trust_ratio": {},
  "sm3": {},
}


def arrays(step, scan):
  """Layers of different sizes, stacked or separate."""
  flat = {}
  for name, shape in SHAPES.items():
    rng = np.random.default_rng([step, *name.encode()])
    values = rng.normal(size=(NUM_LAYERS, *shape))
    sizes = np.array([0.1, 1.0, 10.0]) ** (1 if step == 0 else -1)
    values *= sizes.reshape(-1, *[1] * len(shape))
    values = jnp.asarray(values, jnp.float32)
    if not name.startswith("blocks/"):
      flat[name] = values[0]
    elif scan:
      flat[name] = values
    else:
      rest = name.removeprefix("blocks/")
      flat |= {f"blocks_{i}/{rest}": x for i, x in enumerate(values)}
  return trees.from_flat(flat)


def optimizer_of(scan, **options):
  params = arrays(0, scan)
  param_views = {
    name: views.default(name, x.shape, stack=int(name.startswith("blocks/")))
    for name, x in trees.flatten_with_names(params)
  }
  return make(params, param_views=param_views, lr=0.01, optimizer=options)


def trained(scan, **options):
  grads = lambda step: arrays(step, scan)
  optimizer = optimizer_of(scan, **options)
  return train(optimizer, arrays(0, scan), 2, grads, jit=True)


@pytest.mark.parametrize("name", cases.quick(OPTIMIZERS, "lamb", "muon"))
def test_stacked_layers_train_like_separate_ones(name):
  options = dict(name=name, **OPTIMIZERS[name])
  params, state = trained(True, **options)
  expected, _ = trained(False, **options)
  stacks = params.pop("blocks")
  for i in range(NUM_LAYERS):
    params[f"blocks_{i}"] = jax.tree.map(lambda x, i=i: x[i], stacks)
  assert_close(params, expected, rtol=2e-4, atol=1e-6)
  # The state keeps the optimizer's own names, one for each stack.
  whole = make(arrays(0, True), optimizer=dict(options, view="parameters"))
  names = trees.names(whole.tx.init(arrays(0, True)))
  if name not in ("muon", "sm3"):  # These depend on the number of dimensions.
    assert trees.names(state) == names


@pytest.mark.parametrize("name", ["lamb", "adafactor", "lars"])
def test_whole_stacks_would_train_otherwise(name):
  """The layers differ in size, so a norm over all of them differs."""
  options = dict(name=name, **OPTIMIZERS[name])
  layers, _ = trained(True, **options)
  whole, _ = trained(True, **options, view="parameters")
  kernel = lambda params: params["blocks"]["mlp"]["kernel"]
  difference = jnp.abs(kernel(layers) - kernel(whole))
  moved = jnp.abs(kernel(layers) - kernel(arrays(0, True)))
  assert jnp.max(difference / moved) > 0.5
  # An array without a stack trains alike.
  np.testing.assert_allclose(
    layers["head"]["kernel"], whole["head"]["kernel"], rtol=1e-6
  )


def test_optimizers_of_all_parameters_together_have_no_layers():
  message = "optimizer.view: expected 'parameters', as .*max_dist"
  with pytest.raises(ConfigError, match=message):
    optimizer_of(True, name="dog", view="layers")
  with pytest.raises(ConfigError, match="unknown 'layer'. Did you mean"):
    optimizer_of(True, name="lamb", view="layer")
