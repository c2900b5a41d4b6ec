"""The gated delta rule as a kernel for TPUs (Pallas).

delta_rule.py has the definition. A kernel keeps the state of a few heads in
vector memory and reads one chunk of their positions after the other, so that
nothing but inputs, outputs and, for the backward pass, the state before each
chunk passes through the device's memory. The backward kernel goes through the
chunks in reverse order. It differentiates the same function, `_read_chunk`,
and computes again what the forward kernel did not keep.

`choose` says whether a call of the rule uses the kernels.

Axes: B batch, L length, N chunks, C positions of a chunk, J the same for keys,
G heads of queries and keys of all texts, R heads of values for each, H = G R,
K width of keys, V width of values.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.config import choices
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import triangular

NAMES = ("auto", "pallas", "xla")

_KEY = "config.model.deltanet.backend"

# Positions of a chunk.
_CHUNK = 64

# Heads of values that a kernel reads at a time. Their products are independent,
# so that the matrix units need not wait for the last one.
_HEADS = 8

# The compiler's own limit, 16 MiB, is less than the backward kernel needs.
_VMEM_BYTES = 48 * 2**20

# Whether the kernels run on any device, slowly: for tests.
_INTERPRET = False


class Call(NamedTuple):
  """Properties of a call that decide whether the kernels compute it."""

  platform: str
  splits: bool  # Whether the ambient mesh, if any, splits the batch.
  length: int
  key_dim: int
  value_dim: int
  dtype: str
  by_channel: bool  # Whether the decay differs between channels of a key.

  def __str__(self) -> str:
    decay = ", decay by channel" if self.by_channel else ""
    return (
      f"{self.length} positions, states of {self.key_dim} x {self.value_dim}, "
      f"{self.dtype}{decay}"
    )


def choose(name: str, call: Call) -> str:
  """Returns "pallas" or "xla"; "auto" takes the first where it can compute."""
  reason = _unsupported_because(call)
  if name == "pallas" and reason:
    raise ConfigError(
      f"{_KEY}={name!r} cannot compute {call}: {reason}. Expected 'xla' or "
      "'auto'."
    )
  if name != "auto":
    return name
  if not reason and call.length < _CHUNK:
    reason = f"fewer than the {_CHUNK} positions of a chunk"
  choice = "xla" if reason else "pallas"
  reason = f"pallas: {reason}" if reason else "the fastest on a TPU"
  if choices.note_choice(_KEY, str(call), choice, reason):
    logging.debug("%s: %s for %s (%s).", _KEY, choice, call, reason)
  return choice


def _unsupported_because(call: Call) -> str | None:
  if call.platform != "tpu":
    return f"it needs a TPU, not a {call.platform}"
  if call.by_channel:
    return "its states decay by head, not by channel"
  if call.dtype != "float32":
    return f"it computes in float32, not {call.dtype}"
  if not call.splits:
    return "the mesh does not split the batch"
  return None


def chunked(inputs: Any, state_BGRKV: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The same as delta_rule.chunked, with its Inputs."""

  def locally(*arrays: Any) -> tuple[jax.Array, jax.Array]:
    *inputs, state_B1GRKV, starts_BL = arrays
    rows, L = _rows(starts_BL, *inputs)
    B, _, G, R, K, V = state_B1GRKV.shape
    with model_flops.share(L, rows.v_GRLV.shape[2]):
      o, state = run(rows, state_B1GRKV.reshape(B * G, R, K, V))
    o_BLGRV = jnp.moveaxis(o.reshape(B, G, R, -1, V), 3, 1)[:, :L]
    return o_BLGRV, state.reshape(state_B1GRKV.shape)

  *arrays, starts_BL = inputs
  state_B1GRKV = state_BGRKV[:, None]  # Heads are dimension 2 of all arrays.
  o_BLGRV, state_B1GRKV = sharding.split_batch(
    locally, *arrays, state_B1GRKV, starts_BL, by_heads=6
  )
  return o_BLGRV, state_B1GRKV[:, 0]


def summary(inputs: Any) -> tuple[jax.Array, jax.Array]:
  """M, [B, G, R, K, K], and T, [B, G, R, K, V], of delta_rule.over_devices."""
  B, L, G, R, V = inputs.v_BLGRV.shape
  K = inputs.k_BLGK.shape[-1]
  zeros = functools.partial(jnp.zeros, dtype=inputs.v_BLGRV.dtype)
  identity = jnp.eye(K, dtype=inputs.v_BLGRV.dtype)
  no_values = inputs._replace(v_BLGRV=zeros((B, L, G, R, K)))
  transition = jnp.broadcast_to(identity, (B, G, R, K, K))
  _, transition = chunked(no_values, transition)
  _, state = chunked(inputs, zeros((B, G, R, K, V)))
  return transition, state


class Rows(NamedTuple):
  """Inputs of the kernels, in whole chunks."""

  q_GLK: jax.Array
  k_GLK: jax.Array
  v_GRLV: jax.Array
  # Sums of the logarithms of decays from the chunk's start on.
  sums_GRN1C: jax.Array
  beta_GRN1C: jax.Array
  # Number of documents that have begun in the chunk.
  number_GRN1C: jax.Array


