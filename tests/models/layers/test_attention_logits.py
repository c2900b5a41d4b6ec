"""The largest logits of attention, and the factors that make them smaller.

Both are compared with float64 in numpy, head by head.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.layers import attention_blockwise, attention_logits, masks
from bigtrain.models.layers.attention_inputs import Inputs
from bigtrain.reports import flops

V, B, L, H, K = 31, 3, 20, 4, 8
LATENTS = dict(kv_rank=9, nope_dim=6, rope_dim=4, v_dim=5)
CASES = {
  "own keys": {},
  "own keys with biases": dict(use_bias=("qkv",)),
  "grouped": dict(num_kv_heads=2, use_bias=("qkv",)),
  "window": dict(window=5, attention_scale=0.3),
  "latents": dict(mla=LATENTS),
  "latents of queries": dict(mla=LATENTS | dict(q_rank=7)),
}


def model_of(**changes):
  options = dict(
    variant="llama",
    vocab_size=V,
    width=16,
    depth=2,
    num_heads=H,
    mlp_dim=12,
    attention_logits=True,
  )
  if "mla" not in changes:
    options["head_dim"] = K
  return decoder.Model(**options | changes)


def variables_of(model):
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), int))
  assert set(shapes) == {"params"}
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.7, x.dtype)
  return jax.tree.map(draw, shapes)


def texts():
  """Packed texts, of which the last is mostly padding."""
  rng = np.random.default_rng(1)
  lengths = [(8, 9), (L, 0), (3, 3)]
  segments = [[1] * n + [2] * m + [0] * (L - n - m) for n, m in lengths]
  return jnp.asarray(rng.integers(0, V, (B, L))), jnp.asarray(segments)


def run_fn(model):
  """Function of variables: (largest logits, attention's inputs by layer)."""
  tokens, segments = texts()

  @jax.jit
  def apply(variables):
    _, state = model.apply(
      variables,
      tokens,
      segments=segments,
      train=True,
      head=False,
      capture_intermediates=lambda m, _: m.name == "attention_norm",
      mutable=[attention_logits.STEP_LARGEST, "intermediates"],
      rngs={"dropout": jax.random.key(0)},
    )
    return state

  def run(variables):
    state = apply(variables)
    inputs = {
      name.partition("/attention_norm")[0]: np.asarray(x, np.float64)
      for name, x in trees.flatten_with_names(state.get("intermediates", {}))
    }
    return state[attention_logits.STEP_LARGEST], inputs

  return run


@functools.cache
def made(name):
  """(model of one layer, its variables, its run_fn)."""
  model = model_of(**CASES[name], depth=1)
  return model, variables_of(model), run_fn(model)


def rotated(x_BLHK, position_BL, theta=1e4):
  half = x_BLHK.shape[-1] // 2
  angle = position_BL[..., None] / theta ** (np.arange(half) / half)
  cos, sin = (f(angle)[:, :, None] for f in (np.cos, np.sin))
  a, b = x_BLHK[..., :half], x_BLHK[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def normed(x, scale):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def queries_and_keys(model, p, x, position_BL):
  """float64 [B, L, H, K], a key for each head."""
  dot = lambda x, name: np.tensordot(x, p[f"{name}/kernel"], axes=1)
  if model.mla is None:
    q, k = (dot(x, n) + p.get(f"{n}/bias", 0.0) for n in ("query", "key"))
    k = np.repeat(k, H // k.shape[2], axis=2)
    return rotated(q, position_BL), rotated(k, position_BL)
  N, C = model.mla.nope_dim, model.mla.kv_rank
  if model.mla.q_rank is None:
    q = dot(x, "query")
  else:
    q = dot(
      normed(dot(x, "query_down"), p["query_down_norm/scale"]), "query_up"
    )
  down = dot(x, "kv_down")
  k = dot(normed(down[..., :C], p["kv_down_norm/scale"]), "kv_up")[..., :N]
  r = np.repeat(rotated(down[:, :, None, C:], position_BL), H, axis=2)
  q = np.concatenate([q[..., :N], rotated(q[..., N:], position_BL)], axis=-1)
  return q, np.concatenate([k, r], axis=-1)


def expected_largest(model, p, x):
  """The largest logit of each head [H]."""
  segments = np.asarray(texts()[1])
  starts = np.diff(segments, axis=1, prepend=-1) != 0
  position = np.arange(L) - np.maximum.accumulate(np.arange(L) * starts, axis=1)
  q, k = queries_and_keys(model, p, x, position)
  scale = model.attention_scale or 1 / math.sqrt(q.shape[-1])
  logits = np.einsum("blhk,bshk->bhls", q, k) * scale
  distance = np.arange(L)[:, None] - np.arange(L)
  visible = (distance >= 0) & (distance < (model.window or L))
  visible = visible & (segments[:, :, None] == segments[:, None])
  visible &= (segments != 0)[:, :, None]
  return np.where(visible[:, None], logits, -np.inf).max(axis=(0, 2, 3))


def params_of(variables, layer):
  named = trees.flatten_with_names(variables["params"])
  prefix = f"{layer}/attention/"
  return {
    name.removeprefix(prefix): np.asarray(x, np.float64)
    for name, x in named
    if name.startswith(prefix)
  }


@pytest.mark.parametrize("name", CASES)
def test_largest_logits_of_each_head(name, monkeypatch):
  monkeypatch.setattr(attention_blockwise, "_BLOCK_ON_CPU", 8)
  model = model_of(**CASES[name])
  variables = variables_of(model)
  logits, inputs = run_fn(model)(variables)
  assert len(inputs) == 2
  for layer, x in inputs.items():
    expected = expected_largest(model, params_of(variables, layer), x)
    got = logits[layer]["attention"]["largest"]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def scaled(params, factors):
  return trees.map_with_names(
    lambda name, p: p * factors[name] if name in factors else p, params
  )


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("name", CASES)
def test_only_heads_above_tau_shrink_and_to_tau(name, alpha):
  model, variables, run = made(name)
  logits, _ = run(variables)
  before = np.asarray(logits["blocks_0"]["attention"]["largest"])
  tau = float(np.sort(before)[1:3].mean())  # Two heads are above it.
  factors = attention_logits.factors(variables["params"], logits, tau, alpha)
  params = scaled(variables["params"], factors)
  after, _ = run({"params": params})
  after = np.asarray(after["blocks_0"]["attention"]["largest"])
  np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)
  np.testing.assert_array_equal(after[before < tau], before[before < tau])

  # The same, array by array and head by head.
  new = params_of({"params": params}, "blocks_0")
  for array, x in params_of(variables, "blocks_0").items():
    for h in range(H):
      gamma = min(1.0, tau / before[h])
      if array.startswith(("query/", "query_up/")) and model.mla is not None:
        x[..., h, :6] *= gamma**alpha
        x[..., h, 6:] *= gamma
      elif array.startswith("kv_up/"):
        x[..., h, :6] *= gamma ** (1 - alpha)
      elif array.startswith("query/"):
        x[..., h, :] *= gamma if name == "grouped" else gamma**alpha
      elif array.startswith("key/") and name != "grouped":
        x[..., h, :] *= gamma ** (1 - alpha)
    np.testing.assert_allclose(new[array], x, rtol=1e-6, err_msg=array)


def test_layers_of_a_loop_and_of_periods():
  changes = dict(
    depth=6,
    kinds=dict(local=dict(window=4), full={}),
    first_layers=("full",),
    layers=("local", "full"),
    num_kv_heads=2,
  )
  looped = model_of(**changes, scan=True)
  variables = variables_of(looped)
  logits, _ = run_fn(looped)(variables)
  flat = dict(trees.flatten_with_names(variables["params"]))
  unrolled = {}
  for name, x in flat.items():
    block, _, rest = name.partition("/")
    place, _, inner = rest.partition("/")
    if block != "blocks":
      unrolled[name] = x
      continue
    for i, own in enumerate(x):
      unrolled[f"blocks_{1 + int(place) + 2 * i}/{inner}"] = own
  run = run_fn(model_of(**changes))
  plain, _ = run({"params": trees.from_flat(unrolled)})
  by_layer = attention_logits.by_layer(logits)
  numbers = {
    "blocks/0/0": 1,
    "blocks/0/1": 3,
    "blocks/1/0": 2,
    "blocks/1/1": 4,
    "blocks_0": 0,
    "blocks_5": 5,
  }
  assert by_layer.keys() == numbers.keys()
  for layer, number in numbers.items():
    own = plain[f"blocks_{number}"]["attention"]["largest"]
    np.testing.assert_allclose(by_layer[layer], own, rtol=1e-5)
  factors = attention_logits.factors(variables["params"], logits, 0.5, 0.5)
  scaled(variables["params"], factors)  # They broadcast.
  assert factors["blocks/1/attention/query/kernel"].shape == (2, 1, H, 1)


def test_a_batch_of_padding_changes_nothing():
  model = model_of(depth=1)
  variables = variables_of(model)
  logits = {"blocks_0": {"attention": {"largest": jnp.full(H, -jnp.inf)}}}
  factors = attention_logits.factors(variables["params"], logits, 1.0, 0.5)
  jax.tree.map(
    np.testing.assert_array_equal,
    scaled(variables["params"], factors),
    variables["params"],
  )


def test_frozen_projections_are_refused():
  model = model_of(depth=1)
  params = variables_of(model)["params"]
  del params["blocks_0"]["attention"]["key"]
  logits = {"blocks_0": {"attention": {"largest": jnp.ones(H)}}}
  with pytest.raises(ConfigError, match="attention/key/kernel does not train"):
    attention_logits.factors(params, logits, 1.0, 0.5)


def test_memory_is_linear_in_the_length():
  """No array of the program has a score for each pair of positions."""
  length = 4096
  q = jax.ShapeDtypeStruct((1, length, H, K), jnp.bfloat16)

  def largest(q):
    inputs = Inputs(q[:, :, :, None], q, q, masks.Mask(causal=True))
    return attention_blockwise.largest_scores(inputs, scale=1.0)

  memory = jax.jit(largest).lower(q).compile().memory_analysis()
  assert memory.temp_size_in_bytes < length * length


def test_the_model_counts_no_flops_for_them():
  tokens, segments = texts()

  def total(model):
    variables = variables_of(model)

    def loss(variables, mutable):
      (_, out), _ = model.apply(
        variables, tokens, segments=segments, head=False, mutable=mutable
      )
      return jnp.sum(out["pre_logits"])

    recorded = flops.step_flops(lambda v: loss(v, ["step_largest"]), variables)
    return recorded, flops.step_flops(lambda v: loss(v, ["x"]), variables)

  assert len(set(total(model_of()))) == 1


def test_they_do_not_depend_on_the_backend():
  model = model_of(attention="blockwise", depth=1)
  variables = variables_of(model)
  plain, _ = run_fn(model_of(attention="xla", depth=1))(variables)
  own, _ = run_fn(model)(variables)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), own, plain
  )
