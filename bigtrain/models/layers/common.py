"""Transformer layers, position embeddings and names that models share.

Axes: B batch, L length, S length attended to, P patches, D model width, H
heads, K head width, F hidden width.

Parameters are float32. `dtype`, a name such as "bfloat16", is that of the
computation: of matrix products and of what flows between layers. Statistics
of layer norms and softmaxes are float32 whatever it is.

Submodules and parameters are named as in the published ViT checkpoints, so
that those load by name.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from bigtrain import settings, sharding

DTYPES = ("float32", "bfloat16", "float16")

# "none", and the policies of jax.checkpoint_policies that take no arguments.
REMAT_POLICIES = (
  "none",
  "everything_saveable",
  "nothing_saveable",
  "dots_saveable",
  "checkpoint_dots",
  "dots_with_no_batch_dims_saveable",
  "checkpoint_dots_with_no_batch_dims",
)

# What is dearer to compute again than to keep: products, cuDNN's attention,
# and ("lt") dropout's draws, which are a byte an element once compared.
_COSTLY = frozenset(
  (
    "dot_general",
    "conv_general_dilated",
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
    "lt",
  )
)

_xavier = nn.initializers.xavier_uniform()


def check_option(key: str, value: Any, options: Sequence[Any]) -> None:
  """Raises ConfigError if the value at config.model.`key` is not an option."""
  if value not in options:
    hint = settings.did_you_mean(str(value), options)
    raise settings.ConfigError(f"config.model.{key}: unknown {value!r}.{hint}")


def check_rate(key: str, value: Any) -> None:
  """Raises ConfigError unless the value is a rate in [0, 1)."""
  if not isinstance(value, (int, float)) or not 0 <= value < 1:
    raise settings.ConfigError(
      f"config.model.{key}: expected a rate in [0, 1), got {value!r}."
    )


class MlpBlock(nn.Module):
  """Two dense layers with a GELU (its tanh form) between them.

  Attributes:
    mlp_dim: hidden width F; 4 D if None.
    dropout: rate after the GELU.
    dtype: of the computation.
    use_bias: whether the layers have biases.
  """

  mlp_dim: int | None = None
  dropout: float = 0.0
  dtype: str = "float32"
  use_bias: bool = True

  @nn.compact
  def __call__(self, x_BLD: jax.Array, *, train: bool = False) -> jax.Array:
    dense = functools.partial(
      nn.Dense,
      dtype=self.dtype,
      kernel_init=_xavier,
      use_bias=self.use_bias,
    )
    D = x_BLD.shape[-1]
    h_BLF = nn.gelu(dense(self.mlp_dim or 4 * D, name="Dense_0")(x_BLD))
    h_BLF = nn.Dropout(self.dropout)(h_BLF, deterministic=not train)
    return dense(D, name="Dense_1")(h_BLF)


class Memory(NamedTuple):
  """Keys and values, computed before, that queries attend to."""

  k_BSHK: jax.Array
  v_BSHK: jax.Array


class Attention(nn.Module):
  """Multi-head attention of the positions of x to those of y.

  Parameters as flax's MultiHeadDotProductAttention has them: query, key and
  value with kernel (D, H, K) and bias (H, K), out with (H, K, D) and (D,).

  Attributes:
    num_heads: H; must divide D.
    dtype: of the computation.
    use_bias: whether there are the biases.
    width: D, where there is no x to tell it.
  """

  num_heads: int
  dtype: str = "float32"
  use_bias: bool = True
  width: int | None = None

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array | None,
    y_BSD: jax.Array | None,
    *,
    mask_BLS: jax.Array | None = None,
    causal: bool = False,
    memory: Memory | None = None,
    position: jax.Array | None = None,
  ) -> Any:
    """Attends.

    Args:
      x_BLD: what asks; None for keys and values only. Where x has a multiple
        of y's rows, each row of y is attended to by so many rows of x, one
        after the other; there is neither mask nor order then.
      y_BSD: what is attended to; None where `memory` holds all of it.
      mask_BLS: bool: whether a position of x sees one of y; axis B may be 1.
      causal: position i of x sees those up to i of y only.
      memory: keys and values to attend to in place of y's.
      position: int scalar. The keys and values of y, a single position, are
        written there into `memory`, and x sees what is there up to it.

    Returns:
      (B, L, D). With `position`: that and the new memory. Without x: the
      Memory of y.
    """
    D = self.width or x_BLD.shape[-1]
    if D % self.num_heads:
      raise settings.ConfigError(
        f"config.model.num_heads: {self.num_heads} does not divide the width "
        f"{D}."
      )
    dense = functools.partial(
      nn.DenseGeneral,
      dtype=self.dtype,
      kernel_init=_xavier,
      use_bias=self.use_bias,
    )
    H, K = self.num_heads, D // self.num_heads
    q_BLHK = None if x_BLD is None else dense((H, K), name="query")(x_BLD)
    if y_BSD is not None:
      new = Memory(
        dense((H, K), name="key")(y_BSD), dense((H, K), name="value")(y_BSD)
      )
      memory = new if position is None else _write(memory, new, position)
    if q_BLHK is None or memory is None:
      return memory
    k_BSHK, v_BSHK = memory
    if position is not None:
      mask_BLS = (jnp.arange(k_BSHK.shape[1]) <= position)[None, None]
    B, L = q_BLHK.shape[:2]
    o_BLHK = jax.nn.dot_product_attention(
      q_BLHK.reshape(k_BSHK.shape[0], -1, H, K),
      k_BSHK,
      v_BSHK,
      mask=None if mask_BLS is None else mask_BLS[:, None],
      is_causal=causal,
      implementation=attention_implementation(q_BLHK),
    )
    out_BLD = dense(D, axis=(-2, -1), name="out")(o_BLHK.reshape(B, L, H, K))
    return out_BLD if position is None else (out_BLD, memory)


def _write(memory: Memory, new: Memory, position: jax.Array) -> Memory:
  """The memory with a single position's keys and values at `position`."""
  put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
  return Memory(
    *(put(old, x.astype(old.dtype), position) for old, x in zip(memory, new))
  )


