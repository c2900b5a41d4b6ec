"""Attention by the Splash kernels of jax's Pallas library, for TPUs.

The kernels read blocks of keys that a mask leaves out neither in the forward
nor in the backward pass, and keep the scores of a block on the chip. Lengths
are padded to whole blocks. Documents and padding are segments: a query sees the
positions with its own number.

Axes: B batch, L length, S length attended to, G heads of keys and values, R
query heads of each, H = G R heads, K head width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import model_flops, sharding
from bigtrain.models.layers import attention_backends, masks, remat

# Larger blocks have less overhead per score. Blocks of 512 x 512 are the
# largest for which scores and their gradients fit into a TPU's vector memory
# with heads of width 256.
_BLOCK = 512

# A block is a whole number of the lanes of a vector register.
_LANES = 128

# Numbers of segments: positions that nobody sees, and padding of the length.
_HIDDEN, _PADDING = -1, -2

# Padding makes 256 tokens of the 196 of a ViT, and XLA's own attention needs
# little memory there. In ViT-B/16, 64 images a chip, a layer takes 4.6 ms with
# it, forward and backward, as the TPU's compiler estimates; around the kernels
# of Splash it takes 3.5 ms, which leaves 1.1 ms for 70% more scores.
_FEWEST = 512


def unsupported_because(case: attention_backends.Case) -> str:
  """Returns why the kernels cannot serve a case, or ""."""
  if case.platform != "tpu":
    return f"it needs a TPU, not a {case.platform}"
  if case.dtype not in ("bfloat16", "float32"):
    return f"it computes in bfloat16 or float32, not {case.dtype}"
  if case.bias:
    return "it adds no bias to the scores"
  if case.prefix:
    return "its order of positions is fixed, without a prefix for each text"
  if case.causal and case.queries != case.positions:
    return "causal queries need as many positions"
  if not case.splits:
    return "the mesh does not split the batch"
  return ""


def best_because(case: attention_backends.Case) -> str:
  """Returns why the kernels are best for a case that they serve, or ""."""
  if min(case.queries, case.positions) < _FEWEST:
    return ""
  if case.causal and case.queries < 2 * case.sequence * _LANES:
    return ""  # Padding would more than double a device's queries.
  return f"from {_FEWEST} positions on the fastest on a TPU"


def attend(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  *,
  scale: float,
  softcap: float | None,
  block: int = _BLOCK,
  interpret: bool = False,
) -> jax.Array:
  """Returns the output, of the shape and dtype of the queries.

  Args:
    interpret: whether to run the kernels on any device, slowly.
  """
  L = q_BLGRK.shape[1]
  S = k_BSGK.shape[1]
  sizes = _block_size(L, block), _block_size(S, block)
  kernel = functools.partial(
    _kernel,
    numbers=np.arange(_padded(L, sizes[0])),
    positions=_padded(S, sizes[1]),
    sizes=sizes,
    mask=mask,
    softcap=softcap,
    interpret=interpret,
  )

  def attend_locally(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: masks.Mask
  ) -> jax.Array:
    # Traced, the tables of the blocks are not put on devices, which may be
    # absent.
    compute = jax.jit(functools.partial(kernel, heads=math.prod(q.shape[2:4])))
    counted = L * mask.reach(S)
    return _attend(compute(), q * scale, k, v, mask, sizes, counted)

  return sharding.split_batch(
    attend_locally, q_BLGRK, k_BSGK, v_BSGK, mask, by_heads=3
  )


def part_blocks(
  queries: int, parts: int, *, block: int = _BLOCK
) -> tuple[int, int]:
  """Returns the size of blocks of queries, and the length of padded parts."""
  part = math.ceil(queries / parts)
  size = _block_size(part, block)
  return size, _padded(part, size)


def attend_rows(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  *,
  numbers: np.ndarray,
  device: Any,
  block_q: int,
  counted: int,
  scale: float,
  softcap: float | None,
  block: int = _BLOCK,
  interpret: bool = False,
) -> jax.Array:
  """Attends with a device's queries, a part of an example's.

  Args:
    numbers: int [n, L], number of each query of the n devices.
  """
  ways = len(numbers)
  S = k_BSGK.shape[1]
  sizes = block_q, _block_size(S, block)
  make = functools.partial(
    _kernel,
    numbers=numbers.reshape(-1),
    positions=_padded(S, sizes[1]),
    sizes=sizes,
    mask=mask,
    softcap=softcap,
    interpret=interpret,
    heads=math.prod(q_BLGRK.shape[2:4]),
    shards=ways,
  )

  def own(info: Any) -> Any:
    """The device's part of the tables of a pass."""
    part = lambda x, dim: (
      None
      if x is None
      else jax.lax.dynamic_slice_in_dim(
        x, device * (x.shape[dim] // ways), x.shape[dim] // ways, dim
      )
    )
    return info._replace(
      data_next=part(info.data_next, 1),
      mask_next=part(info.mask_next, 1),
      block_mask=part(info.block_mask, 1),
      q_sequence=part(info.q_sequence, 0),
    )

  kernel = jax.jit(make)()
  infos, kwargs = kernel.tree_flatten()
  kernel = kernel.tree_unflatten(kwargs, [own(info) for info in infos])
  return _attend(kernel, q_BLGRK * scale, k_BSGK, v_BSGK, mask, sizes, counted)


def _attend(
  kernel: Any,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: masks.Mask,
  sizes: tuple[int, int],
  counted: int,
) -> jax.Array:
  """Calls the kernel of one example with each example of a device.

  Args:
    q: queries (B, L, G, R, K), scaled, in the dtype of the scaling.
  """
  B, L, G, R, K = q.shape
  S = k.shape[1]
  q = q.astype(k.dtype).reshape(B, L, G * R, K)
  ids = _segments(mask, B, L, S, sizes)
  q, k, v = (
    _pad(x, size).swapaxes(1, 2)
    for x, size in ((q, sizes[0]), (k, sizes[1]), (v, sizes[1]))
  )
  # The kernels compute blocks that the mathematics does without, and leave out
  # others that it counts.
  num_blocks = kernel.fwd_mask_info.data_next
  per_row = k.shape[2] // sizes[1]
  if num_blocks is not None:
    per_row = num_blocks.shape[-1]
  with model_flops.counts_as(counted, q.shape[2] * per_row * sizes[1]):
    axes = (0, 0, 0, None if ids is None else 0)
    o_BHLK = jax.vmap(kernel, in_axes=axes)(q, k, v, ids)
  return o_BHLK.swapaxes(1, 2)[:, :L].reshape(B, L, G, R, K)


def _block_size(length: int, largest: int) -> int:
  """Size of blocks that pads a length by at most an eighth, or of one block."""
  size = largest
  while size > _LANES and _padded(length, size) > max(
    length * 9 // 8, _padded(length, _LANES)
  ):
    size //= 2
  return size


def _padded(length: int, block: int) -> int:
  return math.ceil(length / block) * block


def _pad(x: jax.Array, block: int, value: int = 0) -> jax.Array:
  """Pads dimension 1 to whole blocks."""
  rows = _padded(x.shape[1], block) - x.shape[1]
  if not rows:
    return x
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, rows)
  return jnp.pad(x, widths, constant_values=value)


