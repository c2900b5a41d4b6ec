"""The chain from gradients to updates: each stage, and whole recipes."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.small_training import (
  ADAM,
  MUON,
  SHAPES,
  UNITS,
  assert_close,
  make,
  train,
  tree,
)
from support import cases

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.objective import gradients
from bigtrain.optim import chain, views


def golden():
  path = pathlib.Path(__file__).parents[1] / "golden" / "big_vision_optax.py"
  spec = importlib.util.spec_from_file_location("big_vision_optax", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.golden
@pytest.mark.parametrize("arithmetic", ["float32", "stored"])
@pytest.mark.parametrize("problem", golden().problems())
def test_recipes_give_the_parameters_of_big_vision(problem, arithmetic):
  """The golden parameters were trained by big_vision's own optimizer."""
  module = golden()
  config = module.problems()[problem]
  del config["optax_name"], config["optax"]
  optimizer_spec = config.pop("ours")
  optimizer_spec["moment_arithmetic"] = arithmetic

  def problem_tree(step):
    return trees.from_flat(
      {name: jnp.asarray(module.array(name, step)) for name in module.SHAPES}
    )

  units = Units(
    module.BATCH_SIZE,
    module.EXAMPLES_PER_EPOCH,
    total_steps=module.TOTAL_STEPS,
  )
  optimizer = make(problem_tree(0), units, optimizer=optimizer_spec, **config)
  args = (optimizer, problem_tree(0), module.NUM_STEPS, problem_tree)
  trained, _ = train(*args, jit=True)
  # Optax computes with bfloat16 moments, which makes 0.9 0.898.
  ours = "bfloat16" in problem and arithmetic == "float32"
  atol = 3e-3 if ours else 1e-6
  with np.load(module.PATH) as expected:
    for name, value in trees.flatten_with_names(trained):
      np.testing.assert_allclose(
        value, expected[f"{problem}/{name}"], rtol=1e-5, atol=atol, err_msg=name
      )


def test_eager_and_compiled_updates_agree_with_bfloat16_moments():
  optimizer = make(optimizer=dict(name="big_vision_adafactor"))
  eager, eager_state = train(optimizer, tree(0), 3)
  compiled, state = train(optimizer, tree(0), 3, jit=True)
  assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
  assert_close(state[0].v, eager_state[0].v, rtol=1e-5)


OPTIMIZERS = {
  "adam": dict(name="adam", mu_dtype="bfloat16"),
  "adamw": dict(name="adamw", b2=0.95),
  "lion": dict(name="lion"),
  "muon": MUON,
  "sgd": dict(name="sgd", momentum=0.9, nesterov=True),
  "adafactor": dict(name="adafactor", min_dim_size_to_factor=8),
  "big_vision_adafactor": dict(
    name="big_vision_adafactor", min_dim_size_to_factor=8
  ),
  "galore": dict(name="galore", rank=4, update_proj_gap=2),
  "lamb": dict(name="lamb"),
  "prodigy": dict(name="prodigy"),
  "scale_by_rms": dict(name="scale_by_rms"),
  "schedule_free": dict(name="schedule_free_adamw", b1=0.8),
}


