"""Base optimizers: all of optax's by name, their state and their errors."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.small_training import (
  LOSS,
  MUON,
  SHAPES,
  assert_close,
  make,
  train,
  tree,
)
from support import cases

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.optim import optimizers, views, wrappers


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize(
  "name",
  cases.quick(
    sorted(optimizers.constructors()),
    *("adafactor", "adamw", "big_vision_adafactor", "galore", "lamb", "lion"),
    *("muon", "nadam", "prodigy", "scale_by_adam", "sgd"),
  ),
)
def test_updates_equal_those_of_the_optimizer_with_its_own_learning_rate(name):
  """Applying config.lr last equals optax's own learning_rate argument."""
  constructor = optimizers.constructors()[name]
  parameters = inspect.signature(constructor).parameters
  params = {"a": {"kernel": jnp.full((3, 4), 0.5)}, "b": jnp.ones(4)}

  def grads(step):
    noise = jax.random.normal(jax.random.key(step), (3, 4))
    return {"a": {"kernel": noise + 0.5}, "b": jnp.asarray(noise[0]) + 0.5}

  # Moments in float32, because optax rounds bfloat16 moments differently.
  float32 = {k: jnp.float32 for k in parameters if k == "dtype_momentum"}
  optimizer = make(params, lr=0.05, optimizer=dict(name=name, **float32))
  trained, _ = train(optimizer, params, 4, grads)
  if "learning_rate" not in parameters:  # The updates must point downhill.
    slope = sum(
      jnp.sum((g - p) * d)
      for g, p, d in zip(*map(jax.tree.leaves, (trained, params, grads(4))))
    )
    assert slope < 0
    return
  if name == "adafactor":  # Without stacks and attention it is optax's.
    constructor = optax.adafactor
  elif name == "big_vision_adafactor":
    shapes = {"a/kernel": (3, 4), "b": (4,)}
    float32["views"] = views.seen(
      {n: views.default(n, shape) for n, shape in shapes.items()},
      shapes,
      "layers",
    )
  kwargs = dict(learning_rate=0.05, **float32)
  kwargs |= {
    k: 0.0
    for k in ("weight_decay", "adam_weight_decay")
    if k in parameters and parameters[k].default is not None
  }
  tx = optax.with_extra_args_support(constructor(**kwargs))
  expected, state = params, tx.init(params)
  for step in range(4):
    updates, state = tx.update(grads(step + 1), state, expected, value=LOSS)
    expected = optax.apply_updates(expected, updates)
  assert_close(trained, expected, rtol=1e-5, atol=1e-6)


def test_variants_of_adam_have_the_same_state_names():
  expected = ["0/count"] + [f"0/{m}/{n}" for m in ("mu", "nu") for n in SHAPES]
  for name in ("adam", "adamw", "scale_by_adam", "nadam", "lamb"):
    optimizer = make(optimizer=dict(name=name))
    state = jax.eval_shape(optimizer.tx.init, tree(0))
    assert sorted(trees.names(state)) == sorted(expected)


def test_moments_have_the_dtype_of_the_config():
  for name, kwarg, field in (
    ("adam", "mu_dtype", "0/mu"),
    ("lion", "mu_dtype", "0/mu"),
    ("sgd", "accumulator_dtype", "0/trace"),
    ("big_vision_adafactor", "dtype_momentum", "2/ema"),
  ):
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    for dtype in ("bfloat16", "float32"):
      optimizer = make(optimizer={"name": name, kwarg: dtype, **momentum})
      state = jax.eval_shape(optimizer.tx.init, tree(0))
      moments = [
        leaf
        for leaf_name, leaf in trees.flatten_with_names(state)
        if leaf_name.startswith(field + "/")
      ]
      assert len(moments) == len(SHAPES)
      assert {leaf.dtype for leaf in moments} == {jnp.dtype(dtype)}


def test_adafactor_stores_rows_and_columns_of_second_moments():
  optimizer = make(
    optimizer=dict(name="big_vision_adafactor", min_dim_size_to_factor=8)
  )
  state = jax.eval_shape(optimizer.tx.init, tree(0))
  shapes = {n: leaf.shape for n, leaf in trees.flatten_with_names(state)}
  assert shapes["0/v_row/body/dense/kernel"] == (8,)
  assert shapes["0/v_col/body/dense/kernel"] == (16,)
  assert shapes["0/v/body/dense/kernel"] == (1,)
  assert shapes["0/v/embedding"] == (3, 8)
  assert shapes["2/ema/body/dense/kernel"] == (8, 16)


def test_muon_updates_stacked_matrices_by_name():
  optimizer = make(optimizer=MUON)
  names = trees.names(jax.eval_shape(optimizer.tx.init, tree(0)))
  inner = "inner_states"
  assert f"{inner}/muon/inner_state/0/mu/body/stack/kernel" in names
  assert f"{inner}/adam/inner_state/0/nu/head/kernel" in names
  assert f"{inner}/adam/inner_state/0/nu/body/stack/kernel" not in names
  # The update of each stacked matrix is orthogonal.
  _, state = train(optimizer, tree(0), 1)
  params = tree(0)
  updates, _ = optimizer.tx.update(tree(1), state, params, step=0)
  values = np.linalg.svd(updates["body"]["stack"]["kernel"], compute_uv=False)
  assert values.shape == (2, 8)
  assert np.all((values > 0.1 * 0.4) & (values < 0.1 * 1.4))


