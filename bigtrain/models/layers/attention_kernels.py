"""Attention by kernels: Splash for TPUs, cuDNN and tokamax for GPUs.

Splash, of jax's Pallas library, leaves out blocks of keys that a mask hides.
Lengths are padded to whole blocks. Documents and padding are segments: a query
attends only to positions in its own segment. A Splash kernel is for one
example, with its mask (`_splash_kernel`); `_call_splash` applies it to a batch.

The kernels for GPUs get masks other than causal order as a matrix
(`_with_matrix`).

Axes: see attention_inputs.py.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.config.errors import import_package
from bigtrain.models.layers import attention_blockwise, masks, remat
from bigtrain.models.layers.attention_inputs import Inputs

# The largest blocks that, with gradients, fit into a TPU's vector memory.
_BLOCK = 512

# Whether the kernels of Splash run on any device, slowly: for tests.
_INTERPRET = False

# Kernels of tokamax, without its XLA code, which keeps all scores; for tests.
_TOKAMAX: tuple[str, ...] = ("mosaic",)

# A block is a whole number of the lanes of a vector register.
_LANES = 128

# Segment of positions that no query sees, and segment of padding to a block.
_HIDDEN = -1
_PADDING = -2


def attend_by_splash(
  inputs: Inputs, *, scale: float, softcap: float | None
) -> jax.Array:
  q_BLGRK, k_BSGK, v_BSGK, mask, _, sinks_GR = inputs
  L, S = q_BLGRK.shape[1], k_BSGK.shape[1]
  sizes = _block_size(L), _block_size(S)
  kernel = functools.partial(
    _splash_kernel,
    np.arange(_padded(L, sizes[0])),
    _padded(S, sizes[1]),
    sizes,
    mask,
    softcap,
  )

  def attend_locally(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks_B1GR: jax.Array | None,
    mask: masks.Mask,
  ) -> jax.Array:
    sinks_GR = None if sinks_B1GR is None else sinks_B1GR[0, 0]
    # In a trace its tables are not put on devices, which may be absent.
    compute = jax.jit(functools.partial(kernel, heads=math.prod(q.shape[2:4])))
    counted = L * mask.reach(S)
    own = Inputs(q * scale, k, v, mask, sinks_GR=sinks_GR)
    return _call_splash(compute(), own, sizes, counted)

  sinks_B1GR = None
  if sinks_GR is not None:  # Split by heads, as the other arrays.
    shape = len(q_BLGRK), 1, *sinks_GR.shape
    sinks_B1GR = jnp.broadcast_to(sinks_GR, shape)
  return sharding.split_batch(
    attend_locally, q_BLGRK, k_BSGK, v_BSGK, sinks_B1GR, mask, by_heads=4
  )


def splash_parts(queries: int, parts: int) -> tuple[int, int]:
  """The size of blocks of queries, and the length of padded parts."""
  part = math.ceil(queries / parts)
  size = _block_size(part)
  return size, _padded(part, size)


def attend_rows_by_splash(
  inputs: Inputs,
  *,
  numbers: np.ndarray,
  device: jax.Array,
  block_q: int,
  counted: int,
  scale: float,
  softcap: float | None,
) -> jax.Array:
  """Attends with the queries `numbers[device]` of an example."""
  ways = len(numbers)
  S = inputs.k_BSGK.shape[1]
  sizes = block_q, _block_size(S)
  make = functools.partial(
    _splash_kernel,
    numbers.reshape(-1),
    _padded(S, sizes[1]),
    sizes,
    inputs.mask,
    softcap,
    heads=math.prod(inputs.q.shape[2:4]),
    shards=ways,
  )

  def own_part(x: jax.Array | None, dim: int) -> jax.Array | None:
    if x is None:
      return None
    size = x.shape[dim] // ways
    return jax.lax.dynamic_slice_in_dim(x, device * size, size, dim)

  def own(info: Any) -> Any:
    """This device's part of a kernel's tables."""
    return info._replace(
      data_next=own_part(info.data_next, 1),
      mask_next=own_part(info.mask_next, 1),
      block_mask=own_part(info.block_mask, 1),
      q_sequence=own_part(info.q_sequence, 0),
    )

  kernel = jax.jit(make)()
  infos, kwargs = kernel.tree_flatten()
  kernel = kernel.tree_unflatten(kwargs, [own(info) for info in infos])
  inputs = inputs._replace(q=inputs.q * scale)
  return _call_splash(kernel, inputs, sizes, counted)


def _call_splash(
  kernel: Any, inputs: Inputs, sizes: tuple[int, int], counted: int
) -> jax.Array:
  """Calls the kernel for each example, with scaled queries."""
  q, k, v, mask, _, sinks_GR = inputs
  B, L, G, R, K = q.shape
  S = k.shape[1]
  q = q.astype(k.dtype).reshape(B, L, G * R, K)
  ids = _segments(mask, B, L, S, sizes)
  q = _pad(q, sizes[0]).swapaxes(1, 2)
  k, v = (_pad(x, sizes[1]).swapaxes(1, 2) for x in (k, v))
  # The kernels compute other blocks than the mathematics counts: those in their
  # table, if they have one, or all.
  blocks_per_query = k.shape[2] // sizes[1]
  table = kernel.fwd_mask_info.data_next
  if table is not None:
    blocks_per_query = table.shape[-1]
  computed = q.shape[2] * blocks_per_query * sizes[1]
  sinks_H = None if sinks_GR is None else sinks_GR.reshape(-1)
  axes = (0, 0, 0, None if ids is None else 0, None)
  with model_flops.counts_as(counted, computed):
    o_BHLK = jax.vmap(kernel, in_axes=axes)(q, k, v, ids, sinks_H)
  return o_BHLK.swapaxes(1, 2)[:, :L].reshape(B, L, G, R, -1)


def _block_size(length: int) -> int:
  """Block size that pads a length by at most an eighth, or a single block."""
  size = _BLOCK
  while size > _LANES and _padded(length, size) > max(
    length * 9 // 8, _padded(length, _LANES)
  ):
    size //= 2
  return size


def _padded(length: int, block: int) -> int:
  return math.ceil(length / block) * block


def _pad(x: jax.Array, block: int, value: int = 0) -> jax.Array:
  return attention_blockwise.padded(x, _padded(x.shape[1], block), value)


def _segments(
  mask: masks.Mask, B: int, L: int, S: int, sizes: tuple[int, int]
) -> Any:
  """SegmentIds of queries and positions; None if all are in one segment."""
  # Causal queries do not see the padding after them.
  padded = _padded(S, sizes[1]) != S and not mask.causal
  if mask.segments_BL is None and mask.real_BS is None and not padded:
    return None
  q_BL, kv_BS = mask.segments_BL, mask.segments_BS
  if q_BL is None or kv_BS is None:
    q_BL, kv_BS = jnp.zeros((B, L), jnp.int32), jnp.zeros((B, S), jnp.int32)
  if mask.real_BS is not None:
    kv_BS = jnp.where(mask.real_BS, kv_BS, _HIDDEN)
  return _library().SegmentIds(
    _pad(q_BL.astype(jnp.int32), sizes[0], _PADDING),
    _pad(kv_BS.astype(jnp.int32), sizes[1], _PADDING),
  )


def _splash_kernel(
  numbers: np.ndarray,
  positions: int,
  sizes: tuple[int, int],
  mask: masks.Mask,
  softcap: float | None,
  *,
  heads: int,
  shards: int = 1,
) -> Any:
  """The kernel of one example: (H, L, K), (G, S, K) x 2, segments."""
  splash = _library()
  shape = (len(numbers), positions)
  blocks: Any
  if mask.causal and mask.window:
    blocks = _quick(splash.LocalMask)(shape, (mask.window - 1, 0), 0)
  elif mask.causal:
    blocks = _quick(splash.CausalMask)(shape)
  else:
    blocks = splash.FullMask(shape)
  if mask.causal:
    blocks.q_sequence = numbers.astype(np.int32)
    blocks.window = mask.window
  block_q, block_kv = sizes
  return splash.make_splash_mha(
    splash.MultiHeadMask([blocks] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block_q,
      block_q_dkv=block_q,
      block_q_dq=block_q,
      block_kv=block_kv,
      block_kv_compute=block_kv,
      block_kv_dkv=block_kv,
      block_kv_dkv_compute=block_kv,
      block_kv_dq=block_kv,
    ),
    attn_logits_soft_cap=softcap,
    head_shards=1,
    q_seq_shards=shards,
    residual_checkpoint_name=remat.ATTENTION,
    interpret=_INTERPRET,
  )


class _QuickBlocks:
  """Answers for a block of a causal mask, without all of its entries.

  When Splash is traced, it asks of each block whether it has any visible scores
  and whether all are visible. A million positions make four million blocks of
  512 x 512. The queries of a block follow each other.
  """

  q_sequence: np.ndarray  # The number of each query.
  window: int | None

  def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
    """Entries that answer any() and all() as those of the block do."""
    rows, columns = self.q_sequence[index[0]], index[1]
    # Distances from a query back to a position.
    least = int(rows[0]) - (columns.stop - 1)
    most = int(rows[-1]) - columns.start
    beyond = math.inf if self.window is None else self.window
    return np.array(
      [[most >= 0 and least < beyond, least >= 0 and most < beyond]]
    )


@functools.cache
def _quick(mask_class: type) -> Any:
  """A class of jax's masks with quick answers for blocks."""
  return type(mask_class.__name__, (_QuickBlocks, mask_class), {})