@pytest.mark.parametrize(
  "name",
  cases.quick(OPTIMIZERS, "adam", "muon", "big_vision_adafactor", "galore"),
)
def test_sharded_and_resumed_training_agrees_with_one_device(name):
  optimizer = make(
    param_views={"body/stack/kernel": views.View((0,), (1,), (2,))},
    optimizer=OPTIMIZERS[name],
    wd=0.1,
    grad_clip_norm=1.0,
    schedule=dict(decay_type="cosine", warmup_steps=2),
  )

  @jax.jit
  def init():
    params = tree(0)
    return params, optimizer.tx.init(params)

  def update(state, grads, step, hparams):
    params, opt = state
    updates, opt = optimizer.tx.update(
      grads, opt, params, step=step, hparams=hparams
    )
    return optax.apply_updates(params, updates), opt

  single = init()
  single_step = jax.jit(update)
  for step in range(4):
    hparams = optimizer.hparams(step)
    single = single_step(single, tree(step + 1), step, hparams)

  mesh = sharding.make_mesh(replica=2, fsdp=4)
  shapes = jax.eval_shape(init)
  shardings, _ = sharding.state_shardings(
    shapes, mesh, [(".*", "fsdp(min_size=2)")]
  )
  replicated = sharding.replicated(mesh)
  sharded_step = jax.jit(
    update,
    in_shardings=(shardings, shardings[0], replicated, replicated),
    out_shardings=shardings,
  )
  state = jax.device_put(init(), shardings)
  # The test needs optimizer state that is split.
  assert any(not s.is_fully_replicated for s in jax.tree.leaves(shardings[1]))
  for step in range(4):
    if step == 2:  # Save and restore by name, as numpy arrays.
      saved = {
        leaf_name: np.asarray(leaf)
        for leaf_name, leaf in trees.flatten_with_names(state)
      }
      assert len(saved) == len(jax.tree.leaves(state))
      state = jax.device_put(
        trees.map_with_names(lambda n, _, saved=saved: saved[n], shapes),
        shardings,
      )
    hparams = optimizer.hparams(step)
    state = sharded_step(state, tree(step + 1), step, hparams)
  # Lion takes signs and Muon iterates, so rounding errors grow.
  assert_close(state[0], single[0], rtol=1e-4, atol=1e-4)
  for actual, expected in zip(
    jax.tree.leaves(state[1]), jax.tree.leaves(single[1])
  ):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(
      np.float32(actual), np.float32(expected), rtol=2e-2, atol=1e-3
    )


def test_adamw_matches_its_formula():
  """b1, b2 = 0.9, 0.99; kernels decay with the schedule, biases do not."""
  schedule = dict(decay_type="linear", warmup_steps=2)
  for coupling, factor in (("schedule", 1.0), ("lr", 0.01)):
    trained, _ = train(
      make(
        lr=0.01,
        wd=0.3,
        wd_coupling=coupling,
        schedule=schedule,
        optimizer=dict(name="adamw", b2=0.99),
      ),
      tree(0),
      5,
    )
    for name, value in trees.flatten_with_names(trained):

      def leaf(seed, name=name):
        return np.float64(dict(trees.flatten_with_names(tree(seed)))[name])

      p, m, v = leaf(0), 0.0, 0.0
      wd = 0.3 * factor if name.endswith("/kernel") else 0.0
      for t in range(1, 6):
        g = leaf(t)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        s = (0.0, 0.5, 1.0, 17 / 18, 16 / 18)[t - 1]
        p = p - s * (0.01 * u + wd * p)
      np.testing.assert_allclose(value, p, rtol=1e-5, atol=1e-6, err_msg=name)


def test_wd_coupling_gradient_is_an_l2_penalty():
  """As in PyTorch's SGD: decay follows clipping and enters the momentum."""
  optimizer = make(
    lr=0.1,
    wd=0.3,
    wd_coupling="gradient",
    wd_mults=[("body/.*", 0.5), ("head/.*", 1.0)],
    lr_mults=[("head/.*", 2.0)],
    grad_clip_value=0.5,
    schedule=dict(decay_type="linear"),
    optimizer=dict(name="sgd", momentum=0.9),
  )
  trained, _ = train(optimizer, tree(0), 3)
  for name, value in trees.flatten_with_names(trained):
    wd = {"b": 0.15, "h": 0.3, "e": 0.0}[name[0]]
    lr = 0.2 if name[0] == "h" else 0.1

    def leaf(seed, name=name):
      return np.float64(dict(trees.flatten_with_names(tree(seed)))[name])

    p, buffer = leaf(0), 0.0
    for t in range(3):
      buffer = 0.9 * buffer + np.clip(leaf(t + 1), -0.5, 0.5) + wd * p
      p = p - lr * (1 - t / 20) * buffer
    np.testing.assert_allclose(value, p, rtol=1e-5, atol=1e-6, err_msg=name)


def test_multipliers_of_rates_decay_and_gradients():
  optimizer = make(
    lr=0.5,
    wd=0.1,
    optimizer=dict(name="sgd"),
    lr_mults=[("body/dense/.*", 0.1), ("body/.*", 10.0)],
    wd_mults=[("embedding", 2.0)],
    grad_mults=[("head/.*", 3.0)],
  )
  params, grads = tree(0), tree(1)
  updates, _ = optimizer.tx.update(
    grads, optimizer.tx.init(params), params, step=0
  )
  factor = {
    "body/dense/kernel": 0.05,
    "body/dense/bias": 0.05,
    "body/stack/kernel": 5.0,
    "embedding": 0.5,
    "head/kernel": 1.5,
  }
  expected = trees.map_with_names(
    lambda n, g, p: -factor[n] * g - (0.2 * p if n == "embedding" else 0),
    grads,
    params,
  )
  assert_close(updates, expected, rtol=1e-6)


