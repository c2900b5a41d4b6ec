"""Experts against a plain loop over tokens, without and with a capacity."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder, t5
from bigtrain.models.layers import mlp, moe, moe_dispatch, moe_experts

B, L, D, F, E = 8, 6, 4, 5, 8


def layer(kind="swiglu", **options):
  return moe.Moe(
    moe.Options(E, router_init_std=1.0, **options),
    mlp.Options(F, kind, init_std=1.0, out_init_std=1.0),
  )


X = np.random.default_rng(0).normal(size=(B, L, D)).astype(np.float32)
REAL = np.random.default_rng(1).random((B, L)) < 0.8


@functools.cache
def params():
  """The layer's parameters; first called outside of functions to be traced."""
  init = jax.jit(lambda key: layer().init(key, jnp.asarray(X), None, False))
  return jax.device_get(init(jax.random.key(0)))


@functools.cache
def run_of(kind, options, devices):
  """Returns (gradients, outputs, statistics), split over these devices."""
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  experts = NamedSharding(mesh, PartitionSpec("fsdp"))

  def place(path, x):
    split = jax.tree_util.keystr(path).count("router") == 0
    return jax.device_put(x, experts if split else sharding.replicated(mesh))

  @jax.jit
  def fn(variables, x, real):
    def loss(variables):
      y, stats = layer(kind, **dict(options)).apply(variables, x, real, False)
      return jnp.sum(jnp.sin(y) * real[..., None]), (y, stats)

    return jax.grad(loss, has_aux=True)(variables)

  with jax.set_mesh(mesh):
    variables = jax.tree_util.tree_map_with_path(place, params())
    data = [jax.device_put(x, sharding.batch(mesh)) for x in (X, REAL)]
    grads, (y, stats) = fn(variables, *data)
  return jax.device_get((grads, y, stats))


def run(kind="swiglu", devices=1, **options):
  return run_of(kind, tuple(options.items()), devices)


def expert(e, x, kind):
  """Applies one expert to one token."""
  p = jax.tree.map(
    lambda w: w[e],
    {k: params()["params"][k]["kernel"] for k in ("up", "gate", "down")},
  )
  h, gate = x @ p["up"], x @ p["gate"]
  if kind == "swiglu":
    h = gate / (1 + np.exp(-gate)) * h
  elif kind == "geglu":
    h = np.asarray(jax.nn.gelu(gate)) * h
  else:
    h = np.asarray(jax.nn.gelu(h)) if kind == "gelu" else np.maximum(h, 0)
  return h @ p["down"]


def choices(x, top_k, normalize):
  """Returns [(expert, weight), ...] of one token, best first."""
  logits = x @ params()["params"]["router"]["kernel"]
  probs = np.exp(logits - logits.max())
  probs /= probs.sum()
  best = np.argsort(-probs)[:top_k]
  weights = probs[best] / (probs[best].sum() if normalize else 1)
  return list(zip(best.tolist(), weights))


def plain(top_k, normalize, capacity=None, kind="swiglu", serve="position"):
  """Returns (outputs, number of dropped choices), by a loop over tokens."""
  out, dropped = np.zeros_like(X), 0
  for b in range(B):
    free = [capacity or L * top_k] * E
    chosen = [choices(X[b, i], top_k, normalize) for i in range(L)]
    order = [(i, j) for i in range(L) for j in range(top_k)]
    if serve == "choice":
      order.sort(key=lambda choice: choice[1])
    for i, j in order:
      e, weight = chosen[i][j]
      if not REAL[b, i]:
        continue
      if free[e] == 0:
        dropped += 1
        continue
      free[e] -= 1
      out[b, i] += weight * expert(e, X[b, i], kind)
  return out, dropped


@pytest.mark.parametrize(
  "kind, options, normalize",
  [
    ("swiglu", dict(top_k=2), True),
    ("gelu", dict(top_k=1), False),
    ("geglu", dict(top_k=1, normalize=True), True),
    ("relu", dict(top_k=2, normalize=False), False),
  ],
)
def test_dropless_equals_a_loop_over_tokens(kind, options, normalize):
  _, y, stats = run(kind, **options)
  expected, _ = plain(options["top_k"], normalize, kind=kind)
  np.testing.assert_allclose(y * REAL[..., None], expected, atol=1e-4)
  assert stats["dropped"] == 0


@pytest.mark.parametrize(
  "factor, top_k, serve",
  [(0.7, 2, None), (0.7, 2, "choice"), (1.5, 1, None), (1.5, 1, "choice")],
)
def test_capacity_drops_later_choices_and_tokens(factor, top_k, serve):
  options = {} if serve is None else dict(serve=serve)
  _, y, stats = run(top_k=top_k, capacity_factor=factor, **options)
  capacity = math.ceil(factor * L * top_k / E)
  order = serve or "position"
  expected, dropped = plain(top_k, top_k > 1, capacity, serve=order)
  other, _ = plain(top_k, top_k > 1, capacity, serve="position")
  differs = serve == "choice" and top_k > 1
  assert dropped > 0 and (other != expected).any() == differs
  np.testing.assert_allclose(y, expected, atol=1e-4)
  assert stats["dropped"] == pytest.approx(dropped / (REAL.sum() * top_k))