def _library() -> Any:  # Its import takes half a second.
  from jax.experimental.pallas.ops.tpu import splash_attention

  return splash_attention


def attend_by_cudnn(inputs: Inputs, *, scale: float) -> jax.Array:
  kernel = functools.partial(
    jax.nn.dot_product_attention, implementation="cudnn"
  )
  return _attend_locally(kernel, inputs, scale)


def attend_by_tokamax(
  inputs: Inputs, *, scale: float, softcap: float | None
) -> jax.Array:
  key = "config.model.attention='tokamax'"
  tokamax = import_package("tokamax", key, "'bigtrain[tokamax]'")
  if not flags.FLAGS.is_parsed():  # Otherwise it parses a notebook's own.
    flags.FLAGS.mark_as_parsed()
  kernel = functools.partial(
    tokamax.dot_product_attention,
    logits_soft_cap=softcap,
    implementation=_TOKAMAX,
  )
  return _attend_locally(kernel, inputs, scale)


def _attend_locally(
  kernel: Callable[..., jax.Array], inputs: Inputs, scale: float
) -> jax.Array:
  def attend(*arrays: Any) -> jax.Array:
    return _with_matrix(kernel, Inputs(*arrays), scale)

  return sharding.split_batch(
    attend, inputs.q, inputs.k_BSGK, inputs.v_BSGK, inputs.mask, by_heads=3
  )