def attention_implementation(q_BLHK: jax.Array) -> Literal["xla", "cudnn"]:
  """cuDNN's fused kernel where it takes these queries, else XLA's."""
  L, K = q_BLHK.shape[1], q_BLHK.shape[3]
  # A single query (pooling) has no L x S matrix that fusing would avoid.
  fits = q_BLHK.dtype.itemsize == 2 and K % 8 == 0 and K <= 128 and L > 1
  if not fits or jax.default_backend() != "gpu":
    return "xla"
  if "cuda" not in jax.extend.backend.get_backend().platform_version:
    return "xla"
  ampere_or_later = float(jax.devices()[0].compute_capability) >= 8.0
  return "cudnn" if ampere_or_later else "xla"


class MAPHead(nn.Module):
  """Pools by the attention of one learned probe, then an MLP with residual.

  From "Set Transformer", https://arxiv.org/abs/1810.00825, as used in
  https://arxiv.org/abs/2106.04560.

  Attributes:
    mlp_dim: hidden width F; 4 D if None.
    num_heads: H; must divide D.
    dtype: of the computation.
  """

  mlp_dim: int | None = None
  num_heads: int = 12
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    """Returns (B, D)."""
    B, _, D = x_BLD.shape
    probe_11D = self.param("probe", _xavier, (1, 1, D))
    probe_B1D = jnp.broadcast_to(probe_11D, (B, 1, D))
    x_B1D = Attention(
      self.num_heads, self.dtype, name="MultiHeadDotProductAttention_0"
    )(probe_B1D, x_BLD)
    y_B1D = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x_B1D)
    y_B1D = MlpBlock(self.mlp_dim, dtype=self.dtype, name="MlpBlock_0")(y_B1D)
    return (x_B1D + y_B1D)[:, 0]


