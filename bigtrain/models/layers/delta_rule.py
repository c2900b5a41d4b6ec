"""The gated delta rule, https://arxiv.org/abs/2412.06464.

Each head has a state S of K x V numbers, a memory of values by their keys. At
each position the state decays, the value that it holds for the key moves
towards the new value, and the query reads the state:

  S = exp(log_decay) S
  S = S + k (beta (v - S^T k))^T
  o = S^T q

`chunked` computes this with products of matrices. Within a chunk, the updates u
of the state depend on each other through a triangular system,

  (I + A) u = beta (v - S^T k decayed from the start of the chunk)

whose inverse does not depend on the state. So the inverses of all chunks are
computed first, and a loop over the chunks then carries the state.
`over_devices` does the same for texts whose positions are split over the axis
`sequence`. `step` reads one token. The decay may also differ between the
channels of a key, as in Kimi Linear; delta_rule_channels.py has the computation
within chunks for that case. On TPUs, delta_rule_kernel.py has the same as a
kernel.

Axes: B batch, L length, N chunks, C positions of a chunk, J the same for keys,
G heads of queries and keys, R heads of values for each of them, K width of
keys, V width of values.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays import model_flops
from bigtrain.models.layers import (
  delta_rule_channels,
  delta_rule_kernel,
  triangular,
)

# Positions of a chunk. Products within chunks cost more with longer ones, and
# the loop over the state has more turns with shorter ones.
CHUNK = 64


class Inputs(NamedTuple):
  """Queries, keys and values, and how they change the state; float32."""

  q_BLGK: jax.Array
  k_BLGK: jax.Array
  v_BLGRV: jax.Array
  # At most 0: [B, L, G, R], or [B, L, G, R, K] by channel.
  log_decay: jax.Array
  beta_BLGR: jax.Array
  # Bool, True for the first position of each document but not of a text that
  # continues a state; None for one document.
  starts_BL: jax.Array | None = None


class _Chunks(NamedTuple):
  """Inputs of the loop over chunks; the first axis of all arrays is N."""

  q_BGCK: jax.Array
  k_BGCK: jax.Array
  # Updates of the state if it is empty, and how they change with the state.
  u_BGRCV: jax.Array
  w_BGRCK: jax.Array
  # Weight of each update in the chunk's outputs.
  scores_BGRCJ: jax.Array
  # Share of the incoming state that each position still sees.
  kept_BGRC: jax.Array
  # Share of each update in the chunk's last state.
  left_BGRC: jax.Array

  def read(self, state_BGRKV: jax.Array) -> jax.Array:
    """Reads the state before the chunk by the queries: [B, G, R, C, V]."""
    read_BGRCV = jnp.einsum("bgck,bgrkv->bgrcv", self.q_BGCK, state_BGRKV)
    return read_BGRCV * self.kept_BGRC[..., None]

  def next_state(self, state_BGRKV: jax.Array, u: jax.Array) -> jax.Array:
    """The state after the chunk with the updates u."""
    kept = self.kept_BGRC[..., -1, None, None] * state_BGRKV
    left_BGRCV = self.left_BGRC[..., None] * u
    return kept + jnp.einsum("bgck,bgrcv->bgrkv", self.k_BGCK, left_BGRCV)


def empty_state(inputs: Inputs) -> jax.Array:
  B, _, G, R, V = inputs.v_BLGRV.shape
  K = inputs.k_BLGK.shape[-1]
  return jnp.zeros((B, G, R, K, V), inputs.v_BLGRV.dtype)


def step(
  inputs: Inputs, state_BGRKV: jax.Array, writes_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Reads one token: returns (output [B, 1, G, R, V], new state).

  Where `writes_B` is False, the state contains the token already, and does not
  change.
  """
  q, k, v, log_decay, beta = (x[:, 0] for x in inputs[:5])
  decay = jnp.exp(log_decay)
  by_channel = decay.ndim == beta.ndim + 1
  decay_BGRK1 = decay[..., None] if by_channel else decay[..., None, None]
  decayed = state_BGRKV * decay_BGRK1
  known_BGRV = jnp.einsum("bgrkv,bgk->bgrv", decayed, k)
  update_BGRV = beta[..., None] * (v - known_BGRV)
  new = decayed + jnp.einsum("bgk,bgrv->bgrkv", k, update_BGRV)
  state = jnp.where(writes_B[:, None, None, None, None], new, state_BGRKV)
  return jnp.einsum("bgrkv,bgk->bgrv", state, q)[:, None], state


def chunked(
  inputs: Inputs, state_BGRKV: jax.Array, backend: str = "xla"
) -> tuple[jax.Array, jax.Array]:
  """Returns (outputs [B, L, G, R, V], the state after the last position).

  Args:
    backend: see delta_rule_kernel.choose.
  """
  if backend == "pallas":
    return delta_rule_kernel.chunked(inputs, state_BGRKV)
  L = inputs.q_BLGK.shape[1]
  padded, size = _in_whole_chunks(inputs)
  with model_flops.share(L, padded.q_BLGK.shape[1]):
    chunks = _chunks_of(padded, size)
    outputs, state = _over_chunks(chunks, state_BGRKV)
  return outputs[:, :L], state


def over_devices(inputs: Inputs, axis: str, backend: str = "xla") -> jax.Array:
  """Inside a shard_map: the outputs [B, L, G, R, V] of each device's positions.

  If the state is S before a device's positions, it is M S + T after them. So
  every device first computes its M and T. These are gathered, and give each
  device the state at the beginning of its positions.
  """
  if backend == "pallas":
    with model_flops.counts_as(0, 1):  # A single device would not compute this.
      own_state = _state_before(*delta_rule_kernel.summary(inputs), axis)
    return delta_rule_kernel.chunked(inputs, own_state)[0]
  L = inputs.q_BLGK.shape[1]
  padded, size = _in_whole_chunks(inputs)
  with model_flops.share(L, padded.q_BLGK.shape[1]):
    chunks = _chunks_of(padded, size)
    with model_flops.counts_as(0, 1):
      own_state = _state_before(*_summary(chunks), axis)
    outputs, _ = _over_chunks(chunks, own_state)
  return outputs[:, :L]


