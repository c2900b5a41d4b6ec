"""Every backend against attention's definition in float64, for random draws.

Of the options, any two may meet: windows, soft caps, sinks, documents,
prefixes, padding, groups of heads, biases, and lengths of no whole blocks.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.layers import attention_cases

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import (
  attention_blockwise,
  attention_kernels,
)


def draw(seed, *, longest=40, unit=1):
  """A case and the dtype of its arrays."""
  rng = np.random.default_rng(seed)
  some = lambda share=0.5: bool(rng.random() < share)
  causal, kv_heads = some(0.7), int(rng.choice([1, 2, 4]))
  L = S = unit * int(rng.integers(2, longest + 1)) + some() * (unit > 1)
  if not causal and some():
    S = unit * int(rng.integers(2, longest + 1))
  case = attention_cases.Case(
    L=L,
    S=S,
    heads=kv_heads * int(rng.choice([1, 2])),
    kv_heads=kv_heads,
    width=int(rng.choice([4, 8, 6])),
    causal=causal,
    window=int(rng.integers(1, L + 2)) if causal and some() else None,
    prefix=causal and some(0.3),
    documents=some(0.4),
    padding=some(0.3),
    bias=some(0.3),
    softcap=float(rng.choice([0.7, 3.0])) if some(0.4) else None,
    sinks=some(0.6),
    scaled=some(),
  )
  return case, str(rng.choice(["float32", "float32", "bfloat16"]))


def visible(case):
  """Bool [B, L, S], written without masks.Mask's own matrix."""
  mask = case.mask()
  L, S = case.L, case.S or case.L
  i_L1, j_S = np.arange(L)[:, None], np.arange(S)
  result = np.ones((case.rows, L, S), bool)
  if case.causal:
    distance_LS = i_L1 - j_S
    in_order = (distance_LS >= 0) & (distance_LS < (case.window or L))
    result &= in_order
    if case.prefix:
      result |= j_S < np.asarray(mask.prefix_B)[:, None, None]
  if case.documents:
    of_queries, of_keys = map(np.asarray, (mask.segments_BL, mask.segments_BS))
    result &= of_queries[:, :, None] == of_keys[:, None]
  if case.padding:
    result &= np.asarray(mask.real_BS)[:, None]
  return result


@functools.cache
def by_definition(case, dtype):
  """Output and gradients in float64; and the gradient of the output."""
  mask_BLS = visible(case)
  sees_BL = mask_BLS.any(-1)
  S, G, K = case.S or case.L, case.kv_heads, case.width
  with jax.enable_x64(True):
    arrays = jax.tree.map(
      lambda x: jnp.asarray(np.asarray(x, np.float64)), case.arrays(dtype)
    )
    weights = np.random.default_rng(2).normal(size=arrays["q"].shape)
    # What a query that sees nothing gets has no meaning.
    weights = weights * sees_BL[..., None, None]

    def loss(arrays):
      q = arrays["q"].reshape(case.rows, case.L, G, -1, K)
      scores = jnp.einsum("blgrk,bsgk->bgrls", q, arrays["k_BSGK"])
      scores *= 1 / math.sqrt(K) if case.scaled else 1.0
      if case.bias:
        i_L, j_S = np.arange(case.L), np.arange(S)
        distance_LS = j_S + case.L - 1 - i_L[:, None]
        bias = arrays["bias"].bias_HT[:, distance_LS]
        scores += bias.reshape(scores.shape[1:])
      if case.softcap:
        scores = case.softcap * jnp.tanh(scores / case.softcap)
      # Rows that see nothing see everything here, so that nothing is NaN.
      shown = mask_BLS | ~sees_BL[..., None]
      powers = jnp.where(shown[:, None, None], jnp.exp(scores), 0.0)
      total = powers.sum(-1, keepdims=True)
      if case.sinks:
        sinks = arrays["sinks_H"].reshape(G, -1, 1, 1)
        total += jnp.exp(sinks)
      out = jnp.einsum("bgrls,bsgk->blgrk", powers / total, arrays["v_BSGK"])
      out = out.reshape(weights.shape)
      return jnp.sum(out * weights), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    out = np.asarray(out) * sees_BL[..., None, None]
    return {"out": out, "grads": jax.device_get(grads)}, weights


def check(seed, backend, mesh=None, **options):
  case, dtype = draw(seed, **options)
  expected, weights = by_definition(case, dtype)
  arrays = case.arrays(dtype)

  @jax.jit
  def run(arrays):
    def loss(arrays):
      out = case.attend(arrays, backend).astype(jnp.float32)
      return jnp.sum(out * weights), out

    return jax.grad(loss, has_aux=True)(arrays)

  if mesh is None:
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    grads, out = run(arrays)
  assert np.isfinite(out).all()
  sees = np.any(weights, axis=(-2, -1), keepdims=True)
  actual = {"out": np.asarray(out) * sees, "grads": grads}
  tolerance = 5e-5 if dtype == "float32" else 0.04
  attention_cases.check_close(actual, expected, tolerance, least=1e-2)


def seeds(quick, slow):
  return [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick))
    for seed in range(slow)
  ]


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention_blockwise, "_BLOCK_ON_CPU", 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", seeds(4, 40))
@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_on_one_device(seed, backend):
  check(seed, backend)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", seeds(2, 30))
@pytest.mark.parametrize("backend", ["auto", "ring"])
def test_with_examples_that_devices_share(seed, backend):
  devices = jax.devices()[:8]
  sequence, tensor = [(4, 1), (2, 2), (2, 1), (8, 1)][seed % 4]
  check(
    seed,
    backend,
    sharding.make_mesh(sequence=sequence, tensor=tensor, devices=devices),
  )


@pytest.mark.parametrize("seed", seeds(0, 24))
def test_splash(monkeypatch, seed):
  """Interpreted; where it cannot compute exactly, it is an error."""
  monkeypatch.setattr(attention_kernels, "_BLOCK", 128)
  monkeypatch.setattr(attention_kernels, "_INTERPRET", True)
  monkeypatch.setattr(sharding, "device", lambda: ("tpu", "TPU v5"))
  options = dict(longest=3, unit=128)
  case, _ = draw(seed, **options)
  if case.bias or case.prefix:
    with pytest.raises(ConfigError, match="cannot compute"):
      check(seed, "splash", **options)
  else:
    check(seed, "splash", **options)
