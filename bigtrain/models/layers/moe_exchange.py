"""Brings tokens to the devices of their experts, and results back.

Each of the n devices of an axis has E / n whole experts. Every choice of a
token is served, for any routing, but a device's buffer has room only for
`buffer_factor` times its even share of rows, not for the worst case. What does
not fit travels in further rounds with the same buffer. They are rare, and their
number is that of the fullest device, which all devices know.

A device sorts its choices by expert. So the rows of each sender for each expert
are a slice of the sender's array, and every device can compute from the numbers
of rows where each slice belongs in the receiver's array. There the experts
follow each other, and each begins with a new block of T rows. A round has the
part of this array that fits into the buffer.

Axes: D model width, F hidden width, E experts, J experts of a token. On a
device: t tokens, K = t J choices, S rows of the buffer; n devices, i senders, o
experts of a device, Q rows from one device to another.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import moe_experts
from bigtrain.models.layers.moe_experts import Experts

# XLA's CPU compiler has no ragged all-to-all.
_RAGGED = ("tpu", "gpu")


class Exchange(NamedTuple):
  """Constants of the exchange."""

  axis: str
  n: int  # Devices of the axis.
  E: int
  experts: Experts
  buffer_factor: float
  varying: tuple[str, ...]  # Axes whose devices compute different things.

  def without_kernels(self) -> "Exchange":
    """For rare rounds: each kernel takes seconds to compile."""
    return self._replace(experts=self.experts._replace(kernels=False))

  def served(
    self,
    x_tD: jax.Array,
    expert_tJ: jax.Array,
    keep_tJF: jax.Array | None,
    weights: Mapping[str, jax.Array],
  ) -> tuple[jax.Array, jax.Array]:
    """Serves all choices except those of expert E, whose results are zeros.

    Returns:
      ([t, J, D], the number of rounds of the fullest device).
    """
    t, J = expert_tJ.shape
    K = expert_tJ.size
    sizes = _sizes(self, t, J)
    expert_K = expert_tJ.reshape(K)
    order_K = jnp.argsort(expert_K, stable=True)
    back_K = jnp.zeros_like(order_K).at[order_K].set(jnp.arange(K))
    plan = _plan(self, sizes, expert_K)
    bits_KB = None
    if keep_tJF is not None:
      # A bit for each hidden unit, in the order in which a single device draws
      # them.
      bits_KB = jnp.packbits(keep_tJF.reshape(K, -1), axis=-1)
      bits_KB = jnp.take(bits_KB, order_K, axis=0)
    all_inside = moe_experts.Zeros(results=False, gradients=False)
    x_KD = moe_experts.rows(
      x_tD, order_K // J, back_K.reshape(t, J).T, all_inside
    )
    y_KD = _in_rounds(self, sizes, x_KD, weights, bits_KB, plan)
    y_KD = moe_experts.rows(y_KD, back_K, order_K[None], all_inside)
    return y_KD.reshape(t, J, -1), plan.rounds


class _Sizes(NamedTuple):
  """Sizes that are known when the program is compiled."""

  K: int  # Choices of this device's tokens.
  T: int  # Rows of a block.
  S: int  # Rows of the buffer.
  Q: int  # The most rows from one device to another in a round.
  most_rounds: int


def _sizes(exchange: Exchange, t: int, J: int) -> _Sizes:
  own = exchange.E // exchange.n
  K = t * J
  T = moe_experts.rows_of_blocks(exchange.experts, K, own)
  Q = t * min(J, own)  # A token has at most `own` experts on one device.
  # The last block of each expert may be incomplete.
  most = math.ceil(exchange.n * Q / T) * T + own * T
  S = math.ceil(exchange.buffer_factor * K / T) * T + own * T
  S = min(S, most)
  return _Sizes(K=K, T=T, S=S, Q=min(Q, S), most_rounds=math.ceil(most / S))


class _Plan(NamedTuple):
  """Where the slices of each sender for each expert are.

  The same numbers on all devices of the axis.
  """

  size_nE: jax.Array
  at_sender_nE: jax.Array  # First row among the sender's K.
  at_receiver_nE: jax.Array  # First row among all rows of the receiver.
  # First row of each expert among all rows of its device, and the next one
  # behind its last block.
  begin_E: jax.Array
  end_E: jax.Array
  rounds: jax.Array  # Of the fullest device of the mesh.


def _plan(exchange: Exchange, sizes: _Sizes, expert_K: jax.Array) -> _Plan:
  E = exchange.E
  T = sizes.T
  # At the senders, the experts' slices follow each other.
  size_E = jnp.sum(jax.nn.one_hot(expert_K, E, dtype=jnp.int32), axis=0)
  size_nE = jax.lax.all_gather(size_E, exchange.axis)
  at_sender_nE = jnp.cumsum(size_nE, axis=1) - size_nE
  # At a receiver, its experts follow each other, in whole blocks. The slices of
  # an expert are in the order of their senders.
  blocks_E = -(-jnp.sum(size_nE, axis=0) // T)  # Rounded up.
  blocks_no = blocks_E.reshape(exchange.n, -1)
  end_no = jnp.cumsum(blocks_no, axis=1) * T
  end_E = end_no.reshape(E)
  begin_E = end_E - blocks_E * T
  from_earlier_nE = jnp.cumsum(size_nE, axis=0) - size_nE
  rounds = -(-jnp.max(end_no) // sizes.S)
  return _Plan(
    size_nE=size_nE,
    at_sender_nE=at_sender_nE,
    at_receiver_nE=begin_E + from_earlier_nE,
    begin_E=begin_E,
    end_E=end_E,
    # Devices with the same tokens must agree too.
    rounds=jnp.maximum(jax.lax.pmax(rounds, exchange.varying), 1),
  )


class _Slices(NamedTuple):
  """Slices of rows that travel, by the device at their other end."""

  size: jax.Array
  at_sender: jax.Array
  at_receiver: jax.Array

  def reversed(self) -> "_Slices":
    """The same slices on their way back."""
    return _Slices(self.size, self.at_receiver, self.at_sender)


class _Round(NamedTuple):
  """What travels in a round."""

  sent: _Slices  # From this device, [E].
  received: _Slices  # By this device, [n * o].
  size_o: jax.Array  # Rows of each expert of this device, in whole blocks.


def _round_of(
  exchange: Exchange, sizes: _Sizes, plan: _Plan, number: jax.Array | int
) -> _Round:
  """What travels in a round: of each receiver's rows, the next S."""
  S = sizes.S
  own = exchange.E // exchange.n
  first = number * S

  def inside(at: jax.Array) -> jax.Array:
    """Places among all rows of a receiver, as places in its buffer."""
    return jnp.clip(at - first, 0, S)

  begin_nE = inside(plan.at_receiver_nE)
  size_nE = inside(plan.at_receiver_nE + plan.size_nE) - begin_nE
  # Parts of slices before the round have been sent.
  sent_nE = jnp.clip(first - plan.at_receiver_nE, 0, plan.size_nE)
  all_nE = _Slices(size_nE, plan.at_sender_nE + sent_nE, begin_nE)
  me = jax.lax.axis_index(exchange.axis)

  def mine(x: jax.Array) -> jax.Array:
    """The entries of this device's experts."""
    return jax.lax.dynamic_slice_in_dim(x, me * own, own, axis=-1)

  return _Round(
    sent=jax.tree.map(lambda x_nE: x_nE[me], all_nE),
    received=jax.tree.map(lambda x_nE: mine(x_nE).reshape(-1), all_nE),
    size_o=mine(inside(plan.end_E) - inside(plan.begin_E)),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(
  exchange: Exchange,
  sizes: _Sizes,
  x_KD: jax.Array,
  weights: Mapping[str, jax.Array],
  bits_KB: jax.Array | None,
  plan: _Plan,
) -> jax.Array:
  """The experts' results of all rows, in as many rounds as they need.

  Rounds after the first keep nothing for the backward pass, which repeats them.
  """
  y_KD = _one_round(exchange, sizes, bits_KB, plan, 0, x_KD, weights)
  return _with_further_rounds(
    exchange, sizes, y_KD, x_KD, weights, bits_KB, plan
  )


def _with_further_rounds(
  exchange: Exchange,
  sizes: _Sizes,
  y_KD: jax.Array,
  x_KD: jax.Array,
  weights: Mapping[str, jax.Array],
  bits_KB: jax.Array | None,
  plan: _Plan,
) -> jax.Array:
  """Adds the results of the rounds after the first."""
  exchange = exchange.without_kernels()

  def add(number: jax.Array, y_KD: jax.Array) -> jax.Array:
    return y_KD + _one_round(
      exchange, sizes, bits_KB, plan, number, x_KD, weights
    )

  return _further_rounds(sizes, plan, add, y_KD)


def _in_rounds_forward(
  exchange: Exchange,
  sizes: _Sizes,
  x_KD: jax.Array,
  weights: Mapping[str, jax.Array],
  bits_KB: jax.Array | None,
  plan: _Plan,
) -> tuple[jax.Array, Any]:
  first = functools.partial(_one_round, exchange, sizes, bits_KB, plan, 0)
  y_KD, backward = jax.vjp(first, x_KD, weights)
  y_KD = _with_further_rounds(
    exchange, sizes, y_KD, x_KD, weights, bits_KB, plan
  )
  return y_KD, (backward, x_KD, weights, bits_KB, plan)


def _in_rounds_backward(
  exchange: Exchange, sizes: _Sizes, kept: Any, grad_KD: jax.Array
) -> tuple[Any, ...]:
  backward, x_KD, weights, bits_KB, plan = kept
  exchange = exchange.without_kernels()

  def add(number: jax.Array, grads: Any) -> Any:
    one = functools.partial(_one_round, exchange, sizes, bits_KB, plan, number)
    _, backward = jax.vjp(one, x_KD, weights)
    return jax.tree.map(jnp.add, grads, backward(grad_KD))

  grads = _further_rounds(sizes, plan, add, backward(grad_KD))
  return (*grads, None, None)  # `bits_KB` and `plan` are whole numbers.


_in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)