def test_a_large_capacity_equals_dropless():
  _, _, dropless = run(top_k=2)
  grads, y, stats = run(top_k=2, capacity_factor=float(E))
  assert stats["dropped"] == dropless["dropped"] == 0
  same, z, _ = run(top_k=2)
  np.testing.assert_allclose(y, z * REAL[..., None], atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, same
  )


def gradients_of_rows(rows, width, hidden):
  """The lowered gradients of a dropless layer, all of its rows for expert 0."""
  weights = {
    name: np.ones((E, *shape), np.float32)
    for name, shape in dict(
      up=(width, hidden), gate=(width, hidden), down=(hidden, width)
    ).items()
  }
  routing = moe_experts.Routing(
    np.zeros((1, rows, 1), np.int32), np.ones((1, rows, 1), np.float32)
  )
  experts = moe_experts.Experts("swiglu", hidden, 0.0, None)

  def total(x, weights):
    real = np.ones((1, rows), bool)
    y, _ = moe_dispatch.dropless(
      x, routing, weights, experts, real, axis=None, buffer_factor=1.0
    )
    return jnp.sum(jnp.sin(y))

  x = np.ones((1, rows, width), np.float32)
  return jax.jit(jax.grad(total, (0, 1))).lower(x, weights)


def test_no_row_is_multiplied_with_all_experts():
  rows, hidden = 256, 24
  compiled = gradients_of_rows(rows, 16, hidden).compile()
  shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
  sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
  # As many rows as there are, and up to a quarter more for empty places.
  assert max(sizes) <= 1.25 * rows * hidden


def test_gradients_scatter_no_rows():
  """TPUs scatter one row after another."""
  text = gradients_of_rows(256, 16, 24).as_text()
  results = re.findall(r"stablehlo\.scatter.*?-> tensor<(.*?)>", text, re.S)
  # The numbers of rows alone.
  assert results and all(r.endswith("xi32") for r in results), results


@pytest.mark.parametrize("factor", [None, 0.7])
def test_eight_devices_compute_the_same_as_one(factor):
  options = dict(top_k=2, capacity_factor=factor)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    run(**options),
    run(devices=8, **options),
  )


def test_statistics_match_their_definitions():
  _, _, stats = run(top_k=2)
  chosen = [
    e
    for b in range(B)
    for i in range(L)
    for e, _ in choices(X[b, i], 2, True)
    if REAL[b, i]
  ]
  load = np.bincount(chosen, minlength=E) / len(chosen)
  np.testing.assert_allclose(stats["load"], load, atol=1e-6)
  logits = X[REAL] @ params()["params"]["router"]["kernel"]
  log_sum = np.log(np.exp(logits).sum(-1))
  probs = np.exp(logits - log_sum[:, None])
  entropy = -(probs * np.log(probs)).sum(-1).mean()
  assert stats["entropy"] == pytest.approx(entropy, rel=1e-4)
  assert stats["router_z"] == pytest.approx((log_sum**2).mean(), rel=1e-4)
  balance = E * (load * probs.mean(0)).sum()
  assert stats["load_balance"] == pytest.approx(balance, rel=1e-4)


def test_jitter_acts_only_in_training():
  jittered, variables = layer(top_k=1, jitter=0.5), params()

  @functools.partial(jax.jit, static_argnums=0)
  def run(train):
    key = {"dropout": jax.random.key(0)}
    return jittered.apply(variables, X, REAL, train, rngs=key)[0]

  _, still, _ = run_of("swiglu", (("top_k", 1),), 1)
  np.testing.assert_allclose(run(False), still, atol=1e-5)
  assert np.abs(run(True) - still).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, float(E)])
def test_dropout_of_experts_does_not_depend_on_the_devices(factor):
  dropping = layer(top_k=1, capacity_factor=factor, dropout=0.5)
  variables = params()  # Made here, since the functions below are traced.

  def run_on(devices, number):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])

    @jax.jit
    def mean(x):
      one = lambda key: dropping.apply(
        variables, x, None, True, rngs={"dropout": key}
      )[0]
      keys = jax.random.split(jax.random.key(0), number)
      return jnp.mean(jax.lax.map(one, keys), axis=0)

    with jax.set_mesh(mesh):
      return np.asarray(mean(jax.device_put(X, sharding.batch(mesh))))

  once = run_on(1, 1)
  np.testing.assert_allclose(run_on(8, 1), once, rtol=1e-4, atol=1e-4)
  still = jax.jit(lambda: dropping.apply(variables, X, None, False)[0])()
  off = lambda y: np.linalg.norm(y - still) / np.linalg.norm(still)
  assert off(once) > 0.3 and off(run_on(1, 500)) < 0.1


def test_evaluation_may_have_a_larger_capacity():
  both = layer(top_k=1, capacity_factor=0.7, eval_capacity_factor=float(E))
  variables = params()
  run = jax.jit(
    lambda train: both.apply(variables, X, REAL, train)[1], static_argnums=0
  )
  assert run(True)["dropped"] > 0 and run(False)["dropped"] == 0