def _with_matrix(
  kernel: Callable[..., jax.Array], inputs: Inputs, scale: float
) -> jax.Array:
  """Turns the mask, except its order, into a matrix of L x S booleans."""
  q_BLGRK, k_BSGK, v_BSGK, mask, _, _ = inputs
  B, L, G, R, K = q_BLGRK.shape
  S = k_BSGK.shape[1]
  q_BLHK = q_BLGRK.reshape(B, L, G * R, K)
  mask_BLS = mask.matrix(L, S) if mask.has_arrays else None
  if mask_BLS is not None:
    mask_BLS = jnp.broadcast_to(mask_BLS, (len(mask_BLS), L, S))
  causal = mask.causal and mask_BLS is None
  window = mask.window if causal else None
  # Some versions of jax and cuDNN refuse odd lengths, such as a ViT's 197.
  lengths: Any = None, None
  if L % 2 or S % 2:
    q_BLHK, k_BSGK, v_BSGK = (_pad(x, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    if mask_BLS is None:
      lengths = [jnp.full(B, n, jnp.int32) for n in (L, S)]
    else:
      mask_BLS = jnp.pad(mask_BLS, ((0, 0), (0, L % 2), (0, S % 2)))
  computed = q_BLHK.shape[1] * k_BSGK.shape[1]
  with model_flops.counts_as(L * mask.reach(S), computed):
    o_BLHK = kernel(
      q_BLHK,
      k_BSGK,
      v_BSGK,
      mask=None if mask_BLS is None else mask_BLS[:, None],
      scale=scale,
      is_causal=causal,
      local_window_size=(window - 1, 0) if window else None,
      query_seq_lengths=lengths[0],
      key_value_seq_lengths=lengths[1],
    )
  return o_BLHK[:, :L].reshape(B, L, G, R, K)
