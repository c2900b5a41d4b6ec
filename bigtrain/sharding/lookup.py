"""Rows of a table, such as embeddings, whose parts are on several devices.

Over `fsdp`, a device with fewer tokens than the table has rows exchanges rows:
each device looks up the columns that it has for the tokens of all, and sends
them to the devices of the tokens. Otherwise the table is gathered. Over
`tensor`, each device looks up the rows that it has.

The gradients go the same way back. A device adds up those of equal tokens in
float32. What it sends is in the dtype of the computation, as for other weights.

Axes: B batch, L length, V rows of the table, D width.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain.sharding import batches, rules, tensor
from bigtrain.sharding.mesh import BATCH_AXES


def lookup(table_VD: jax.Array, ids_BL: jax.Array, dtype: Any) -> jax.Array:
  """Returns rows of a table [B, L, D], split as `stream_spec` says."""
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
  out = tensor.stream_spec(mesh, ids_BL)
  of_ids = out
  if by_rows:  # The devices of a `tensor` group have the same tokens.
    length = tensor.length_axis(mesh, ids_BL)
    of_ids = PartitionSpec(BATCH_AXES, *([length] if length else []))
  over = (*BATCH_AXES, *tensor.axes_of_length(of_ids))
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
      x = tensor.scattered(_own_rows(table, ids).astype(dtype), out)
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
