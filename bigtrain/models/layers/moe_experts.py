"""The experts of a layer, on a device's tokens, sorted by expert.

`run` sorts the tokens, computes, and brings the results back into order. On
TPUs, kernels of jax's Pallas library (megablox) multiply groups of rows of any
size (`_groups`). Elsewhere rows are put into blocks of one expert each
(`_blocks`), which a loop multiplies (`_times`). `run_blocks` computes for rows
that are in such blocks already. `rows` reads rows of an array by their indices.
Its gradient reads rows too, because a scatter is slow on accelerators.

Axes: B batch, L length, D model width, F hidden width, E experts, J experts of
a token, t tokens, R choices of all tokens, N blocks of T rows, S = N T slots;
in `rows` X rows, Y results and Z results of a row.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import mlp


class Routing(NamedTuple):
  """The experts of each token, best first, and weights of their outputs."""

  expert_BLJ: jax.Array
  weight_BLJ: jax.Array
  # Score of the first choice, if it decides whose choices are dropped.
  priority_BL: jax.Array | None = None


class Experts(NamedTuple):
  """The experts' MLPs, see mlp.Options, and their dropout, if any."""

  kind: str
  dim: int  # F.
  rate: float  # Of dropout.
  key: jax.Array | None  # Of dropout; None without it.
  clip: mlp.Clip | None = None
  kernels: bool = False  # Whether megablox may multiply.

  def keep(self, *shape: int) -> jax.Array | None:
    """Draws which hidden units dropout keeps: bools [*shape, F]."""
    if self.key is None:
      return None
    return jax.random.bernoulli(self.key, 1 - self.rate, (*shape, self.dim))

  def run(
    self,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    products: "Products",
    keep: jax.Array | None,
  ) -> jax.Array:
    def dense(x: jax.Array, name: str) -> jax.Array:
      y = products.times(x, weights[name])
      bias = weights.get(f"{name}_bias")
      return y if bias is None else y + products.spread(bias)

    up = dense(x, "up")
    gate = dense(x, "gate") if "gate" in weights else None
    h = mlp.hidden_units(self.kind, self.clip, up, gate)
    if keep is not None:
      h = jnp.where(keep, h / (1 - self.rate), 0)
    return dense(h, "down")


class Products(NamedTuple):
  """A dense layer of the experts, on rows: times(x, kernel) + spread(bias)."""

  times: Callable[[jax.Array, jax.Array], jax.Array]
  spread: Callable[[jax.Array], jax.Array]


