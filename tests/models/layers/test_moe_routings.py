"""Expert choice and priority routing, against their papers' formulas.

The references are loops in float64, and so is the layer.
"""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import any_mesh

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder, t5
from bigtrain.models.layers import mlp, moe, moe_expert_choice

B, L, D, F, E = 3, 12, 4, 5, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, L, D))
REAL = RNG.random((B, L)) < 0.7
REAL[0] = True
WEIGHTS = {
  "router": RNG.normal(size=(D, E)),
  "up": RNG.normal(size=(E, D, F)),
  "gate": RNG.normal(size=(E, D, F)),
  "down": RNG.normal(size=(E, F, D)),
}
DOUBLE = {"model": {"dtype": "float64"}}


@functools.cache
def run_of(options, padding=0):
  """Returns (outputs, statistics) of the layer."""
  layer = moe.Moe(
    moe.Options(E, **dict(options)), mlp.Options(F, "swiglu", dtype="float64")
  )
  params = {name: {"kernel": x} for name, x in WEIGHTS.items()}
  x = np.pad(X, ((0, 0), (0, padding), (0, 0)), constant_values=9.0)
  real = np.pad(REAL, ((0, 0), (0, padding)))
  with any_mesh.precision(DOUBLE):
    fn = jax.jit(lambda x: layer.apply({"params": params}, x, real, False))
    return jax.device_get(fn(jnp.asarray(x)))


def run(padding=0, **options):
  return run_of(tuple(options.items()), padding)


def expert(e, x):
  gate = x @ WEIGHTS["gate"][e]
  return (gate / (1 + np.exp(-gate)) * (x @ WEIGHTS["up"][e])) @ WEIGHTS[
    "down"
  ][e]


def scores(kind="softmax"):
  logits = X @ WEIGHTS["router"]
  if kind == "sigmoid":
    return 1 / (1 + np.exp(-logits))
  exps = np.exp(logits)
  return exps / exps.sum(-1, keepdims=True)


def chosen_by_experts(top_k, factor, kind="softmax"):
  """{example: [tokens of each expert]}, section 3.2 of arXiv 2202.09368."""
  result = {}
  for b in range(B):
    tokens = np.flatnonzero(REAL[b])
    n = len(tokens)
    k = min(n, math.ceil(factor * top_k * n / E))  # n c / e, c = top_k factor.
    result[b] = [
      [*tokens[np.argsort(-s[tokens], kind="stable")[:k]]]
      for s in scores(kind)[b].T
    ]
  return result


@pytest.mark.parametrize(
  "options",
  [
    dict(top_k=1),
    dict(top_k=2, capacity_factor=1.25),
    dict(top_k=2, normalize=True, scale=2.5),
    dict(top_k=2, score="sigmoid"),
    dict(top_k=4, capacity_factor=3.0),
  ],
)
def test_experts_choose_as_in_the_paper(options):
  y, stats = run(routing="expert_choice", **options)
  kind = options.get("score", "softmax")
  s, factor = scores(kind), options.get("capacity_factor", 1.0)
  want, number = np.zeros_like(X), np.zeros((B, L))
  for b, experts in chosen_by_experts(options["top_k"], factor, kind).items():
    total = np.zeros(L)
    for e, tokens in enumerate(experts):
      for l in tokens:
        want[b, l] += s[b, l, e] * expert(e, X[b, l])
        total[l] += s[b, l, e]
        number[b, l] += 1
    if options.get("normalize"):
      want[b] /= np.where(total, total, 1)[:, None]
  want *= options.get("scale", 1.0)
  np.testing.assert_allclose(y, want, rtol=0, atol=1e-6 * np.abs(want).max())
  assert stats["left_behind"] == pytest.approx((number == 0)[REAL].mean())
  np.testing.assert_allclose(stats["load"], 1 / E)
  assert stats["load_balance"] == pytest.approx(1) and stats["dropped"] == 0


def test_some_tokens_are_left_behind_and_others_have_several_experts():
  """Otherwise the test above would show little."""
  number = np.zeros((B, L))
  for b, experts in chosen_by_experts(1, 1.0).items():
    for tokens in experts:
      number[b, tokens] += 1
  assert (number[REAL] == 0).any() and (number > 1).any()


@pytest.mark.parametrize(
  "options",
  [
    dict(routing="expert_choice", top_k=2),
    dict(serve="priority", capacity_factor=100.0),
  ],
)
def test_more_padding_changes_nothing(options):
  y, stats = run(**options)
  padded, others = run(padding=7, **options)
  np.testing.assert_allclose(padded[:, :L] * REAL[..., None], y, atol=1e-12)
  jax.tree.map(np.testing.assert_allclose, others, stats)


def by_priority(top_k, C):
  """Algorithm 2 of arXiv 2106.05974; the group is an example."""
  s, want, dropped = scores(), np.zeros_like(X), 0
  for b in range(B):
    free = [C] * E
    best = np.argsort(-s[b], axis=-1, kind="stable")
    order = np.argsort(-s[b].max(-1), kind="stable")
    for j in range(top_k):
      for l in order:
        if not REAL[b, l]:
          continue
        e = best[l, j]
        if not free[e]:
          dropped += 1
          continue
        free[e] -= 1
        want[b, l] += s[b, l, e] * expert(e, X[b, l])
  return want, dropped / (REAL.sum() * top_k)


@pytest.mark.parametrize("top_k, factor", [(1, 0.7), (2, 0.5), (3, 0.8)])
def test_priority_serves_the_largest_scores_first(top_k, factor):
  options = dict(top_k=top_k, capacity_factor=factor, normalize=False)
  y, stats = run(serve="priority", **options)
  want, dropped = by_priority(top_k, math.ceil(factor * L * top_k / E))
  np.testing.assert_allclose(y, want, rtol=0, atol=1e-6 * np.abs(want).max())
  assert dropped > 0 and stats["dropped"] == pytest.approx(dropped)
  other, _ = run(serve="choice", **options)
  assert np.abs(other - y).max() > 1e-3