def clipped(**config):
  """(clipped, original) gradients, by a step of SGD with lr 1."""
  optimizer = make(lr=1.0, optimizer=dict(name="sgd"), **config)
  params, _ = trees.partition(tree(0), optimizer.trainable)
  grads, _ = trees.partition(tree(1), optimizer.trainable)
  updates, _ = optimizer.tx.update(
    grads, optimizer.tx.init(params), params, step=0
  )
  return jax.tree.map(jnp.negative, updates), grads


def norm_of(value):
  """A norm in float32: the root of a sum of hundreds of squares."""
  return pytest.approx(value, rel=1e-5)


def test_grad_clip_norm_covers_trainable_gradients_only():
  result, grads = clipped(grad_clip_norm=1.0)
  norm = optax.global_norm(grads)
  assert norm > 1
  assert_close(result, jax.tree.map(lambda g: g / norm, grads), rtol=1e-5)
  frozen = [("body/.*", None), (".*", dict(decay_type="constant"))]
  result, grads = clipped(grad_clip_norm=1.0, schedule=frozen)
  assert trees.names(result) == ["embedding", "head/kernel"]
  assert float(optax.global_norm(result)) == norm_of(1.0)
  # A norm below the limit changes nothing, nor does a norm of zero.
  result, grads = clipped(grad_clip_norm=1e3)
  assert_close(result, grads, rtol=0)
  optimizer = make(grad_clip_norm=1.0)
  zero = jax.tree.map(jnp.zeros_like, tree(0))
  updates, _ = optimizer.tx.update(
    zero, optimizer.tx.init(zero), tree(0), step=0
  )
  assert_close(updates, zero)


def test_clipping_by_value_then_group_then_norm():
  result, grads = clipped(grad_clip_value=0.5)
  assert_close(result, jax.tree.map(lambda g: jnp.clip(g, -0.5, 0.5), grads))
  result, grads = clipped(
    grad_mults=[("head/kernel", 100.0)],
    grad_clip_value=0.5,
    grad_clip_groups=[("body/dense/.*", 0.25), ("body/.*", 0.125)],
    grad_clip_norm=1.0,
  )
  head = jnp.clip(100 * grads["head"]["kernel"], -0.5, 0.5)
  embedding = jnp.clip(grads["embedding"], -0.5, 0.5)
  total = np.sqrt(
    float(jnp.sum(head**2) + jnp.sum(embedding**2)) + 0.25**2 + 0.125**2
  )
  assert float(optax.global_norm(result)) == norm_of(1.0)
  np.testing.assert_allclose(result["head"]["kernel"], head / total, rtol=1e-5)
  norms = {
    k: float(optax.global_norm(result["body"][k])) for k in ("dense", "stack")
  }
  assert norms["dense"] == norm_of(0.25 / total)
  assert norms["stack"] == norm_of(0.125 / total)


def test_clipping_does_not_hide_nan():
  optimizer = make(grad_clip_norm=1.0)
  grads = tree(1)
  grads["embedding"] = grads["embedding"].at[0, 0].set(jnp.nan)
  updates, _ = optimizer.tx.update(
    grads, optimizer.tx.init(tree(0)), tree(0), step=0
  )
  assert all(np.isnan(u).all() for u in jax.tree.leaves(updates))


def test_frozen_parameters_have_no_state_and_do_not_change():
  optimizer = make(
    wd=0.1,
    schedule=[("body/.*", None), (".*", dict(decay_type="constant"))],
  )
  assert dict(trees.flatten_with_names(optimizer.trainable)) == {
    name: not name.startswith("body/") for name in SHAPES
  }
  params, state = train(optimizer, tree(0), 2)
  assert trees.names(state) == [
    "0/count",
    "0/mu/embedding",
    "0/mu/head/kernel",
    "0/nu/embedding",
    "0/nu/head/kernel",
  ]
  assert_close(params["body"], tree(0)["body"], rtol=0)
  assert np.all(params["head"]["kernel"] != tree(0)["head"]["kernel"])