def block_size(choices: int, num_experts: int) -> int:
  """Rows of a block: large ones are efficient, but leave empty rows.

  >>> block_size(16_384, 8), block_size(100, 8)
  (512, 8)
  """
  # A quarter of an expert's mean share: then empty rows, half a block for each
  # expert on average, are an eighth of all. A power of 2 from 8 to 1,024.
  most = max(choices // (4 * num_experts), 8)
  return min(1024, 2 ** (most.bit_length() - 1))


class _Static(NamedTuple):
  """Constants of `_times` in the compiled program."""

  rows: int  # Number of rows that the mathematics needs.
  skips: bool  # Whether empty blocks are skipped.

  def counted(self, x_NTD: jax.Array) -> contextlib.AbstractContextManager[Any]:
    return model_flops.counts_as(self.rows, x_NTD.shape[0] * x_NTD.shape[1])


def tile_rows(R: int, num_experts: int) -> int:
  """Rows of megablox's tiles for a product of R rows.

  It multiplies a tile once for each expert that has rows in it, so small tiles
  waste less. But a tile waits for its weights if it has less than about 200
  rows, and the gradient of the weights has work that depends only on their
  size. By the compiler's schedules for a v5p, 128 rows are best below 170 rows
  per expert, and 512 above 3,000.

  >>> [tile_rows(R, 256) for R in (32_768, 65_536, 1_048_576)]
  [128, 256, 512]
  """
  share = R // num_experts
  if share <= 128:
    return 128
  return 256 if share <= 2048 else 512


class _Tiles(NamedTuple):
  """Sizes of megablox's tiles."""

  rows: int

  def __call__(self, R: int, D: int, F: int) -> tuple[int, int, int]:
    """Rows, and columns of both sides, for megablox."""
    return self.rows, _columns(D), _columns(F)


def _columns(width: int) -> int:
  """Columns of a tile: about 1,024, and few beyond the end of the matrix.

  >>> [_columns(width) for width in (512, 704, 1408, 2816, 7168)]
  [512, 704, 1408, 1408, 1024]
  """
  if width <= 1024:
    return width
  # The matrix units have 128 columns.
  sizes = range(512, 1408 + 1, 128)
  return min(sizes, key=lambda n: (-(-width // n) * n, abs(n - 1024)))


# Whether megablox runs on any device, interpreted and slow: for tests.
_INTERPRET = False


def by_kernels(batch_size: int) -> bool:
  """Whether megablox may serve a layer; XLA cannot split its kernels."""
  whole = sharding.splits(batch_size) and not sharding.in_stage()
  return sharding.device()[0] == "tpu" and whole


def run(
  experts: Experts,
  x_tD: jax.Array,
  expert_tJ: jax.Array,
  keep_tJF: jax.Array | None,
  weights: Mapping[str, jax.Array],
) -> jax.Array:
  """Applies its experts to each token.

  Args:
    expert_tJ: int, experts of each token; E for none.

  Returns:
    [t, J, D]; any finite numbers for no expert, with a gradient of zero.
  """
  J = expert_tJ.shape[1]
  E, R = len(weights["up"]), expert_tJ.size

  # A slot for each choice, sorted by expert.
  expert_R = expert_tJ.reshape(R)
  order_R = jnp.argsort(expert_R, stable=True)
  sizes_E = jnp.sum(jax.nn.one_hot(expert_R, E, dtype=jnp.int32), axis=0)
  kernels = experts.kernels and R % tile_rows(R, E) == 0
  sort = _groups if kernels else _blocks
  choice_S, slot_R, shape, products = sort(expert_R, order_R, sizes_E)

  # Empty slots have any token, whose result is not used. The last block is
  # empty, for choices without an expert.
  x_SD = rows(
    x_tD,
    choice_S // J,
    slot_R.reshape(-1, J).T,
    Zeros(results=False, gradients=False),
  )
  keep = None
  if keep_tJF is not None:
    keep = jnp.take(
      keep_tJF.reshape(R, -1), choice_S, axis=0, mode="fill", fill_value=0
    ).reshape(*shape, -1)
  y = experts.run(x_SD.reshape(*shape, -1), weights, products, keep)

  # Back to the order of the choices.
  y_SD = y.reshape(len(x_SD), -1)
  zeros = Zeros(results=False, gradients=not kernels)
  y_RD = rows(y_SD, slot_R, choice_S[None], zeros)
  return y_RD.reshape(*expert_tJ.shape, -1)


def rows_of_blocks(experts: Experts, R: int, E: int) -> int:
  """Rows T of the blocks for `run_blocks`, if E experts share R rows."""
  return tile_rows(R, E) if experts.kernels else block_size(R, E)


def run_blocks(
  experts: Experts,
  T: int,
  x_SD: jax.Array,
  sizes_E: jax.Array,
  keep_SF: jax.Array | None,
  weights: Mapping[str, jax.Array],
  *,
  useful: int,
) -> jax.Array:
  """Applies its expert to each row; rows are in blocks of one expert each.

  Args:
    T: rows of a block, see `rows_of_blocks`; divides S.
    sizes_E: number of rows of each expert, with the empty ones that complete
      its last block. The rows behind the last expert are empty too.
    useful: expected number of rows that are not empty.

  Returns:
    [S, D]; of empty rows anything, also infinite or no numbers, and then with a
    gradient of anything. Where the gradient is zero in the rows of experts, it
    stays so.
  """
  S, E = len(x_SD), len(sizes_E)
  ends_E = jnp.cumsum(sizes_E)
  shape: tuple[int, ...] = (S,)
  if experts.kernels:
    expert_S = jnp.sum(jnp.arange(S)[:, None] >= ends_E, axis=1)
    inside_S1 = (expert_S < E)[:, None]
    products = Products(
      lambda x_SD, kernel: _gmm(T, useful, x_SD, kernel, sizes_E),
      # Kernels leave anything in the rows behind the last expert, which must
      # not get into the sums of gradients.
      lambda bias_EF: jnp.where(inside_S1, _of_rows(bias_EF, expert_S), 0),
    )
  else:
    shape = (S // T, T)
    begins_N = jnp.arange(S // T) * T
    expert_N = jnp.sum(begins_N[:, None] >= ends_E, axis=1)
    products = _products_of_blocks(_Static(useful, True), expert_N, E)
  if keep_SF is not None:
    keep_SF = keep_SF.reshape(*shape, -1)
  y = experts.run(x_SD.reshape(*shape, -1), weights, products, keep_SF)
  return y.reshape(S, -1)


class _Sorted(NamedTuple):
  """Choices in slots, sorted by expert, and how the experts multiply them."""

  choice_S: jax.Array  # Each slot's choice; R for none.
  slot_R: jax.Array  # Each choice's slot.
  shape: tuple[int, ...]  # Of the slots: (S,), or blocks (N, T).
  products: Products


def _groups(
  expert_R: jax.Array, order_R: jax.Array, sizes_E: jax.Array
) -> _Sorted:
  """One slot for each choice. Kernels multiply groups of slots."""
  R, E = len(order_R), len(sizes_E)
  slot_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(R))
  sorted_R = jnp.take(expert_R, order_R)
  # Kernels do not write the rows after the last group. Padding, with a gradient
  # of zero, belongs to it.
  sizes_E = sizes_E.at[-1].add(R - jnp.sum(sizes_E))
  T = tile_rows(R, E)
  products = Products(
    lambda x_RD, kernel: _gmm(T, R, x_RD, kernel, sizes_E),
    lambda bias_EF: _of_rows(bias_EF, sorted_R),
  )
  return _Sorted(order_R, slot_R, (R,), products)


def _gmm(
  T: int,
  useful: int,
  x_RD: jax.Array,
  kernel_EDF: jax.Array,
  sizes_E: jax.Array,
) -> jax.Array:
  """Multiplies groups of rows; does not write those after the last one."""
  from jax.experimental.pallas.ops.tpu import megablox

  with model_flops.counts_as(useful, len(x_RD)):
    y_RF: jax.Array = megablox.gmm(
      x_RD, kernel_EDF, sizes_E, x_RD.dtype, _Tiles(T), interpret=_INTERPRET
    )
  return y_RF


def _blocks(
  expert_R: jax.Array, order_R: jax.Array, sizes_E: jax.Array
) -> _Sorted:
  """Blocks of one expert each."""
  R, E = len(order_R), len(sizes_E)
  T = block_size(R, E)
  N = R // T + E  # The most blocks that R rows can need.
  blocks_E = -(-sizes_E // T)  # Rounded up.
  ends_E = jnp.cumsum(blocks_E)
  # Place of each sorted row in the blocks, or beyond them for padding: its rank
  # among all rows, moved by the empty rows in the blocks before it.
  first_E = (ends_E - blocks_E) * T - (jnp.cumsum(sizes_E) - sizes_E)
  sorted_R = jnp.take(expert_R, order_R)
  first_R = jnp.take(first_E, sorted_R, mode="fill", fill_value=N * T)
  place_R = jnp.arange(R) + first_R
  # The expert of each block; blocks at the end may be empty.
  expert_N = jnp.sum(jnp.arange(N)[:, None] >= ends_E, axis=1)

  choice_S = jnp.full(N * T, R).at[place_R].set(order_R, mode="drop")
  slot_R = jnp.zeros_like(place_R).at[order_R].set(place_R)
  products = _products_of_blocks(_Static(R, False), expert_N, E)
  return _Sorted(choice_S, slot_R, (N, T), products)


def _products_of_blocks(
  static: _Static, expert_N: jax.Array, E: int
) -> Products:
  """Products of blocks [N, T, D], each with its expert; E for none."""
  used_N = expert_N < E
  expert_N = jnp.minimum(expert_N, E - 1)
  return Products(
    lambda x, kernel: _times(static, x, kernel, expert_N, used_N),
    lambda bias_EF: _of_rows(bias_EF, expert_N)[:, None],
  )


def _of_rows(bias_EF: jax.Array, expert_X: jax.Array) -> jax.Array:
  """Each row's or block's bias, by a product: its gradient needs no scatter."""
  mark_XE = jax.nn.one_hot(expert_X, bias_EF.shape[0], dtype=bias_EF.dtype)
  with model_flops.share(0, 1):
    return jnp.matmul(mark_XE, bias_EF, precision="highest")


class Zeros(NamedTuple):
  """Whether indices of `rows` may be out of range, and then read zeros."""

  results: bool = True  # Forward: indices into x.
  gradients: bool = True  # Backward: indices into the gradients of the results.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rows(
  x_XD: jax.Array,
  index_Y: jax.Array,
  back_ZX: jax.Array,
  zeros: Zeros = Zeros(),
) -> jax.Array:
  """Reads rows of x. The gradient reads rows too, in place of a scatter.

  Args:
    back_ZX: int, the results that have a row of x, Z at most; Y for none.
    zeros: which of these indices may be out of range.
  """
  del back_ZX
  return _take(x_XD, index_Y, zeros.results)


def _take(x_XD: jax.Array, index: jax.Array, zeros: bool) -> jax.Array:
  """Reads rows; beyond the end, zeros (faster than mode "fill") or any row."""
  taken = jnp.take(x_XD, index, axis=0, mode="clip")
  if not zeros:
    return taken
  inside = index < x_XD.shape[0]
  return taken * inside[..., None].astype(taken.dtype)


def _rows_backward(
  zeros: Zeros, back_ZX: jax.Array, grad_YD: jax.Array
) -> tuple[jax.Array | None, ...]:
  grad_ZXD = _take(grad_YD, back_ZX, zeros.gradients)
  return jnp.sum(grad_ZXD, axis=0), None, None


def _rows_forward(
  x_XD: jax.Array, index_Y: jax.Array, back_ZX: jax.Array, zeros: Zeros
) -> tuple[jax.Array, jax.Array]:
  return rows(x_XD, index_Y, back_ZX, zeros), back_ZX


rows.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _times(
  static: _Static,
  x_NTD: jax.Array,
  kernel_EDF: jax.Array,
  expert_N: jax.Array,
  used_N: jax.Array,
) -> jax.Array:
  """Multiplies each block with the kernel of its expert, or skips it if empty.

  jax.lax.ragged_dot needs no blocks, but on CPUs and GPUs it multiplies every
  row with all experts, and on TPUs its gradient does so for the kernel.
  """

  def one_block(block: tuple[jax.Array, ...]) -> jax.Array:
    x_TD, e, used = block

    def product() -> jax.Array:
      return x_TD @ kernel_EDF[e]

    if not static.skips:
      return product()
    y_TF = jax.eval_shape(product)

    def zeros() -> jax.Array:
      # The second zero varies over the same axes of the mesh as x.
      zero = jnp.zeros_like(x_TD, shape=(), dtype=y_TF.dtype)
      return jnp.zeros(y_TF.shape, y_TF.dtype) + zero

    return jax.lax.cond(used, product, zeros)

  with static.counted(x_NTD):
    return jax.lax.map(one_block, (x_NTD, expert_N, used_N))


def _times_backward(
  static: _Static, args: tuple[jax.Array, ...], grad_NTF: jax.Array
) -> tuple[jax.Array | None, ...]:
  """Gradients of x and of the kernels, in one loop over the blocks.

  An expert's blocks follow each other. Their sum is float32; the array of all
  sums has the kernels' dtype.
  """
  x_NTD, kernel_EDF, expert_N, used_N = args

  def add_block(sums: Any, block: Any) -> Any:
    sum_DF, sums_EDF = sums
    x_TD, grad_TF, e, first, used = block

    def add() -> Any:
      product_DF = jnp.matmul(
        x_TD.T, grad_TF, preferred_element_type=jnp.float32
      )
      added_DF = jnp.where(first, 0.0, sum_DF) + product_DF
      added_EDF = jax.lax.dynamic_update_index_in_dim(
        sums_EDF, added_DF.astype(sums_EDF.dtype), e, axis=0
      )
      return (added_DF, added_EDF), grad_TF @ kernel_EDF[e].T

    def skip() -> Any:
      return sums, jnp.zeros_like(x_TD)

    return jax.lax.cond(used, add, skip) if static.skips else add()

  first_N = jnp.diff(expert_N, prepend=-1) != 0  # Whether an expert begins.
  zeros = jnp.zeros_like(kernel_EDF[0], jnp.float32), jnp.zeros_like(kernel_EDF)
  with static.counted(x_NTD):
    (_, kernel_grad_EDF), x_grad_NTD = jax.lax.scan(
      add_block, zeros, (x_NTD, grad_NTF, expert_N, first_N, used_N)
    )
  return x_grad_NTD, kernel_grad_EDF, None, None


def _times_forward(
  static: _Static, *args: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _times(static, *args), args


_times.defvjp(_times_forward, _times_backward)