def _segments(
  mask: masks.Mask, B: int, L: int, S: int, sizes: tuple[int, int]
) -> Any:
  """SegmentIds of queries and positions; None if all are in one segment."""
  # Causal queries do not see the padding after them.
  padded = _padded(S, sizes[1]) != S and not mask.causal
  if mask.segments_BL is None and mask.real_BS is None and not padded:
    return None
  q_BL = kv_BS = None
  if mask.segments_BL is not None:
    q_BL, kv_BS = mask.segments_BL, mask.segments_BS
  q_BL = jnp.zeros((B, L), jnp.int32) if q_BL is None else q_BL
  kv_BS = jnp.zeros((B, S), jnp.int32) if kv_BS is None else kv_BS
  if mask.real_BS is not None:
    kv_BS = jnp.where(mask.real_BS, kv_BS, _HIDDEN)
  return _library().SegmentIds(
    _pad(q_BL.astype(jnp.int32), sizes[0], _PADDING),
    _pad(kv_BS.astype(jnp.int32), sizes[1], _PADDING),
  )


def _kernel(
  numbers: np.ndarray,
  positions: int,
  heads: int,
  sizes: tuple[int, int],
  mask: masks.Mask,
  softcap: float | None,
  interpret: bool,
  shards: int = 1,
) -> Any:
  """Returns the kernel of one example: (H, L, K), (G, S, K) x 2, segments.

  Args:
    numbers: int (L,), number of each query.
  """
  splash = _library()
  shape = (len(numbers), positions)
  blocks: Any
  if mask.causal and mask.window:
    blocks = splash.LocalMask(shape, (mask.window - 1, 0), 0)
  elif mask.causal:
    blocks = splash.CausalMask(shape)
  else:
    blocks = splash.FullMask(shape)
  if mask.causal:
    blocks.q_sequence = numbers.astype(np.int32)
  block_q, block_kv = sizes
  return splash.make_splash_mha(
    splash.MultiHeadMask([blocks] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_kv_compute=block_kv,
      block_q_dkv=block_q,
      block_kv_dkv=block_kv,
      block_kv_dkv_compute=block_kv,
      block_q_dq=block_q,
      block_kv_dq=block_kv,
    ),
    attn_logits_soft_cap=softcap,
    head_shards=1,
    q_seq_shards=shards,
    residual_checkpoint_name=remat.ATTENTION,
    interpret=interpret,
  )


def _library() -> Any:
  """The module of the kernels, whose import takes half a second."""
  from jax.experimental.pallas.ops.tpu import splash_attention

  return splash_attention