def test_the_number_of_tokens_does_not_depend_on_rounding():
  """0.1 * 3 * 10 is 3 in floats; 1.1 * 10 is 11.000000000000002."""
  assert moe_expert_choice.capacity(10, 0.5) == 5
  assert moe_expert_choice.capacity(10, 0.51) == 6
  assert moe_expert_choice.capacity(0, 0.5) == 0


T5 = dict(variant="t5_1_1_small", width=8, depth=1, num_heads=2, mlp_dim=6)
T5 |= dict(vocab_size=30)
TOKENS = np.random.default_rng(0).integers(1, 30, (2, 8))


def test_in_a_t5_experts_choose_in_the_encoder_alone():
  experts = dict(num_experts=4, top_k=1, routing="expert_choice")
  experts |= dict(router_init_std=1.0)
  model = t5.Model(**T5, moe=experts)
  variables = jax.jit(model.init)(jax.random.key(0), TOKENS, TOKENS)
  run = jax.jit(lambda x, y: model.apply(variables, x, y))
  logits, out = run(TOKENS, TOKENS)
  assert 0 < out["moe"]["left_behind"] < 1  # Of the encoder.
  loads = {name: x["load"] for name, x in out["moe"]["by_layer"].items()}
  np.testing.assert_allclose(loads["encoder_0"], 0.25)
  assert np.abs(loads["decoder_0"] - 0.25).max() > 0.01
  changed = TOKENS.copy()
  changed[:, 5:] = 1
  other, _ = run(TOKENS, changed)
  np.testing.assert_array_equal(other[:, :6], logits[:, :6])
  # The examples of a batch are groups of their own.
  changed[0] = TOKENS[0]
  other, _ = run(changed, TOKENS)
  np.testing.assert_array_equal(other[0], logits[0])
  assert (other[1] != logits[1]).any()


@pytest.mark.parametrize(
  "make, options, message",
  [
    (
      decoder.Model,
      dict(routing="expert_choice"),
      "config.model.moe.routing='expert_choice': expected 'token_choice' in a "
      "decoder",
    ),
    (
      decoder.Model,
      dict(routing="experts"),
      "config.model.moe.routing: unknown 'experts'. Did you mean",
    ),
    (
      t5.Model,
      dict(routing="expert_choice", selection_bias=True),
      "selection_bias: not with routing='expert_choice'",
    ),
    (
      t5.Model,
      dict(routing="expert_choice", score="softmax_of_top"),
      "expected 'softmax' or 'sigmoid'",
    ),
    (
      t5.Model,
      dict(serve="priority"),
      "serve='priority': expected a capacity_factor",
    ),
  ],
)
def test_options_that_make_no_sense_are_refused(make, options, message):
  variant = "llama_1b" if make is decoder.Model else "t5_1_1_small"
  with pytest.raises(ConfigError, match="routing|score|serve") as e:
    make(variant=variant, moe=dict(num_experts=4) | options)
  assert message in str(e.value)


def test_a_decoder_that_looks_ahead_says_so(caplog):
  with caplog.at_level("WARNING"):
    moe.read(
      dict(num_experts=4, serve="priority", capacity_factor=1.0),
      "config.model.moe",
    )
  assert "depends on later tokens" in caplog.text


@functools.cache
def trained(text, microbatches=1, **sizes):
  """Returns the losses of three steps, and the gradients of the first."""
  config = any_mesh.load("switch_base:runlocal,experts=4", packed=True)
  # The router's losses depend on the number of microbatches.
  config["loss"] = dict(load_balance=0.0, router_z=0.0)
  experts = config["model"]["moe"] | dict(jitter=0.0) | json.loads(text)
  config["model"] |= dict(moe=experts, dtype="float64", dropout=0.0)
  sizes = dict(replica=1, fsdp=1, sequence=1, tensor=1) | sizes
  pairs, grads, _ = any_mesh.train(config, sizes, microbatches)
  names = ("loss", "experts/left_behind", "experts/dropped")
  own = [[np.divide(*x[n]) for n in names if n in x] for x in pairs]
  return own, dict(trees.flatten_with_names(grads))


CHOICE = '{"routing": "expert_choice", "top_k": 2, "axis": "fsdp"}'
PRIORITY = '{"serve": "priority", "top_k": 2, "axis": "fsdp"}'


@pytest.mark.slow
@pytest.mark.parametrize("text", [CHOICE, PRIORITY])
def test_neither_devices_nor_microbatches_change_training(text):
  want, want_grads = trained(text)
  got, grads = trained(text, microbatches=2, fsdp=2, sequence=2, tensor=2)
  assert len(want[0]) == (3 if text == CHOICE else 2)
  np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
  top = max(np.abs(x).max() for x in want_grads.values())
  for name, x in want_grads.items():
    np.testing.assert_allclose(grads[name], x, 0, 1e-9 * top, err_msg=name)


@pytest.mark.slow
def test_a_pipeline_does_not_change_training():
  """Experts in each layer, because stages have whole periods."""
  text = '{"routing": "expert_choice", "top_k": 2, "every": 1}'
  (want, want_grads), (got, grads) = (
    trained(text),
    trained(text, microbatches=2, fsdp=2, pipeline=2),
  )
  np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
  top = max(np.abs(x).max() for x in want_grads.values())
  for name, x in want_grads.items():
    np.testing.assert_allclose(grads[name], x, 0, 1e-9 * top, err_msg=name)