def _rows(
  starts_BL: jax.Array | None,
  q_BLGK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGRV: jax.Array,
  log_decay_BLGR: jax.Array,
  beta_BLGR: jax.Array,
) -> tuple[Rows, int]:
  """Returns (inputs by head, padded to whole chunks; the length before)."""
  B, L, G, R, V = v_BLGRV.shape
  N = -(-L // _CHUNK)
  if starts_BL is None:
    starts_BL = jnp.zeros((B, L), bool)

  def by_head(x: jax.Array, axis: int = 3) -> jax.Array:
    """Pads to whole chunks and moves the positions to an axis."""
    more = ((0, 0), (0, N * _CHUNK - L), *[(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(jnp.pad(x, more), 1, axis)

  def sums(x: jax.Array) -> jax.Array:
    """[B, G, R, N C], summed within chunks."""
    return jnp.cumsum(x.reshape(*x.shape[:-1], N, _CHUNK), axis=-1)

  q, k = (
    by_head(x, 2).reshape(B * G, N * _CHUNK, -1) for x in (q_BLGK, k_BLGK)
  )
  starts_BL11 = starts_BL.astype(v_BLGRV.dtype)[..., None, None]
  number = jnp.broadcast_to(sums(by_head(starts_BL11)), (B, G, R, N, _CHUNK))
  positions = B * G, R, N, 1, _CHUNK
  return Rows(
    q,
    k,
    by_head(v_BLGRV).reshape(B * G, R, N * _CHUNK, V),
    sums(by_head(log_decay_BLGR)).reshape(positions),
    by_head(beta_BLGR).reshape(positions),
    number.reshape(positions),
  ), L


@jax.custom_vjp
def run(rows: Rows, state_GRKV: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (outputs [G, R, L, V], the state after the last position)."""
  outputs, state = _forward(rows, state_GRKV, keeps_states=False)
  return outputs, state


def _run_forward(rows: Rows, state_GRKV: jax.Array) -> tuple[Any, Any]:
  outputs, state, states = _forward(rows, state_GRKV, keeps_states=True)
  return (outputs, state), (rows, states)


def _run_backward(kept: Any, gradients: Any) -> tuple[Any, Any]:
  return _backward(*kept, *gradients)


run.defvjp(_run_forward, _run_backward)


def _read_chunk(
  q_GCK: jax.Array,
  k_GCK: jax.Array,
  v_HCV: jax.Array,
  sums_H1C: jax.Array,
  beta_H1C: jax.Array,
  number_H1C: jax.Array,
  state_HKV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns (outputs [H, C, V] of a chunk, the state after it)."""
  H, C, _ = v_HCV.shape
  row, column = (
    jax.lax.broadcasted_iota(jnp.int32, (1, C, C), axis) for axis in (1, 2)
  )

  def as_column(x_H1C: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(row == column, x_H1C, 0), axis=2, keepdims=True)

  def last(x_H1C: jax.Array) -> jax.Array:
    is_last = column[:, :1] == C - 1
    return jnp.sum(jnp.where(is_last, x_H1C, 0), axis=2, keepdims=True)

  def exp_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.where(condition, x, -jnp.inf))

  def of_values(x_G: jax.Array) -> jax.Array:
    """Repeats what heads of values share."""
    G, *sizes = x_G.shape
    groups = jnp.broadcast_to(x_G[:, None], (G, H // G, *sizes))
    return groups.reshape(H, *sizes)

  sums, beta, number = map(as_column, (sums_H1C, beta_H1C, number_H1C))
  sees = (row >= column) & (number == number_H1C)
  decay_HCJ = exp_where(sees, sums - sums_H1C)
  kept_HC1 = exp_where(number == 0, sums)
  kept_H11 = exp_where(last(number_H1C) == 0, last(sums_H1C))
  left_HC1 = exp_where(number == last(number_H1C), last(sums_H1C) - sums)

  keys_HCJ = of_values(_product(k_GCK, k_GCK, "gck,gjk->gcj"))
  system_HCJ = jnp.where(row > column, beta * decay_HCJ * keys_HCJ, 0)
  with model_flops.counts_as(0, 1):  # With small blocks it is hardly any work.
    inverse_HCJ = triangular.unit_inverse_by_masks(system_HCJ)
  queries_HCJ = of_values(_product(q_GCK, k_GCK, "gck,gjk->gcj"))

  q_HCK, k_HCK = of_values(q_GCK), of_values(k_GCK)
  known_HCV = kept_HC1 * _product(k_HCK, state_HKV, "hck,hkv->hcv")
  errors_HCV = beta * (v_HCV - known_HCV)
  u_HCV = _product(inverse_HCJ, errors_HCV, "hcj,hjv->hcv")
  o_HCV = kept_HC1 * _product(q_HCK, state_HKV, "hck,hkv->hcv")
  o_HCV += _product(decay_HCJ * queries_HCJ, u_HCV, "hcj,hjv->hcv")
  new_HKV = _product(k_HCK, left_HC1 * u_HCV, "hck,hcv->hkv")
  return o_HCV, kept_H11 * state_HKV + new_HKV


def _product(x: jax.Array, y: jax.Array, axes: str) -> jax.Array:
  return jnp.einsum(axes, x, y, preferred_element_type=x.dtype)


class _Grid(NamedTuple):
  """Blocks of arrays: those of some heads, one chunk after the other."""

  size: tuple[int, int]  # Numbers of blocks of heads, and of chunks.
  rows: list[Any]  # Blocks of the fields of Rows.
  state: Any  # Block of a state.
  states: Any  # Block of the states before each chunk.

  def call(self, kernel: Any, arrays: Any, outputs: Any, specs: Any) -> Any:
    """Calls a kernel.

    Args:
      arrays: (arrays, their blocks).
      outputs: arrays, or others with their shapes and dtypes.
      specs: blocks of the outputs.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    in_arrays, in_specs = arrays
    return pl.pallas_call(
      kernel,
      grid=self.size,
      in_specs=in_specs,
      out_specs=specs,
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=_VMEM_BYTES,
      ),
      interpret=_INTERPRET,
      name=f"delta_rule_{kernel.__name__}",
    )(*in_arrays)


def _grid(rows: Rows, reverse: bool) -> _Grid:
  from jax.experimental import pallas as pl

  G, R, N, _, C = rows.beta_GRN1C.shape
  K, V = rows.k_GLK.shape[-1], rows.v_GRLV.shape[-1]
  fitting = range(1, max(1, _HEADS // R) + 1)
  heads = max(n for n in fitting if G % n == 0)

  def chunk(n: Any) -> Any:
    return N - 1 - n if reverse else n

  by_key = pl.BlockSpec((heads, C, K), lambda g, n: (g, chunk(n), 0))
  by_value = pl.BlockSpec((heads, R, C, V), lambda g, n: (g, 0, chunk(n), 0))
  by_position = pl.BlockSpec(
    (heads, R, None, 1, C), lambda g, n: (g, 0, chunk(n), 0, 0)
  )
  state = pl.BlockSpec((heads, R, K, V), lambda g, n: (g, 0, 0, 0))
  states = pl.BlockSpec(
    (None, heads, R, K, V), lambda g, n: (chunk(n), g, 0, 0, 0)
  )
  specs = [by_key, by_key, by_value, *[by_position] * 3]
  return _Grid((G // heads, N), specs, state, states)


def _of_heads(refs: Any) -> list[jax.Array]:
  """Reads blocks; merges G and R of those that have both."""
  q, k, *others = (ref[...] for ref in refs)
  return [q, k, *(x.reshape(-1, *x.shape[2:]) for x in others)]


def _forward(
  rows: Rows, state_GRKV: jax.Array, keeps_states: bool
) -> list[jax.Array]:
  """[outputs, last state, perhaps states before each chunk [N, G, R, K, V]]."""
  from jax.experimental import pallas as pl

  def forward(*refs: Any) -> None:
    inputs, first, (o, state, *states) = refs[:6], refs[6], refs[7:]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
      state[...] = first[...]

    for before in states:
      before[...] = state[...]
    o_HCV, new_HKV = _read_chunk(*_of_heads([*inputs, state]))
    o[...] = o_HCV.reshape(o.shape)
    state[...] = new_HKV.reshape(state.shape)

  grid = _grid(rows, reverse=False)
  arrays = [*rows, state_GRKV], [*grid.rows, grid.state]
  outputs: list[Any] = [rows.v_GRLV, state_GRKV]
  specs = [grid.rows[2], grid.state]
  if keeps_states:
    shape = (grid.size[1], *state_GRKV.shape)
    outputs.append(jax.ShapeDtypeStruct(shape, state_GRKV.dtype))
    specs.append(grid.states)
  results: list[jax.Array] = grid.call(forward, arrays, outputs, specs)
  return results


def _backward(
  rows: Rows,
  states_NGRKV: jax.Array,
  do_GRLV: jax.Array,
  dstate_GRKV: jax.Array,
) -> tuple[Rows, jax.Array]:
  """Gradients of the rows and of the first state, from those of the results."""
  from jax.experimental import pallas as pl

  def backward(*refs: Any) -> None:
    # The last output is the gradient of the state after the chunk.
    inputs, others, (*results, dstate) = refs[:6], refs[6:9], refs[9:]
    before, do, last = others

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
      dstate[...] = last[...]

    *arrays, do_HCV, dstate_HKV = _of_heads([*inputs, before, do, dstate])
    read: Any = _read_chunk  # The types of jax.vjp do not allow its result.
    _, transposed = jax.vjp(read, *arrays)
    for result, x in zip((*results, dstate), transposed((do_HCV, dstate_HKV))):
      result[...] = x.reshape(result.shape)

  grid = _grid(rows, reverse=True)
  arrays = (
    [*rows, states_NGRKV, do_GRLV, dstate_GRKV],
    [*grid.rows, grid.states, grid.rows[2], grid.state],
  )
  outputs = [*rows, dstate_GRKV]
  specs = [*grid.rows, grid.state]
  *drows, dstate = grid.call(backward, arrays, outputs, specs)
  return Rows(*drows), dstate