def drop_path(
  x_BLD: jax.Array, rate: float | jax.Array, key: jax.Array
) -> jax.Array:
  """Zeroes whole examples and scales the others by 1 / (1 - rate).

  Stochastic depth, https://arxiv.org/abs/1603.09382, drawn by example.
  """
  keep = 1.0 - rate
  kept = jax.random.bernoulli(key, keep, x_BLD.shape[:1])
  scale_B = kept.astype(jnp.float32) / keep
  scale = scale_B.reshape((-1,) + (1,) * (x_BLD.ndim - 1))
  return (x_BLD * scale).astype(x_BLD.dtype)


class EncoderBlock(nn.Module):
  """Pre-norm attention and MLP, each added to the residual stream.

  Attributes: as those of `Encoder`.
  """

  mlp_dim: int | None = None
  num_heads: int = 12
  dropout: float = 0.0
  dtype: str = "float32"

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    drop_path_rate: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, None]:
    """Returns the stream (B, L, D) and, for nn.scan, nothing beside it."""

    def regularize(y_BLD: jax.Array) -> jax.Array:
      y_BLD = nn.Dropout(self.dropout)(y_BLD, deterministic=not train)
      if train and drop_path_rate is not None:
        y_BLD = drop_path(y_BLD, drop_path_rate, self.make_rng("dropout"))
      return y_BLD

    y_BLD = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x_BLD)
    y_BLD = Attention(
      self.num_heads, self.dtype, name="MultiHeadDotProductAttention_0"
    )(y_BLD, y_BLD)
    x_BLD = x_BLD + regularize(y_BLD)

    y_BLD = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_1")(x_BLD)
    y_BLD = MlpBlock(self.mlp_dim, self.dropout, self.dtype, name="MlpBlock_0")(
      y_BLD, train=train
    )
    return sharding.over_batch(x_BLD + regularize(y_BLD)), None


class Encoder(nn.Module):
  """A stack of `EncoderBlock`s and a final layer norm.

  Parameters are encoderblock_0, encoderblock_1, ..., or with `scan` one
  encoderblock whose arrays have a leading axis of `depth`. The same key
  initializes both to the same values.

  Attributes:
    depth: number of blocks.
    mlp_dim: hidden width F; 4 D if None.
    num_heads: H; must divide D.
    dropout: rate in the MLPs and on each residual branch.
    drop_path: rate of stochastic depth in the last block; it grows linearly
      from 0 in the first.
    scan: whether to compile one block and loop over it, so that the time to
      compile does not grow with depth.
    remat_policy: what the backward pass keeps of a block: a name in
      REMAT_POLICIES. With "none" no costly operation runs twice.
    dtype: of the computation.
  """

  depth: int
  mlp_dim: int | None = None
  num_heads: int = 12
  dropout: float = 0.0
  drop_path: float = 0.0
  scan: bool = False
  remat_policy: str = "none"
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x_BLD: jax.Array, *, train: bool = False) -> jax.Array:
    x_BLD = sharding.over_batch(x_BLD.astype(self.dtype))
    sizes = (self.mlp_dim, self.num_heads, self.dropout, self.dtype)
    if self.is_initializing():
      one = EncoderBlock(*sizes, parent=None)
      init_blocks(self, "encoderblock", self.depth, one, x_BLD)

    # Argument 3 is train; 0 is self.
    block = block_class(EncoderBlock, self.scan, self.remat_policy, train=3)
    rates = None
    if self.drop_path:
      rates = jnp.linspace(0.0, self.drop_path, self.depth)
    if self.scan:
      blocks = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast),
        length=self.depth,
      )
      x_BLD, _ = blocks(*sizes, name="encoderblock")(x_BLD, rates, train)
    else:
      for i in range(self.depth):
        rate = None if rates is None else rates[i]
        x_BLD, _ = block(*sizes, name=f"encoderblock_{i}")(x_BLD, rate, train)
    return nn.LayerNorm(dtype=self.dtype, name="encoder_norm")(x_BLD)


