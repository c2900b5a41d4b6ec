"""The chunked form of the gated delta rule, against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.models.layers import delta_rule, triangular

B, G, R, K, V = 2, 2, 2, 6, 5


def inputs(length, documents=False, equal_keys=False, by_channel=False):
  rng = np.random.default_rng(length)
  q, k = rng.normal(size=(2, B, length, G, K))
  if equal_keys:
    k = np.broadcast_to(k[:, :1], k.shape)
  k = k / np.linalg.norm(k, axis=-1, keepdims=True)
  # Some heads forget at once, and others hardly at all.
  shape = (B, length, G, R, K) if by_channel else (B, length, G, R)
  rates = np.resize([0.0, 0.01, 1.0, 50.0], shape[2:])
  decay = rng.exponential(size=shape) * rates
  beta = rng.uniform(0, 2, size=shape[:4])
  if equal_keys:
    decay, beta = 0 * decay, np.ones_like(beta)
  starts = jnp.asarray(rng.random((B, length)) < 0.06) if documents else None
  v = rng.normal(size=(B, length, G, R, V))
  return delta_rule.Inputs(*map(jnp.asarray, (q, k, v, -decay, beta)), starts)


def state():
  return jnp.asarray(np.random.default_rng(0).normal(size=(B, G, R, K, V)))


@jax.jit
def recurrent(given, state):
  """The definition, position by position."""
  starts_BL = given.starts_BL
  if starts_BL is None:
    starts_BL = jnp.zeros(given.q_BLGK.shape[:2], bool)

  def read(S, x):
    q, k, v, log_decay, beta, starts = x
    decay = jnp.broadcast_to(jnp.exp(log_decay), (K,))
    S = jnp.where(starts, 0, S) * decay[:, None]
    S = S + beta * jnp.outer(k, v - S.T @ k)
    return S, S.T @ q

  # One example and head at a time; heads of values share queries and keys.
  text = lambda *x: jax.lax.scan(read, x[-1], x[:-1])
  in_group = jax.vmap(text, (None, None, 1, 1, 1, None, 0), (0, 1))
  heads = jax.vmap(in_group, (1, 1, 1, 1, 1, None, 0), (0, 1))
  last, outputs = jax.vmap(heads)(*given[:5], starts_BL, state)
  return outputs, last


def results(rule, given, state):
  """Outputs, last state, and the gradients of a weighted sum of them."""

  def total(arrays, state):
    o, last = rule(delta_rule.Inputs(*arrays, given.starts_BL), state)
    weights = np.random.default_rng(1).normal(size=(2, *o.shape))
    return jnp.sum(o * weights[0]) + jnp.sum(jnp.sin(last)), (o, last)

  grad = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
  return grad(given[:5], state)


def assert_close(actual, expected, rtol):
  for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max())


@pytest.mark.parametrize(
  ("length", "documents", "by_channel"),
  [
    (1, False, False),
    pytest.param(2, True, False, marks=pytest.mark.slow),
    (7, False, False),
    (64, True, False),
    pytest.param(65, False, False, marks=pytest.mark.slow),
    (150, True, False),
    pytest.param(1, False, True, marks=pytest.mark.slow),
    pytest.param(7, True, True, marks=pytest.mark.slow),
    (65, False, True),
    (150, True, True),
  ],
)
def test_chunks_equal_the_recurrence(length, documents, by_channel, float64):
  given = inputs(length, documents, by_channel=by_channel)
  expected = results(recurrent, given, state())
  assert_close(results(delta_rule.chunked, given, state()), expected, 1e-11)


def test_equal_keys_lose_no_digits_in_float32(float64):
  """Powers of the triangular matrix would be as large as 1e18."""
  given = inputs(128, equal_keys=True)
  expected, last = recurrent(given, state())
  rounded = jax.tree.map(lambda x: x.astype(jnp.float32), (given, state()))
  actual = jax.jit(delta_rule.chunked)(*rounded)
  assert_close(actual, (expected, last), 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_strong_decays_neither_overflow_nor_give_nan(by_channel):
  given = inputs(64, by_channel=by_channel)
  given = jax.tree.map(lambda x: x.astype(jnp.float32), given)
  given = given._replace(log_decay=jnp.full_like(given.log_decay, -1e4))
  outputs = results(delta_rule.chunked, given, state().astype(jnp.float32))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(outputs))


def test_inverse_and_its_gradient(float64):
  rng = np.random.default_rng(0)
  lower = jnp.asarray(np.tril(rng.normal(size=(3, 16, 16)), -1))
  inverse = jnp.linalg.inv(lower + jnp.eye(16))
  actual = triangular.unit_inverse(lower)
  np.testing.assert_allclose(actual, inverse, rtol=1e-9, atol=1e-9)
  by_formula = jax.grad(lambda x: jnp.sum(jnp.sin(triangular.unit_inverse(x))))(
    lower
  )
  expected = jax.grad(
    lambda x: jnp.sum(jnp.sin(jnp.linalg.inv(x + jnp.eye(16))))
  )(lower)
  assert_close(jnp.tril(by_formula, -1), jnp.tril(expected, -1), 1e-9)


@pytest.mark.parametrize(("ways", "documents"), [(4, False), (2, True)])
def test_devices_pass_the_state_on(ways, documents, float64):
  given = inputs(12 * ways, documents)
  empty = jnp.zeros_like(state())
  mesh = sharding.make_mesh(sequence=ways, devices=jax.devices()[:ways])
  split = PartitionSpec(None, "sequence")
  specs = jax.tree.map(lambda x: split, given)

  def over_devices(given, state):
    run = jax.shard_map(
      lambda x: delta_rule.over_devices(x, "sequence"),
      in_specs=(specs,),
      out_specs=split,
      check_vma=False,
    )
    return run(given), state

  with jax.set_mesh(mesh):
    actual = results(over_devices, given, empty)
  one_device = lambda x, same: (delta_rule.chunked(x, empty)[0], same)
  expected = results(one_device, given, empty)
  assert_close(actual, expected, 1e-11)


def test_steps_equal_the_whole(float64):
  given = inputs(9)
  expected, _ = jax.jit(delta_rule.chunked)(given, state())
  step = jax.jit(delta_rule.step)
  S = state()
  writes = jnp.asarray([True, True])
  for i in range(9):
    token = jax.tree.map(lambda x, i=i: x[:, i : i + 1], given)
    o, S = step(token, S, writes)
    assert_close(o[:, 0], expected[:, i], 1e-11)
  # A token that was read already is not written again.
  again, same = step(token, S, ~writes)
  assert_close(again, o, 1e-11)
  np.testing.assert_array_equal(same, S)
