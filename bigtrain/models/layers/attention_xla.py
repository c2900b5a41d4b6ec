"""Attention with a matrix of all scores, which XLA compiles.

Axes: B batch, L length, S length attended to, H heads, G heads of keys and
values, R = H / G, K head width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import model_flops
from bigtrain.models.layers import attention_choice, positions, visibility

# Not -inf: a row of padding that sees no position must not become NaN.
_MASKED = -1e30


def pays(case: attention_choice.Case) -> str:
  """Returns why this implementation is best for a case."""
  scores = case.queries * case.positions
  return f"the fastest for {scores:,} scores a head"


def attend(
  q: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  sees: visibility.Sees,
  start: Any,
  bias: jax.Array | positions.BiasByDistance | None,
  scaled: bool,
  softcap: float | None,
) -> jax.Array:
  """Returns the output, in the shape and dtype of the queries.

  Args:
    q: queries (B, L, H, K), or (B, L, G, R, K) for groups of heads.
    k_BSGK: keys.
    v_BSGK: values.
    sees: what a query sees.
    start: int scalar, number of the first query's position; None for 0.
    bias: see attention.attend, as `scaled` and `softcap`.
    scaled: see there.
    softcap: see there.
  """
  L, S = q.shape[1], k_BSGK.shape[1]
  grouped = q.ndim == 5
  in_order = sees.causal and not sees.selects and start is None
  first = 0 if start is None else start
  # Positions outside of a window are not model FLOPs.
  in_window = functools.partial(model_flops.share, sees.reach(S), S)
  # jax.nn adds up the heads of a group in another order, which would change the
  # last bits of existing configs' results.
  if scaled and bias is None and softcap is None and not grouped:
    mask_BLS = None if in_order else sees.mask(L, S, first)
    window = sees.window if in_order else None
    with in_window():
      return jax.nn.dot_product_attention(
        q,
        k_BSGK,
        v_BSGK,
        mask=None if mask_BLS is None else mask_BLS[:, None],
        is_causal=in_order,
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla",
      )
  heads, kv_heads = ("gr", "g") if grouped else ("h", "h")
  with in_window():
    scores = jnp.einsum(
      f"bl{heads}k,bs{kv_heads}k->b{heads}ls",
      q,
      k_BSGK,
      preferred_element_type=jnp.float32,
    )
  if scaled:
    scores /= math.sqrt(q.shape[-1])
  if isinstance(bias, positions.BiasByDistance):
    bias = bias.matrix(L, S)
  if bias is not None:
    scores += bias.reshape(1, *scores.shape[1:])
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  mask_BLS = sees.mask(L, S, first)
  if mask_BLS is not None:
    mask = jnp.expand_dims(mask_BLS, [*range(1, scores.ndim - 2)])
    scores = jnp.where(mask, scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  with in_window():
    return jnp.einsum(f"b{heads}ls,bs{kv_heads}k->bl{heads}k", weights, v_BSGK)
