"""Products of a layer whose kernels are split over `tensor`.

As in Megatron-LM (https://arxiv.org/abs/1909.08053, and 2205.05198 for the
stream): a first product is split by its outputs, heads or hidden units, and a
second one by its inputs. The residual stream between them is split over the
length. So a layer gathers its input once, and adds up its output's parts once;
the backward pass does so in the other order. The gathered input has an axis T
of copies: products over it send nothing, nor do their gradients.

Axes: B batch, L length, D model width, V rows of a table, T devices of a
`tensor` group.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain.arrays import model_flops
from bigtrain.sharding import batches, rules

# As flax's layers call it: (inputs, kernel, dimension numbers, ...).
DotGeneral = Callable[..., jax.Array]

_FREE = PartitionSpec.UNCONSTRAINED


def tensor_ways(batch_size: int) -> int:
  """Size of `tensor` if the ambient mesh splits the batch, else 1."""
  mesh = batches.ambient(batch_size)
  return 1 if mesh is None else mesh.shape.get("tensor", 1)


def heads_in_parts(heads: int, batch_size: int) -> int:
  """Number of key-value heads that a group computes, with repeats."""
  return math.lcm(heads, tensor_ways(batch_size))


def columns(x_BLD: jax.Array) -> DotGeneral | None:
  """Returns dot_general of x for kernels split by their outputs, or None.

  Kernel (D, outputs, ...) -> [B, L, outputs, ...]; if outputs do not divide,
  `heads_in_parts` of them, repeated in order.
  """
  mesh, ways = batches.ambient(x_BLD.shape[0]), tensor_ways(x_BLD.shape[0])
  if ways == 1:
    return None
  x_TBLD = _spread(x_BLD)

  def product(
    inputs: jax.Array, kernel: jax.Array, dims: Any, **options: Any
  ) -> jax.Array:
    del inputs, dims  # x, and its last dimension with the kernel's first.
    D, size, *rest = kernel.shape
    total = math.lcm(size, ways)
    kernel = jnp.repeat(kernel, total // size, axis=1)
    kernel = kernel.reshape(D, ways, total // ways, *rest)
    kernel = jax.lax.with_sharding_constraint(
      kernel, PartitionSpec(_FREE, "tensor", *[_FREE] * (kernel.ndim - 2))
    )
    with model_flops.share(size, total):
      x = x_TBLD.astype(kernel.dtype)
      y = jnp.einsum("tbld,dt...->blt...", x, kernel, **options)
    y = y.reshape(*y.shape[:2], total, *rest)
    spec = PartitionSpec(batches.batch_axes(), length_axis(mesh, y), "tensor")
    return jax.lax.with_sharding_constraint(y, spec)

  return product


def rows(batch_size: int) -> DotGeneral | None:
  """Returns dot_general for a kernel that is split by its inputs, if it is.

  Inputs [B, L, inputs, ...], kernel (inputs, ..., D) -> [B, L, D].
  """
  ways = tensor_ways(batch_size)
  if ways == 1:
    return None

  def product(
    inputs: jax.Array, kernel: jax.Array, dims: Any, **options: Any
  ) -> jax.Array:
    del dims  # All but the first two with all but the last.
    B, L = inputs.shape[:2]
    D = kernel.shape[-1]
    x = inputs.reshape(B, L, ways, -1)
    kernel = kernel.reshape(ways, -1, D)
    y_TBLD = jnp.einsum("bltf,tfd->tbld", x, kernel, **options)
    return _summed(y_TBLD)

  return product


def by_heads(x: jax.Array, dim: int) -> jax.Array:
  """Constrains the batch, and a dimension of heads if it divides."""
  ways = tensor_ways(x.shape[0])
  if ways == 1 or x.shape[dim] % ways:
    return batches.over_batch(x)
  spec = PartitionSpec(batches.batch_axes(), *[None] * (dim - 1), "tensor")
  return jax.lax.with_sharding_constraint(x, spec)


def stream(x: jax.Array) -> jax.Array:
  """Constrains the residual stream [B, L, ...]: batch, and length if it can."""
  if tensor_ways(x.shape[0]) > 1:
    spec = stream_spec(batches.ambient(x.shape[0]), x)
  elif batches.length_ways(*x.shape[:2]) > 1:  # XLA pads lengths.
    spec = PartitionSpec(batches.batch_axes(), "sequence")
  else:
    return batches.over_batch(x)
  return jax.lax.with_sharding_constraint(x, spec)


def length_axis(mesh: Any, x: jax.Array) -> str | None:
  """The axis that splits the length inside of a layer."""
  ways = mesh.shape.get("sequence", 1)
  return "sequence" if ways > 1 and x.shape[1] % ways == 0 else None


def stream_spec(mesh: Any, x: jax.Array) -> PartitionSpec:
  axes = tuple(a for a in ("sequence", "tensor") if mesh.shape.get(a, 1) > 1)
  ways = math.prod(mesh.shape[axis] for axis in axes)
  length = length_axis(mesh, x) if not axes or x.shape[1] % ways else axes
  return PartitionSpec(batches.batch_axes(mesh), length)


def axes_of_length(spec: PartitionSpec) -> tuple[str, ...]:
  """The axes that split the length in a spec of the stream."""
  axes = spec[1] if len(spec) > 1 else None
  return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def gathered(x_BLD: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Inside a shard_map: the input of a layer from its part of the stream."""
  if "tensor" in axes_of_length(spec):
    return jax.lax.all_gather(x_BLD, "tensor", axis=1, tiled=True)
  return jax.lax.pcast(x_BLD, "tensor", to="varying")


