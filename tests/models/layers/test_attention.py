"""Attention with a matrix of all scores, against flax and jax."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import settings
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
  with pytest.raises(settings.ConfigError, match="divide the width 16"):
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