def test_frozen_parameters_need_no_memory_for_gradients():
  """The compiled update's temporaries shrink by the size of these gradients."""
  width, batch = 256, 8
  params = {
    name: {"kernel": jnp.zeros((width, width))} for name in ("a", "b", "c")
  }
  mesh = sharding.make_mesh(replica=1, fsdp=8)

  def loss_fn(variables, batch, rng):
    x = batch["x"]
    for name in "abc":
      x = jnp.tanh(x @ variables["params"][name]["kernel"])
    return {"loss": (jnp.sum(x), jnp.float32(x.shape[0]))}, {}

  def temporary_bytes(schedule):
    optimizer = make(params, schedule=schedule)
    compute = gradients.make(
      loss_fn, trainable=optimizer.trainable, mesh=mesh, microbatches=2
    )

    def update(params, opt, batch):
      grads, _, _ = compute({"params": params, "step": 0}, batch)
      trained, frozen = trees.partition(params, optimizer.trainable)
      updates, opt = optimizer.tx.update(grads, opt, trained, step=0)
      return trees.merge(optax.apply_updates(trained, updates), frozen), opt

    trained, _ = trees.partition(params, optimizer.trainable)
    opt = jax.eval_shape(optimizer.tx.init, trained)
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(
      params, opt, {"x": jnp.zeros((batch, width))}
    )
    return compiled.compile().memory_analysis().temp_size_in_bytes

  constant = dict(decay_type="constant")
  nothing_frozen = temporary_bytes(constant)
  head_only = temporary_bytes([("c/.*", constant), (".*", None)])
  assert nothing_frozen - head_only > 0.95 * 2 * 4 * width**2


def test_hparams_of_an_optimizer_are_learning_rates_and_decays():
  rates = lambda optimizer, step: optimizer.hparams(step)["lr"]
  linear = dict(decay_type="linear")
  constant = dict(decay_type="constant")
  optimizer = make(schedule=linear)
  assert rates(optimizer, 5) == {"lr": pytest.approx(0.1 * 0.75)}
  assert optimizer.hparams(5)["lr"]["lr"].dtype == np.float32
  optimizer = make(schedule=[("body/.*", None), (".*", linear)])
  assert list(rates(optimizer, 0)) == ["lr"]
  optimizer = make(
    schedule=[("embedding", None), ("head/.*", constant), (".*", linear)]
  )
  assert rates(optimizer, 10) == {
    "lr/head/.*": pytest.approx(0.1),
    "lr/.*": pytest.approx(0.05),
  }
  assert rates(make(), 19) == {"lr": pytest.approx(0.1)}
  for coupling, expected in dict(schedule=0.25, lr=0.025, gradient=0.5).items():
    optimizer = make(schedule=linear, wd=0.5, wd_coupling=coupling)
    assert optimizer.hparams(10)["wd"] == {"lr": pytest.approx(expected)}


def test_runs_that_differ_in_rates_and_schedules_share_one_program():
  """Also what a learning rate of 0 and twice the rate do."""
  programs, results = set(), {}
  params, grads = tree(0), tree(1)
  for changes in (
    dict(lr=0.1),
    dict(lr=0.2),
    dict(lr=0.0),
    dict(wd=0.3),
    dict(schedule=dict(decay_type="cosine", warmup_steps=3)),
    dict(schedule=dict(decay_type="rsqrt", cooldown_percent=50)),
  ):
    optimizer = make(**{"wd": 0.1, **changes})
    hparams = optimizer.hparams(2)
    opt = optimizer.tx.init(params)

    def update(opt, hparams, optimizer=optimizer):
      return optimizer.tx.update(grads, opt, params, step=2, hparams=hparams)[0]

    programs.add(jax.jit(update).lower(opt, hparams).as_text())
    results[str(changes)] = jax.jit(update)(opt, hparams)
  assert len(programs) == 1
  for one, two in zip(
    jax.tree.leaves(results["{'lr': 0.1}"]["embedding"]),
    jax.tree.leaves(results["{'lr': 0.2}"]["embedding"]),
  ):
    np.testing.assert_allclose(2 * one, two, rtol=1e-6)
  assert not np.any(results["{'lr': 0.0}"]["embedding"])