def _further_rounds(sizes: _Sizes, plan: _Plan, add: Any, total: Any) -> Any:
  """Calls add(number, total) for the rounds after the first, if any."""
  if sizes.most_rounds == 1:
    return total
  with model_flops.rare():
    _, total = jax.lax.while_loop(
      lambda carry: carry[0] < plan.rounds,
      lambda carry: (carry[0] + 1, add(*carry)),
      (jnp.ones((), jnp.int32), total),
    )
  return total


def _one_round(
  exchange: Exchange,
  sizes: _Sizes,
  bits_KB: jax.Array | None,
  plan: _Plan,
  number: jax.Array | int,
  x_KD: jax.Array,
  weights: Mapping[str, jax.Array],
) -> jax.Array:
  """To the experts and back; zeros for the rows of other rounds."""
  T = sizes.T
  sent, received, size_o = _round_of(exchange, sizes, plan, number)
  there = _Way(exchange.axis, X=sizes.K, Y=sizes.S, Q=sizes.Q)
  x_SD = _exchange(there, x_KD, sent, received)
  keep_SF = None
  if bits_KB is not None:
    bits_SB = _exchange(there, bits_KB, sent, received)
    F = weights["up"].shape[-1]
    keep_SF = jnp.unpackbits(bits_SB, axis=-1, count=F).astype(bool)
  y_SD = moe_experts.run_blocks(
    exchange.experts, T, x_SD, size_o, keep_SF, weights, useful=sizes.K
  )
  return _exchange(there.back(), y_SD, received.reversed(), sent.reversed())