@pytest.mark.parametrize(
  "config, message",
  [
    (dict(optimizer={}), "config.optimizer.name: unknown optimizer ''"),
    (
      dict(optimizer=dict(name="big_vison_adafactor")),
      "'big_vison_adafactor'. Did you mean 'big_vision_adafactor'?",
    ),
    (
      dict(optimizer=dict(name="adam", eps_rot=0.9)),
      "config.optimizer.eps_rot: unknown key. Did you mean 'eps_root'?",
    ),
    (
      dict(optimizer=dict(name="adamw", weight_decay=0.1)),
      "config.optimizer.weight_decay: use config.wd instead.",
    ),
    (
      dict(optimizer=dict(name="adam", learning_rate=0.1)),
      "config.optimizer.learning_rate: use config.lr instead.",
    ),
    (
      dict(optimizer=dict(name="adam", mu_dtype="bfloat")),
      "mu_dtype: unknown dtype 'bfloat'. Did you mean 'bfloat16'?",
    ),
    (
      dict(optimizer=dict(name="lbfgs")),
      "'lbfgs' is not supported: it evaluates",
    ),
    (dict(optimizer="adam"), "config.optimizer: expected a dict"),
    (
      dict(optimizer=dict(name="muon", preconditioning="x", ns_coeffs="y")),
      "config.optimizer: muon rejects",
    ),
    (
      dict(
        optimizer=dict(name="muon", muon_weight_dimension_numbers=[(".*", 0)])
      ),
      "expected a list of (regex, input dimensions, output dimensions)",
    ),
    (
      dict(
        optimizer=dict(
          name="muon", muon_weight_dimension_numbers=[("head/kernel", 0, 2)]
        )
      ),
      "numbers[0]: expected different dimensions of head/kernel, which has",
    ),
    (
      dict(
        optimizer=dict(
          name="muon", muon_weight_dimension_numbers=[("head/kernel", 1, -1)]
        )
      ),
      "numbers[0]: expected different dimensions of head/kernel, which has",
    ),
    (
      dict(optimizer=dict(name="muon", consistent_rms=-0.2)),
      "config.optimizer.consistent_rms: expected a number above 0, got -0.2",
    ),
    (
      dict(optimizer=dict(name="adam", b2=1.5)),
      "config.optimizer.b2: expected a number at least 0 and below 1, got 1.5",
    ),
    (
      dict(
        optimizer=dict(name="muon"),
        schedule=[
          ("embedding", dict(decay_type="constant")),
          (".*", None),
        ],
      ),
      "no trainable parameter is a hidden layer's matrix",
    ),
  ],
)
def test_mistakes_in_config_optimizer_are_explained(config, message):
  with pytest.raises(ConfigError) as e:
    make(**config)
  assert message in str(e.value)
  assert "\n" not in str(e.value)


def test_optimizers_of_users_by_dotted_path():
  expected, _ = train(
    make(optimizer=dict(name="sgd", momentum=0.5)), tree(0), 3
  )
  for spec in (
    dict(name="optim.own_parts.descent", momentum=0.5),
    dict(name="optim.own_parts.rated", momentum=0.5),
    dict(name="optim.own_parts.rated", momentum=0.5, lr_inside=True),
  ):
    trained, _ = train(make(optimizer=spec), tree(0), 3)
    assert_close(trained, expected, rtol=1e-5, atol=1e-6)
  signs = make(optimizer=dict(name="optim.own_parts.scale_by_signs"))
  trained, _ = train(signs, tree(0), 1)
  step = jax.tree.map(lambda p, g: p - 0.1 * jnp.sign(g), tree(0), tree(1))
  assert_close(trained, step, rtol=1e-6)
  for name, message in {
    "optim.own_parts.decent": "has no 'decent'. Did you mean 'descent'",
    "optim.own_part.descent": "cannot import 'optim.own_part'",
    "optim.own_parts.NUMBER": "expected a function .* a int",
    "optim.own_parts.no_transformation": "returned 3",
  }.items():
    with pytest.raises(
      ConfigError, match=f"config.optimizer.name: .*{message}"
    ):
      make(optimizer=dict(name=name))
  with pytest.raises(ConfigError, match="momentm: unknown key. Did you mean"):
    make(optimizer=dict(name="optim.own_parts.descent", momentm=0.5))


def test_every_optimizer_of_optax_contrib_runs_or_is_refused_with_a_reason():
  names = {
    name
    for name, fn in vars(optax.contrib).items()
    if inspect.isfunction(fn) and "eval_params" not in name
  }
  parts = {"hutchinson_estimator_diag_hessian", "normalize"}
  known = {*optimizers.constructors(), *optimizers.REFUSED, *wrappers.NAMES}
  assert names - parts <= known