def test_bfloat16_parameters_keep_their_dtype():
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree(0))
  optimizer = make(params, wd=0.1)
  trained, _ = train(optimizer, params, 1)
  assert {p.dtype for p in jax.tree.leaves(trained)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
  "config, message",
  [
    (dict(lr="high"), "config.lr: expected a number at least 0, got 'high'."),
    (dict(lr=-1.0), "config.lr: expected a number at least 0, got -1.0."),
    (
      dict(wd_coupling="grad"),
      "config.wd_coupling: unknown 'grad'. Did you mean 'gradient'?",
    ),
    (dict(lr_mults=[("head/.*", 0)]), "put ('head/.*', None) into"),
    (dict(wd_mults=[("head/.*", -1)]), "config.wd_mults: ('head/.*', -1)"),
    (
      dict(grad_clip_norm=0),
      "config.grad_clip_norm: expected a number above 0, got 0.",
    ),
    (dict(grad_clip_groups=[("head/.*", 0)]), "config.grad_clip_groups"),
    (
      dict(schedule=[("head/.*", None)]),
      "config.schedule: matches 1 of 5 parameters, but not body/dense/bias, ",
    ),
    (dict(schedule=[(".*", None)]), "config.schedule: freezes every parameter"),
    (dict(schedule=None), "config.schedule: expected a dict, or (regex, dict)"),
    (
      dict(schedule=[(".*", dict(decay_type="cosine", warmup=1))]),
      "config.schedule[0].warmup: unknown key of 'cosine'. Did you mean "
      "'warmup_",
    ),
    (dict(schedule="cosine"), "expected a list of (regex, dict | None)"),
    (
      dict(
        optimizer=dict(name="prodigy"),
        schedule=[
          ("head/.*", dict(decay_type="cosine")),
          (".*", dict(decay_type="constant")),
        ],
      ),
      "config.schedule: 'prodigy' supports only one.",
    ),
    (
      dict(optimizer=dict(name="prodigy"), lr_mults=[("head/.*", 2.0)]),
      "config.lr_mults: 'prodigy' supports none.",
    ),
  ],
)
def test_mistakes_in_the_config_are_explained(config, message):
  with pytest.raises(ConfigError) as e:
    make(**config)
  assert message in str(e.value)
  assert "\n" not in str(e.value)


def test_weight_decay_without_a_matching_parameter_is_an_error():
  with pytest.raises(ConfigError, match=r"wd_mults.*matches no parameter"):
    make({"w": jnp.ones(3)}, wd=0.1)
  make({"w": jnp.ones(3)}, wd=0.0)


def test_weight_decay_holds_for_the_matrices_of_adapters():
  names = ("lora_a", "lora_b", "lora_magnitude")
  params = {"dense": {name: jnp.ones((2, 2)) for name in names}}
  optimizer = make(params, lr=1.0, wd=0.1, optimizer=dict(name="sgd"))
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = optimizer.tx.init(params)
  updates, _ = optimizer.tx.update(zeros, state, params, step=0)
  for name, expected in zip(names, (-0.1, -0.1, 0.0)):
    np.testing.assert_allclose(updates["dense"][name], expected, rtol=1e-6)


def test_lr_is_required():
  with pytest.raises(ConfigError, match=r"config\.lr: missing"):
    chain.make(Config(dict(optimizer=ADAM)), tree(0), UNITS)


def test_stored_arithmetic_is_that_of_optax():
  options = dict(name="adam", mu_dtype="bfloat16")
  tx = optax.adam(0.1, mu_dtype="bfloat16")
  expected, state = tree(0), tx.init(tree(0))
  update = jax.jit(tx.update)
  for step in range(4):
    updates, state = update(tree(step + 1), state, expected)
    expected = optax.apply_updates(expected, updates)
  differences = {}
  for arithmetic in ("stored", "float32"):
    spec = dict(options, moment_arithmetic=arithmetic)
    trained, _ = train(make(optimizer=spec), tree(0), 4, jit=True)
    differences[arithmetic] = max(
      float(jnp.max(jnp.abs(a - e)))
      for a, e in zip(jax.tree.leaves(trained), jax.tree.leaves(expected))
    )
  assert differences["stored"] < 1e-6 < 1e-4 < differences["float32"]