def scattered(y_BLD: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Inside a shard_map: a layer's output for the stream, from its parts."""
  if "tensor" in axes_of_length(spec):
    return jax.lax.psum_scatter(
      y_BLD, "tensor", scatter_dimension=1, tiled=True
    )
  return jax.lax.psum(y_BLD, "tensor")


def _spread(x_BLD: jax.Array) -> jax.Array:
  """Returns [T, B, L, D], copies whose gradients are summed."""
  mesh = batches.ambient(x_BLD.shape[0])
  spec = stream_spec(mesh, x_BLD)
  out = PartitionSpec("tensor", batches.batch_axes(), length_axis(mesh, x_BLD))
  return jax.shard_map(
    lambda x: gathered(x, spec)[None], in_specs=spec, out_specs=out
  )(x_BLD)


def _summed(y_TBLD: jax.Array) -> jax.Array:
  """Adds up the parts of [T, B, L, D]; the inverse of `_spread`."""
  mesh = batches.ambient(y_TBLD.shape[1])
  spec = stream_spec(mesh, y_TBLD[0])
  length = length_axis(mesh, y_TBLD[0])
  parts = PartitionSpec("tensor", batches.batch_axes(), length)
  return jax.shard_map(
    lambda y: scattered(y[0], spec), in_specs=parts, out_specs=spec
  )(y_TBLD)


def lookup(table_VD: jax.Array, ids_BL: jax.Array, dtype: Any) -> jax.Array:
  """Rows of a table, such as embeddings, split as `stream_spec` says.

  Over `fsdp`, a device with fewer tokens than the table has rows exchanges
  rows: it looks up its columns for the tokens of all, and sends them. Otherwise
  the table is gathered. Over `tensor`, each device looks up its own rows. The
  gradients go the same way back, in `dtype`; those of equal tokens are added up
  in float32.
  """
  mesh = batches.ambient(ids_BL.shape[0])
  if mesh is None or mesh.size == 1:
    return jnp.take(table_VD, ids_BL, axis=0).astype(dtype)
  (V, D), ways = table_VD.shape, mesh.shape.get("tensor", 1)
  by_rows = ways > 1 and V % ways == 0
  parts = {0: ("tensor",)} if by_rows else {}
  # The dimension that is over `fsdp` by the default rules.
  dim = rules.largest_free((V, D), mesh.shape["fsdp"], parts)
  if dim is not None:
    parts |= {dim: ("fsdp",)}
  out = stream_spec(mesh, ids_BL)
  of_ids = out
  if by_rows:  # The devices of a `tensor` group have the same tokens.
    of_ids = PartitionSpec(batches.batch_axes(), length_axis(mesh, ids_BL))
  over = (*batches.batch_axes(), *axes_of_length(of_ids))
  copied = tuple(axis for axis in over if (axis,) not in parts.values())
  tokens = ids_BL.size // math.prod(mesh.shape[axis] for axis in over)
  exchanged = dim is not None and not D % mesh.shape["fsdp"] and tokens < V

  def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
    # The transpose of this copy adds up the gradients, once.
    table = jax.lax.pcast(table.astype(dtype), copied, to="varying")
    if exchanged:
      ids = jax.lax.all_gather(ids, "fsdp", tiled=True)
      if dim == 0:
        table = jax.lax.all_to_all(table, "fsdp", 1, 0, tiled=True)
    elif dim is not None:
      table = jax.lax.all_gather(table, "fsdp", axis=dim, tiled=True)
    table = table.astype(jnp.float32)
    if by_rows:
      x = scattered(_own_rows(table, ids).astype(dtype), out)
    else:
      x = jnp.take(table, ids, axis=0).astype(dtype)
    return jax.lax.all_to_all(x, "fsdp", 0, 2, tiled=True) if exchanged else x

  x_BLD = jax.shard_map(
    on_device, in_specs=(rules.spec_of(parts), of_ids), out_specs=out
  )(table_VD, ids_BL)
  if by_rows:
    valid_BL1 = ((ids_BL >= -V) & (ids_BL < V))[..., None]
    x_BLD = jnp.where(valid_BL1, x_BLD, jnp.nan)
  return x_BLD


def _own_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Rows that this device of a `tensor` group has, and 0 for the others."""
  number = table.shape[0]
  whole = number * jax.lax.axis_size("tensor")
  ids = jnp.where(ids < 0, ids + whole, ids)
  own = ids - number * jax.lax.axis_index("tensor")
  # Negative numbers would count from the end.
  own = jnp.where(own < 0, number, own)
  return jnp.take(table, own, axis=0, mode="fill", fill_value=0)