def init_blocks(
  stack: nn.Module,
  name: str,
  depth: int,
  block: nn.Module,
  *inputs: Any,
  separator: str = "_",
) -> None:
  """Initializes the parameters of a stack's blocks, which are all alike.

  Args:
    stack: the module being initialized; its field `scan` says whether it has
      one submodule `name` with a leading axis of `depth`, or several.
    name: that of the one; the several are called {name}{separator}{i}.
    depth: number of blocks.
    block: one of them, without a parent.
    *inputs: of the block.
    separator: see `name`.
  """
  params = stacked_params(stack, depth, block, *inputs)
  if stack.scan:
    stack.put_variable("params", name, params)
    return
  for i in range(depth):
    params_i = jax.tree.map(lambda p, i=i: p[i], params)
    stack.put_variable("params", f"{name}{separator}{i}", params_i)


def stacked_params(
  stack: nn.Module, depth: int, block: nn.Module, *inputs: Any
) -> Any:
  """Initial parameters of blocks, with a leading axis of `depth`.

  Args:
    stack: the module whose random numbers are taken.
    depth: number of blocks.
    block: one of them, without a parent.
    *inputs: of the block.
  """
  # One compiled initializer loops over the blocks: to compile the random
  # numbers of each on its own takes far longer than to draw them.
  keys = jax.random.split(stack.make_rng("params"), depth)
  return jax.lax.map(lambda key: block.init(key, *inputs)["params"], keys)


def block_class(
  block: type[nn.Module], scan: bool, remat_policy: str, *, train: int
) -> type[nn.Module]:
  """The class of blocks with what their backward pass keeps.

  Args:
    block: the class as it is.
    scan: whether a loop runs over the blocks.
    remat_policy: see `Encoder`.
    train: which argument of the block's call, self being 0, says so.
  """
  check_option("remat_policy", remat_policy, REMAT_POLICIES)
  policy = None
  if remat_policy != "none":
    policy = getattr(jax.checkpoint_policies, remat_policy)
  elif scan:
    # A loop writes all that its backward pass needs to memory, where XLA
    # would fuse the cheap operations of unrolled layers into their users.
    policy = lambda prim, *_, **__: prim.name in _COSTLY
  if policy is not None:
    block = nn.remat(
      block, policy=policy, prevent_cse=not scan, static_argnums=(train,)
    )
  # Unrolled blocks are alike, and tracing one of them is enough; XLA sees the
  # same operations as without this.
  return block if scan else nn.jit(block, static_argnums=(train,))


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Sine and cosine position embeddings of a grid.

  As in MoCo v3, https://arxiv.org/abs/2104.02057: a quarter of the width each
  for sin(x), cos(x), sin(y), cos(y), with wavelengths from 2 pi to 20,000 pi.

  Args:
    grid: rows and columns.
    width: D; a multiple of 4, and at least 8.

  Returns:
    float32 (1, rows * columns, D).
  """
  if width % 4 or width < 8:
    raise settings.ConfigError(
      "config.model.width: sincos2d position embeddings need a multiple of 4 "
      f"from 8 on, got {width}."
    )
  y_P, x_P = (axis.reshape(-1) for axis in np.mgrid[: grid[0], : grid[1]])
  omega_Q = 10_000.0 ** -np.linspace(0, 1, width // 4)
  x_PQ, y_PQ = np.outer(x_P, omega_Q), np.outer(y_P, omega_Q)
  parts = [np.sin(x_PQ), np.cos(x_PQ), np.sin(y_PQ), np.cos(y_PQ)]
  return np.concatenate(parts, axis=1)[None].astype(np.float32)