class _Way(NamedTuple):
  """The sizes of an exchange, to the experts or back."""

  axis: str  # Of the mesh.
  X: int  # Rows at a sender.
  Y: int  # Rows at a receiver.
  Q: int  # The most rows from one device to another.

  def back(self) -> "_Way":
    return self._replace(X=self.Y, Y=self.X)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(
  way: _Way, x_XD: jax.Array, sent: _Slices, received: _Slices
) -> jax.Array:
  """Sends slices of rows; returns [Y, D], with zeros where none arrive."""
  if sharding.device()[0] not in _RAGGED:
    return _exchange_padded(way, x_XD, sent, received)
  # On a TPU a row should be whole tiles in memory: otherwise XLA takes four
  # times as long to fill the buffer with zeros.
  D = x_XD.shape[1]
  row = (D // 128, 128) if D % 128 == 0 else (D,)
  x = x_XD.reshape(-1, *row)
  y = jax.lax.ragged_all_to_all(
    x,
    jnp.zeros_like(x, shape=(way.Y, *row)),
    sent.at_sender,
    sent.size,
    sent.at_receiver,
    received.size,
    axis_name=way.axis,
  )
  return y.reshape(way.Y, D)


def _exchange_padded(
  way: _Way, x_XD: jax.Array, sent: _Slices, received: _Slices
) -> jax.Array:
  """The same by an all-to-all of Q rows from each device to each other one."""
  n = jax.lax.axis_size(way.axis)
  Q = way.Q

  def packed(slices: _Slices) -> jax.Array:
    """First row of each slice among all for, or from, a device: [n, o]."""
    size_no = slices.size.reshape(n, -1)
    return jnp.cumsum(size_no, axis=1) - size_no

  # The sender packs its slices for each device one behind the other.
  sources = functools.partial(_sources, Q, len(x_XD))
  index_nQ = jax.vmap(sources)(
    packed(sent), sent.at_sender.reshape(n, -1), sent.size.reshape(n, -1)
  )
  x_nQD = _take(x_XD, index_nQ)
  x_nQD = jax.lax.all_to_all(x_nQD, way.axis, 0, 0, tiled=True)
  # The receiver copies each slice from there to its place.
  starts_no = jnp.arange(n)[:, None] * Q + packed(received)
  index_Y = _sources(
    way.Y, n * Q, received.at_receiver, starts_no.reshape(-1), received.size
  )
  return _take(x_nQD.reshape(n * Q, -1), index_Y)


def _sources(
  rows: int, none: int, to: jax.Array, source: jax.Array, size: jax.Array
) -> jax.Array:
  """Where each row comes from when slices are copied, [rows].

  Args:
    rows: number of rows of the copy.
    none: the result for rows that are in no slice.
    to, source, size: of each slice, its first row in the copy, its first row in
      the original, and its number of rows.
  """
  offset = jnp.arange(rows)[:, None] - to
  inside = (offset >= 0) & (offset < size)
  index = jnp.sum(jnp.where(inside, source + offset, 0), axis=-1)
  return jnp.where(jnp.any(inside, axis=-1), index, none)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _exchange_backward(
  way: _Way, slices: tuple[_Slices, _Slices], grad_YD: jax.Array
) -> tuple[jax.Array | None, ...]:
  sent, received = slices
  grad_XD = _exchange(way.back(), grad_YD, received.reversed(), sent.reversed())
  return grad_XD, None, None


def _exchange_forward(
  way: _Way, x_XD: jax.Array, sent: _Slices, received: _Slices
) -> tuple[jax.Array, tuple[_Slices, _Slices]]:
  return _exchange(way, x_XD, sent, received), (sent, received)


_exchange.defvjp(_exchange_forward, _exchange_backward)