@pytest.mark.slow
def test_a_decoder_with_routed_and_shared_experts():
  sizes = dict(vocab_size=20, width=8, depth=2, num_heads=2, mlp_dim=6)
  options = dict(num_experts=4, top_k=1, shared_experts=2)
  tokens = jnp.arange(10)[None]

  def outputs(scan):
    model = decoder.Model(variant="llama", **sizes, moe=options, scan=scan)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    segments = jnp.asarray([[1] * 4 + [2] * 3 + [0] * 3])
    run = jax.jit(lambda v: model.apply(v, tokens, segments=segments))
    return variables["params"], run(variables)

  stacked, (logits, out) = outputs(True)
  shared = stacked["blocks"]["shared_experts"]["up"]["kernel"]
  assert shared.shape == (2, 8, 12)
  assert out["moe"]["load"].shape == (4,)
  assert float(out["moe"]["load"].sum()) == pytest.approx(1)
  _, (same, other) = outputs(False)
  np.testing.assert_allclose(logits, same, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    out["moe"],
    other["moe"],
  )


@pytest.mark.parametrize(
  "model, kernel",
  [
    (decoder.Model(variant="mixtral_8x7b", scan=True), "blocks/moe/up/kernel"),
    (
      t5.Model(
        variant="t5_base", moe=dict(num_experts=128, every=2), scan=True
      ),
      "encoder/blocks/1/moe/up/kernel",
    ),
  ],
)
def test_a_sharding_rule_splits_experts_over_devices(model, kernel):
  tokens = [jnp.zeros((1, 2), jnp.int32)] * (2 if kernel[0] == "e" else 1)
  shapes = jax.eval_shape(model.init, jax.random.key(0), *tokens)
  state = dict(params=shapes["params"], opt=dict(mu=shapes, nu=shapes))
  rules = ((r".*/moe/(gate|up|down)/kernel", "shard_dim(-3)"), (".*", "fsdp"))
  places, _ = sharding.state_shardings(state, sharding.make_mesh(), rules)
  by_name = dict(trees.flatten_with_names(places))
  names = [name for name in by_name if name.endswith(kernel)]
  assert len(names) == 3
  for name in names:
    assert by_name[name].spec == PartitionSpec(None, "fsdp")
  total = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(state))
  assert sharding.bytes_per_device(state, places) < 1.01 * total / 8


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(top_k=2), "num_experts: missing"),
    (
      dict(num_experts=4, top_k=5),
      "top_k: expected a whole number .* at most 4, got 5",
    ),
    (dict(num_experts=4, capacity=1.0), "capacity.*'capacity_factor'"),
    (dict(num_experts=4, jitter=1.5), "jitter: expected .* below 1, got 1.5"),
    (dict(num_experts=4, dropout=1.0), "dropout: expected .* below 1, got 1.0"),
    (dict(num_experts=4, axis="fdsp"), "axis: unknown .fdsp.. Did you mean"),
    (
      dict(num_experts=4, capacity_factor=1.0, serve="choices"),
      "serve: unknown 'choices'. Did you mean 'choice'",
    ),
    (
      dict(num_experts=4, serve="choice"),
      "serve='choice': expected a capacity",
    ),
    (dict(num_experts=4, score="sigmod"), "score: unknown .* 'sigmoid'"),
    (
      dict(num_experts=4, bias_rate=0.1),
      "bias_rate.*: expected selection_bias",
    ),
    (
      dict(num_experts=4, score="softmax_of_top", normalize=False),
      "normalize=False: .* add up to 1",
    ),
    (dict(num_experts=4, groups=2), "groups: expected dict"),
    (
      dict(num_experts=4, buffer_factor=2.0),
      "buffer_factor=2.0: expected an axis",
    ),
    (
      dict(num_experts=4, axis="fsdp", buffer_factor=2.0, capacity_factor=1.0),
      "buffer_factor=2.0: expected no capacity_factor",
    ),
    (
      dict(num_experts=4, axis="fsdp", buffer_factor=0),
      "buffer_factor: expected a number above 0, got 0",
    ),
    (dict(num_experts=4, groups=dict(num=3, top=1)), "num: 3 does not divide"),
    (
      dict(num_experts=6, top_k=4, groups=dict(num=2, top=1)),
      "groups.top: expected a whole number at least 2 and at most 2, got 1",
    ),
    (
      dict(num_experts=4, groups=dict(num=2, top=1, score="top")),
      "groups.score: unknown 'top'. Did you mean 'top2'",
    ),
    (dict(num_experts=4, shared_gate=True), "shared_gate: expected shared_dim"),
    (dict(num_experts=4, shared_dim=8, shared_experts=1), "give only one"),
    (dict(num_experts=4, every=4), "every: 4 does not divide decoder_depth=6"),
    (
      dict(num_experts=4, every=0),
      "every: expected a whole number at least 1, got 0",
    ),
  ],
)
def test_wrong_options_are_errors(options, message):
  with pytest.raises(ConfigError, match=message):
    moe.read(options, "config.model.moe", depth=8, decoder_depth=6)
