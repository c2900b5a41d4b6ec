"""Tensor parallelism: matrix products whose kernels are split over `tensor`.

A block of a transformer has two products in a row, such as the query and output
projections of attention. As in Megatron-LM (https://arxiv.org/abs/1909.08053),
`columns` does the first one, whose kernel is split by its outputs (heads or
hidden units), and `rows` the second, whose kernel is split by its inputs.
Between blocks, the residual stream is split over the length (`stream`, as in
https://arxiv.org/abs/2205.05198). So the devices of a `tensor` group
communicate twice in each block: `columns` gathers the stream, and `rows` adds
up the parts of its output and scatters the sum over the length. The backward
pass does the same in the other direction.

The gathered stream is held as an array with an axis T of copies, one on each
device of the group. Products over T need no communication, and neither do their
gradients. `lookup` does the same for embedding tables.

Axes: B batch, L length, D model width, F inputs of a device in the second
product, V entries of a table, T devices of a `tensor` group.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain.arrays import model_flops
from bigtrain.sharding import batches, rules

# The argument dot_general of flax's layers: (inputs, kernel, dimension numbers,
# ...) -> product.
DotGeneral = Callable[..., jax.Array]

_FREE = PartitionSpec.UNCONSTRAINED


def tensor_ways(batch_size: int) -> int:
  """Size of `tensor` if the ambient mesh splits the batch, else 1."""
  mesh = batches.ambient(batch_size)
  return 1 if mesh is None else mesh.shape.get("tensor", 1)


def heads_in_parts(heads: int, batch_size: int) -> int:
  """Number of key-value heads that `columns` computes, repeats included."""
  return math.lcm(heads, tensor_ways(batch_size))


def columns(x_BLD: jax.Array) -> DotGeneral | None:
  """Returns a dot_general of x with kernels that are split by their outputs.

  A kernel (D, outputs, ...) gives [B, L, outputs, ...]. If the outputs do not
  divide, which may happen with few heads of keys and values, each is repeated,
  and there are `heads_in_parts(outputs)` of them. Returns None if `tensor` does
  not split the layer.
  """
  mesh = batches.ambient(x_BLD.shape[0])
  ways = tensor_ways(x_BLD.shape[0])
  if ways == 1:
    return None
  # Gathered once, for all products of x: query, key and value.
  x_TBLD = _gathered_copies(x_BLD)

  def product(
    inputs: jax.Array, kernel: jax.Array, dims: Any, **options: Any
  ) -> jax.Array:
    # The inputs are x, and the product is over its last dimension and the
    # kernel's first.
    del inputs, dims
    D, outputs, *rest = kernel.shape
    total = math.lcm(outputs, ways)
    kernel = jnp.repeat(kernel, total // outputs, axis=1)
    kernel = kernel.reshape(D, ways, total // ways, *rest)
    kernel = jax.lax.with_sharding_constraint(
      kernel, PartitionSpec(_FREE, "tensor", *[_FREE] * (kernel.ndim - 2))
    )
    with model_flops.share(outputs, total):  # Repeats do not count.
      x = x_TBLD.astype(kernel.dtype)
      y = jnp.einsum("tbld,dt...->blt...", x, kernel, **options)
    y = y.reshape(*y.shape[:2], total, *rest)
    spec = PartitionSpec(batches.batch_axes(), length_axis(mesh, y), "tensor")
    return jax.lax.with_sharding_constraint(y, spec)

  return product


def rows(batch_size: int) -> DotGeneral | None:
  """Returns a dot_general for kernels that are split by their inputs.

  Inputs [B, L, inputs, ...] and a kernel (inputs, ..., D) give [B, L, D]. None
  if `tensor` does not split the layer.
  """
  ways = tensor_ways(batch_size)
  if ways == 1:
    return None

  def product(
    inputs: jax.Array, kernel: jax.Array, dims: Any, **options: Any
  ) -> jax.Array:
    # The product is over all dimensions of the inputs but the first two, and
    # all of the kernel but the last.
    del dims
    B, L = inputs.shape[:2]
    D = kernel.shape[-1]
    x = inputs.reshape(B, L, ways, -1)
    kernel = kernel.reshape(ways, -1, D)
    y_TBLD = jnp.einsum("bltf,tfd->tbld", x, kernel, **options)
    return _sum_of_parts(y_TBLD)

  return product


def by_heads(x: jax.Array, dim: int) -> jax.Array:
  """Constrains the batch, and dimension `dim`, the heads, if it divides."""
  ways = tensor_ways(x.shape[0])
  if ways == 1 or x.shape[dim] % ways:
    return batches.over_batch(x)
  spec = PartitionSpec(batches.batch_axes(), *[None] * (dim - 1), "tensor")
  return jax.lax.with_sharding_constraint(x, spec)


def stream(x: jax.Array) -> jax.Array:
  """Constrains the residual stream [B, L, ...]: batch, and length if it can."""
  if tensor_ways(x.shape[0]) > 1:
    spec = stream_spec(batches.ambient(x.shape[0]), x)
  elif batches.length_ways(*x.shape[:2]) > 1:
    # The length need not divide: XLA pads it.
    spec = PartitionSpec(batches.batch_axes(), "sequence")
  else:
    return batches.over_batch(x)
  return jax.lax.with_sharding_constraint(x, spec)


def length_axis(mesh: Any, x: jax.Array) -> str | None:
  """The axis that splits the length inside a layer."""
  ways = mesh.shape.get("sequence", 1)
  return "sequence" if ways > 1 and x.shape[1] % ways == 0 else None


def stream_spec(mesh: Any, x: jax.Array) -> PartitionSpec:
  """The layout of the residual stream [B, L, ...] between two layers.

  The length is split over `sequence` and `tensor` together if it divides by
  both, and otherwise over `sequence` if it can.
  """
  axes = tuple(a for a in ("sequence", "tensor") if mesh.shape.get(a, 1) > 1)
  ways = math.prod(mesh.shape[axis] for axis in axes)
  if axes and x.shape[1] % ways == 0:
    return PartitionSpec(batches.batch_axes(mesh), axes)
  return PartitionSpec(batches.batch_axes(mesh), length_axis(mesh, x))


def axes_of_length(spec: PartitionSpec) -> tuple[str, ...]:
  """The axes that split the length in a spec of the stream."""
  axes = spec[1] if len(spec) > 1 else None
  if not axes:
    return ()
  return axes if isinstance(axes, tuple) else (axes,)


def gathered(x_BLD: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Inside a shard_map: gathers a layer's input from the stream."""
  if "tensor" in axes_of_length(spec):
    return jax.lax.all_gather(x_BLD, "tensor", axis=1, tiled=True)
  return jax.lax.pcast(x_BLD, "tensor", to="varying")


