"""Attention with a matrix of all scores, against flax and jax."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import attention, masks, positions

B, L, D, H = 4, 12, 16, 2


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape)


def test_attention_equals_flax_attention():
  x_BLD, y_BSD = normal(7, B, L, D), normal(8, B, 5, D)
  ours = attention.Attention(attention.Options(H))
  shapes = jax.eval_shape(ours.init, jax.random.key(0), x_BLD, y_BSD)["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda p: rng.normal(0, 0.3, p.shape), shapes)
  flax_attention = nn.MultiHeadDotProductAttention(H)
  expected = flax_attention.apply({"params": params}, x_BLD, y_BSD)
  actual, _ = ours.apply({"params": params}, x_BLD, y_BSD)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_divide_the_width_are_an_error():
  x_BLD = normal(7, B, L, D)
  with pytest.raises(ConfigError, match="divide the width 16"):
    attention.Attention(attention.Options(3)).init(
      jax.random.key(0), x_BLD, x_BLD
    )


@pytest.mark.parametrize("window", [None, 4])
def test_attention_equals_jax_attention(window):
  q, k, v = (normal(i, 2, L, heads, 8) for i, heads in enumerate((6, 2, 2)))
  mask = masks.Mask(causal=True, window=window)
  ours = jax.jit(functools.partial(attention.attend, mask=mask))
  theirs = jax.jit(
    functools.partial(
      jax.nn.dot_product_attention,
      is_causal=True,
      local_window_size=(window - 1, 0) if window else None,
    )
  )
  ours, theirs = ours(q, k, v), theirs(q, k, v)
  np.testing.assert_allclose(ours, theirs, atol=1e-5)


def half_and_whole(fn, length=64):
  """Root mean squares of a function's errors in bfloat16.

  Args:
    fn: maps queries, keys and values to an output.
    length: L and S.

  Returns:
    Those of the output and of the gradients of queries, keys and values,
    relative to the root mean square of the result in float32.
  """
  qkvg = [normal(i, 2, length, 3, 16) for i in range(4)]

  def results(q, k, v, g):
    out, backward = jax.vjp(fn, q, k, v)
    return out, *backward(g)

  whole = results(*qkvg)
  half = jax.jit(results)(*(x.astype(jnp.bfloat16) for x in qkvg))
  norm = jnp.linalg.norm
  return [
    float(norm((x.astype(jnp.float32) - y).ravel()) / norm(y.ravel()))
    for x, y in zip(half, whole)
  ]


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_is_nearer_to_float32_than_flax(causal):
  """big_vision's attention is flax's, whose softmax is in bfloat16."""
  mask = masks.Mask(causal=causal)
  ours = functools.partial(attention.attend, mask=mask, backend="xla")
  mask = jnp.tril(jnp.ones((64, 64), bool)) if causal else None
  theirs = functools.partial(nn.dot_product_attention, mask=mask)
  errors = half_and_whole(ours), half_and_whole(theirs)
  assert max(errors[0]) < 0.01
  for our_error, their_error in zip(*errors):
    assert our_error < 1.05 * their_error


def test_half_precision_keeps_no_matrix_of_scores():
  q, k, v = (normal(i, 2, L, 3, 8).astype(jnp.bfloat16) for i in range(3))
  attend = functools.partial(attention.attend, backend="xla")
  _, backward = jax.vjp(attend, q, k, v)
  shapes = [x.shape for x in jax.tree.leaves(backward)]
  assert (2, L, 3, 8) in shapes
  assert not [s for s in shapes if s[-2:] == (L, L)]


def test_a_softcap_bounds_the_scores():
  q, k = jnp.full((1, L, 1, 4), 9.0), jnp.full((1, L, 1, 4), 9.0)
  v = jnp.asarray(np.random.default_rng(0).normal(size=(1, L, 1, 4)))
  k = k.at[:, 0].set(-9.0)
  mask = masks.Mask(causal=True)
  out = attention.attend(q, k, v, mask=mask, softcap=0.5)
  low, high = math.exp(-0.5), math.exp(0.5)
  weights = np.array([low] + [high] * (L - 1)) / (low + high * (L - 1))
  np.testing.assert_allclose(out[0, -1, 0], weights @ v[0, :, 0], rtol=1e-3)


@pytest.mark.parametrize("two_sided", [False, True])
def test_biases_by_distance_are_those_of_the_matrix(two_sided):
  module = positions.RelativeBias(
    num_heads=3, num_buckets=8, max_distance=6, two_sided=two_sided,
    init_std=1.0,
  )  # fmt: skip
  i_L, j_S = jnp.arange(L), jnp.arange(L + 2)
  matrix, variables = module.init_with_output(jax.random.key(0), i_L, j_S)
  by_distance = module.apply(variables, i_L, j_S, by_distance=True)
  assert by_distance.bias_HT.shape == (3, 2 * L + 1)
  np.testing.assert_array_equal(by_distance.matrix(L, L + 2), matrix)


def layer_and_params(options, width=D):
  layer = attention.Attention(options)
  x_BLD = jnp.zeros((B, L, width))
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x_BLD, x_BLD)
  rng = np.random.default_rng(0)
  draw = lambda p: jnp.asarray(rng.normal(0, 0.5, p.shape), jnp.float32)
  return layer, jax.tree.map(draw, shapes["params"])


def by_definition(options, params, x_BLD, angle_LQ, query_scale_BL):
  """The layer's output in float64, one head and one query at a time."""
  params = jax.tree.map(np.float64, params)
  x_BLD = np.float64(x_BLD)

  def project(name):
    y = np.einsum("bld,dhk->blhk", x_BLD, params[name]["kernel"])
    return y + params[name].get("bias", 0.0)

  def norm(x, name):
    axes = (-2, -1) if options.qk_norm == "projection" else -1
    mean = np.square(x).mean(axes, keepdims=True)
    x = x / np.sqrt(mean + options.norm_eps)
    if options.qk_norm == "l2":
      return x
    return x * (options.norm_offset + params[name]["scale"])

  def rotate(x):
    x, y = np.split(x, 2, axis=-1)
    sin, cos = (f(angle_LQ)[None, :, None] for f in (np.sin, np.cos))
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], -1)

  q, k, v = map(project, ("query", "key", "value"))
  limit = options.qkv_clip or np.inf
  if not options.qk_norm_after_rope:
    q, k = norm(q, "query_norm"), norm(k, "key_norm")
  q, k, v = (np.clip(x, -limit, limit) for x in (q, k, v))
  q, k = rotate(q), rotate(k)
  if options.qk_norm_after_rope:
    q, k = norm(q, "query_norm"), norm(k, "key_norm")
  q = q * query_scale_BL[..., None, None]
  H, G = options.num_heads, k.shape[2]
  o = np.zeros_like(q)
  for b, i, h in np.ndindex(*q.shape[:3]):
    past = slice(max(0, i + 1 - options.window), i + 1)
    scores = k[b, past, h * G // H] @ q[b, i, h] * options.scale
    powers = np.exp(scores)
    total = powers.sum() + np.exp(params["sinks"][h])
    o[b, i, h] = powers @ v[b, past, h * G // H] / total
  out = np.einsum("blhk,hkd->bld", o, params["out"]["kernel"])
  return out + params["out"].get("bias", 0.0)


LAYERS = {
  "head": dict(bias=("qkv",), norm_offset=1.0),
  "projection": dict(bias=("out",), qkv_clip=0.9),
  "l2": dict(bias=(), qk_norm_after_rope=True),
}


def with_options(name, heads=4, kv_heads=2):
  return attention.Options(
    heads, 6, kv_heads, qk_norm=name, scale=0.7, window=5, sinks=True,
    **LAYERS[name],
  )  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_options_are_those_of_the_definition(name):
  options = with_options(name)
  layer, params = layer_and_params(options)
  rng = np.random.default_rng(1)
  x_BLD = jnp.asarray(rng.normal(size=(B, L, D)), jnp.float32)
  position_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
  omega_Q = positions.frequencies(6, 100.0)
  scale_BL = positions.QueryScale(0.3, 4).factors(position_BL)
  np.testing.assert_allclose(
    scale_BL[0, ::4], 1 + 0.3 * np.log([1, 2, 3]), rtol=1e-6
  )
  actual, _ = layer.apply(
    {"params": params},
    x_BLD,
    x_BLD,
    mask=masks.Mask(causal=True),
    rope=positions.Rope(6, 100.0).rotation(position_BL, L),
    query_scale_BL=scale_BL,
  )
  angle_LQ = np.outer(np.arange(L), omega_Q)
  expected = by_definition(options, params, x_BLD, angle_LQ, scale_BL)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["head", "projection"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2)])
def test_norms_and_sinks_under_a_tensor_axis(name, heads, kv_heads):
  """With fewer heads of keys than devices, these have copies of the heads."""
  options = with_options(name, heads, kv_heads)._replace(bias=())
  layer, params = layer_and_params(options)
  x_BLD = jnp.asarray(np.random.default_rng(1).normal(size=(B, L, D)))

  @jax.jit
  def run(inputs):
    def loss(params, x_BLD):
      mask = masks.Mask(causal=True)
      out, _ = layer.apply({"params": params}, x_BLD, x_BLD, mask=mask)
      return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, (0, 1), has_aux=True)(*inputs)

  inputs = params, x_BLD
  expected = run(inputs)
  mesh = sharding.make_mesh(fsdp=2, tensor=4, devices=jax.devices()[:8])
  with jax.set_mesh(mesh):
    rounding.assert_close(run, inputs, expected)
