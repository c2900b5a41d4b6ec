"""Adafactor: against T5X and optax, and on stacked layers."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.small_training import assert_close, make, train, tree
from support import rounding

from bigtrain.arrays import trees
from bigtrain.optim import views

pytestmark = pytest.mark.golden


def golden():
  path = pathlib.Path(__file__).parents[1] / "golden" / "t5x_adafactor.py"
  spec = importlib.util.spec_from_file_location("t5x_adafactor", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def separate(flat):
  """{"blocks_i/...": layer} of {"blocks/...": stacked layers}."""
  result = {}
  for name, value in flat.items():
    if name.startswith("blocks/"):
      rest = name.removeprefix("blocks/")
      result |= {f"blocks_{i}/{rest}": x for i, x in enumerate(value)}
    else:
      result[name] = value
  return result


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("scan", [True, False])
def test_parameters_equal_those_of_t5x(scan, momentum):
  """The golden parameters were trained by T5X's own file, on its layout."""
  module = golden()

  def arrays(step):
    flat = {n: jnp.asarray(module.array(n, step)) for n in module.PARAMS}
    return trees.from_flat(flat if scan else separate(flat))

  params = arrays(0)
  param_views = {
    name: views.default(name, x.shape, stack=int(name.startswith("blocks/")))
    for name, x in trees.flatten_with_names(params)
  }
  optimizer = make(
    params,
    param_views=param_views,
    lr=module.LR,
    optimizer=dict(
      name="adafactor",
      momentum=momentum,
      min_dim_size_to_factor=module.MIN_DIM_SIZE_TO_FACTOR,
    ),
  )

  @jax.jit
  def trained(steps):
    return train(optimizer, steps[0], module.NUM_STEPS, lambda i: steps[i])[0]

  kind = "momentum/" if momentum else "plain/"
  with np.load(module.PATH) as file:
    expected = {
      n.removeprefix(kind): file[n] for n in file.files if n.startswith(kind)
    }
  expected = trees.from_flat(expected if scan else separate(expected))
  steps = [arrays(step) for step in range(module.NUM_STEPS + 1)]
  rounding.assert_close(trained, steps, expected)


@pytest.mark.parametrize(
  "momentum", [None, pytest.param(0.9, marks=pytest.mark.slow)]
)
def test_whole_parameters_train_as_in_optax(momentum):
  """With view="parameters", to continue runs that were started so."""
  options = dict(min_dim_size_to_factor=8, momentum=momentum)
  optimizer = make(
    optimizer=dict(name="adafactor", view="parameters", **options), lr=0.1
  )
  trained, state = train(optimizer, tree(0), 4)
  tx = optax.adafactor(0.1, **options)
  expected = tree(0)
  expected_state = tx.init(expected)
  for step in range(4):
    updates, expected_state = tx.update(
      tree(step + 1), expected_state, expected
    )
    expected = optax.apply_updates(expected, updates)
  # The same operations, with and without fused multiply-add.
  rtol = rounding.ROUNDINGS * rounding.EPSILON
  assert_close(trained, expected, rtol=rtol, atol=1e-7)
  assert trees.names(state) == trees.names(expected_state)
  assert_close(state[0], expected_state[0], rtol=rtol)


def test_factors_have_the_rows_and_columns_of_the_view():
  params = {"blocks": {"query": {"kernel": jnp.ones((3, 8, 2, 16))}}}
  view = {"blocks/query/kernel": views.View((0,), (1,), (2, 3))}
  for name, arrays, row, column in (
    ("adafactor", None, (3, 8), (3, 2, 16)),
    ("adafactor", "layers", (3, 8, 2), (3, 2, 16)),
    ("big_vision_adafactor", None, (3, 8, 2), (3, 2, 16)),
  ):
    options = dict(name=name, min_dim_size_to_factor=8)
    if arrays:
      options["view"] = arrays
    optimizer = make(params, param_views=view, optimizer=options)
    state = jax.eval_shape(optimizer.tx.init, params)[0]
    shapes = [t["blocks"]["query"]["kernel"].shape for t in state[1:]]
    assert shapes == [row, column, (1,)]