def scattered(y_BLD: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Inside a shard_map: sums a layer's output, and returns to the stream."""
  if "tensor" in axes_of_length(spec):
    return jax.lax.psum_scatter(
      y_BLD, "tensor", scatter_dimension=1, tiled=True
    )
  return jax.lax.psum(y_BLD, "tensor")


def _gathered_copies(x_BLD: jax.Array) -> jax.Array:
  """The stream as [T, B, L, D], copies whose gradients are summed."""
  mesh = batches.ambient(x_BLD.shape[0])
  spec = stream_spec(mesh, x_BLD)
  out = PartitionSpec("tensor", batches.batch_axes(), length_axis(mesh, x_BLD))
  return jax.shard_map(
    lambda x: gathered(x, spec)[None], in_specs=spec, out_specs=out
  )(x_BLD)


def _sum_of_parts(y_TBLD: jax.Array) -> jax.Array:
  """Adds up the parts of [T, B, L, D]; the transpose of `_gathered_copies`."""
  mesh = batches.ambient(y_TBLD.shape[1])
  spec = stream_spec(mesh, y_TBLD[0])
  length = length_axis(mesh, y_TBLD[0])
  parts = PartitionSpec("tensor", batches.batch_axes(), length)
  return jax.shard_map(
    lambda y: scattered(y[0], spec), in_specs=parts, out_specs=spec
  )(y_TBLD)


def lookup(table_VD: jax.Array, ids_BL: jax.Array, dtype: Any) -> jax.Array:
  """Looks up tokens in a table of embeddings; the result is split as a stream.

  The table is split over `tensor` by tokens, and each device looks up those
  that it holds. Over `fsdp` there are two ways:

    gather    each device gathers the table and looks up its own tokens
    exchange  each device looks up the tokens of the whole `fsdp` group in its
              columns of the table, and the group exchanges the results

  The exchange sends less if a device has fewer tokens than the table has rows.
  Gradients are sent back the same way, in `dtype`; those of equal tokens are
  added up in float32.
  """
  mesh = batches.ambient(ids_BL.shape[0])
  if mesh is None or mesh.size == 1:
    return jnp.take(table_VD, ids_BL, axis=0).astype(dtype)
  V, D = table_VD.shape
  ways = mesh.shape.get("tensor", 1)
  split_by_token = ways > 1 and V % ways == 0
  # The layout of the table: {dimension: axes}.
  placed = {0: ("tensor",)} if split_by_token else {}
  # The dimension that the default rules split over `fsdp`.
  fsdp_dim = rules.largest_free((V, D), mesh.shape["fsdp"], placed)
  if fsdp_dim is not None:
    placed |= {fsdp_dim: ("fsdp",)}

  out_spec = stream_spec(mesh, ids_BL)
  ids_spec = out_spec
  if split_by_token:  # The devices of a `tensor` group look up the same tokens.
    ids_spec = PartitionSpec(batches.batch_axes(), length_axis(mesh, ids_BL))
  ids_axes = (*batches.batch_axes(), *axes_of_length(ids_spec))
  # Axes that split the tokens and not the table.
  copy_axes = tuple(axis for axis in ids_axes if (axis,) not in placed.values())
  num_tokens = ids_BL.size // math.prod(mesh.shape[axis] for axis in ids_axes)
  columns_divide = fsdp_dim is not None and D % mesh.shape["fsdp"] == 0
  exchange = columns_divide and num_tokens < V

  def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
    # The transpose of this copy adds up the gradients, once.
    table = jax.lax.pcast(table.astype(dtype), copy_axes, to="varying")
    if exchange:
      ids = jax.lax.all_gather(ids, "fsdp", tiled=True)
      if fsdp_dim == 0:  # From parts by token to parts by column.
        table = jax.lax.all_to_all(table, "fsdp", 1, 0, tiled=True)
    elif fsdp_dim is not None:
      table = jax.lax.all_gather(table, "fsdp", axis=fsdp_dim, tiled=True)
    table = table.astype(jnp.float32)
    if split_by_token:
      x = scattered(_own_rows(table, ids).astype(dtype), out_spec)
    else:
      x = jnp.take(table, ids, axis=0).astype(dtype)
    if exchange:
      # From the group's tokens and own columns to own tokens and all columns.
      x = jax.lax.all_to_all(x, "fsdp", 0, 2, tiled=True)
    return x

  x_BLD = jax.shard_map(
    on_device, in_specs=(rules.spec_of(placed), ids_spec), out_specs=out_spec
  )(table_VD, ids_BL)
  if split_by_token:
    # A token that no device holds gives NaN, as jnp.take does.
    valid_BL1 = ((ids_BL >= -V) & (ids_BL < V))[..., None]
    x_BLD = jnp.where(valid_BL1, x_BLD, jnp.nan)
  return x_BLD


def _own_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Embeddings of the tokens that this device holds, and 0 for the others."""
  num_rows = table.shape[0]
  vocab_size = num_rows * jax.lax.axis_size("tensor")
  ids = jnp.where(ids < 0, ids + vocab_size, ids)
  own = ids - num_rows * jax.lax.axis_index("tensor")
  # Negative numbers would count from the end of this part.
  own = jnp.where(own < 0, num_rows, own)
  return jnp.take(table, own, axis=0, mode="fill", fill_value=0)