def _state_before(
  transition: jax.Array, state: jax.Array, axis: str
) -> jax.Array:
  """The state before a device's positions, from M and T of each device."""
  all_transitions, all_states = jax.lax.all_gather((transition, state), axis)
  before = jnp.zeros_like(state)
  states = [before]
  for i in range(len(all_states) - 1):
    moved = jnp.einsum("bgrkj,bgrjv->bgrkv", all_transitions[i], before)
    before = moved + all_states[i]
    states.append(before)
  return jnp.stack(states)[jax.lax.axis_index(axis)]


def _chunks_of(inputs: Inputs, size: int) -> Any:
  if inputs.log_decay.ndim == inputs.beta_BLGR.ndim + 1:
    return delta_rule_channels.within_chunks(inputs, size)
  return _within_chunks(inputs, size)


def _in_whole_chunks(inputs: Inputs) -> tuple[Inputs, int]:
  """Pads to whole chunks; returns their size too, a power of two.

  Padding neither decays nor changes the state.
  """
  L = inputs.q_BLGK.shape[1]
  size = min(CHUNK, 1 << (L - 1).bit_length())
  more = -L % size
  if not more:
    return inputs, size
  return jax.tree.map(
    lambda x: jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))), inputs
  ), size


def _within_chunks(inputs: Inputs, size: int) -> _Chunks:
  """Everything that does not depend on the state, for all chunks at once."""
  split = functools.partial(delta_rule_channels.split, size)
  q, k = (jnp.moveaxis(split(x), 2, 3) for x in (inputs.q_BLGK, inputs.k_BLGK))
  v, log_decay, beta = (
    jnp.moveaxis(split(x), 2, 4)
    for x in (inputs.v_BLGRV, inputs.log_decay, inputs.beta_BLGR)
  )
  # The decay between two positions is the difference of two sums: no exponent
  # is positive, so that none overflows.
  sums_C = jnp.cumsum(log_decay, axis=-1)
  between_CJ = sums_C[..., :, None] - sums_C[..., None, :]
  sees_CJ = jnp.tril(jnp.ones((size, size), bool))
  from_start_C = sums_C
  if inputs.starts_BL is not None:
    # Number of documents that have begun in the chunk.
    number_C = jnp.cumsum(split(inputs.starts_BL), axis=-1)[:, :, None, None]
    sees_CJ = sees_CJ & (number_C[..., :, None] == number_C[..., None, :])
    from_start_C = jnp.where(number_C == 0, sums_C, -jnp.inf)
  decay_CJ = jnp.exp(jnp.where(sees_CJ, between_CJ, -jnp.inf))
  kept_C = jnp.exp(from_start_C)

  by_key = "nbgck,nbgjk->nbgcj"
  products_CJ = jnp.einsum(by_key, k, k)[:, :, :, None]
  system_CJ = jnp.tril(beta[..., None] * decay_CJ * products_CJ, -1)
  inverse_CJ = triangular.unit_inverse(system_CJ)
  from_values_CJ = inverse_CJ * beta[..., None, :]
  from_keys_CJ = inverse_CJ * (beta * kept_C)[..., None, :]
  return _Chunks(
    q,
    k,
    u_BGRCV=from_values_CJ @ v,
    w_BGRCK=jnp.einsum("nbgrcj,nbgjk->nbgrck", from_keys_CJ, k),
    scores_BGRCJ=decay_CJ * jnp.einsum(by_key, q, k)[:, :, :, None],
    kept_BGRC=kept_C,
    left_BGRC=decay_CJ[..., -1, :],
  )


def _over_chunks(
  chunks: Any, state_BGRKV: jax.Array
) -> tuple[jax.Array, jax.Array]:
  def turn(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
    u_BGRCV = chunk.u_BGRCV - chunk.w_BGRCK @ state
    o_BGRCV = chunk.read(state)
    o_BGRCV += chunk.scores_BGRCJ @ u_BGRCV
    return chunk.next_state(state, u_BGRCV), o_BGRCV

  state, o_NBGRCV = jax.lax.scan(turn, state_BGRKV, chunks)
  o_BNCGRV = jnp.moveaxis(o_NBGRCV, (0, 4), (1, 2))
  B, N, C, *rest = o_BNCGRV.shape
  return o_BNCGRV.reshape(B, N * C, *rest), state


def _summary(chunks: Any) -> tuple[jax.Array, jax.Array]:
  """(M, T) of `over_devices`, [B, G, R, K, K] and [B, G, R, K, V]."""

  def turn(carry: tuple[Any, Any], chunk: Any) -> tuple[Any, None]:
    transition, state = carry
    u_BGRCK = -chunk.w_BGRCK @ transition
    u_BGRCV = chunk.u_BGRCV - chunk.w_BGRCK @ state
    return (
      chunk.next_state(transition, u_BGRCK),
      chunk.next_state(state, u_BGRCV),
    ), None

  _, B, G, R, _, V = chunks.u_BGRCV.shape
  K = chunks.w_BGRCK.shape[-1]
  dtype = chunks.u_BGRCV.dtype
  identity = jnp.broadcast_to(jnp.eye(K, dtype=dtype), (B, G, R, K, K))
  empty = jnp.zeros((B, G, R, K, V), dtype)
  (transition, state), _ = jax.lax.scan(turn, (identity, empty), chunks)
  return transition, state
