"""Takes chosen examples out of a batch that is split over devices.

XLA's own gather would need the whole batch, or the whole result, on every
device. Without an ambient mesh that splits the batch, these functions only
index.

Axes: B batch, b examples of the batch on one device, c chosen examples, k
chosen examples on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bigtrain.sharding import batches


def take_everywhere(x: jax.Array, chosen_c: jax.Array) -> jax.Array:
  """Returns x[chosen], [c, ...], on every device. For a few small rows."""
  if batches.ambient(len(x)) is None:
    return x[chosen_c]
  axes = batches.batch_axes()

  def on_device(x_b: jax.Array, chosen_c: jax.Array) -> jax.Array:
    row_c = chosen_c - jax.lax.axis_index(axes) * len(x_b)
    is_own_c = (row_c >= 0) & (row_c < len(x_b))
    own = x_b[jnp.clip(row_c, 0, len(x_b) - 1)]
    # One device has the row, and the others add zeros: the sum is exact.
    return jax.lax.psum(jnp.where(_like(is_own_c, own), own, 0), axes)

  return jax.shard_map(
    on_device,
    in_specs=(PartitionSpec(axes), PartitionSpec()),
    out_specs=PartitionSpec(),
  )(x, chosen_c)


def take(tree: Any, chosen_c: jax.Array) -> Any:
  """Returns x[chosen] of each array, [c, ...], split over the devices.

  Each device passes its part of the batch to its neighbour, and so on, until
  every device has seen the examples that it needs. If `chosen` is sorted and no
  part of the batch has many more chosen examples than another, an example is at
  home or next door, so two or three rounds are enough, whatever the number of
  devices. A device never holds more than two parts of the batch.

  Args:
    tree: arrays [B, ...].
    chosen_c: sorted numbers of examples; c divides among the devices.
  """
  B = len(jax.tree.leaves(tree)[0])
  mesh = batches.ambient(B)
  if mesh is None:
    return jax.tree.map(lambda x: x[chosen_c], tree)
  axes = batches.batch_axes()
  ways = batches.batch_ways(mesh)
  b, k = B // ways, len(chosen_c) // ways

  # The device that has each chosen example, seen from the one that needs it.
  distance_c = chosen_c // b - jnp.arange(len(chosen_c)) // k
  rounds_up, rounds_down = jnp.max(distance_c), jnp.max(-distance_c)

  def on_device(tree_b: Any, chosen_k: jax.Array, up: Any, down: Any) -> Any:
    home_k, row_k = chosen_k // b, chosen_k % b
    me = jax.lax.axis_index(axes)

    def collect(part_b: Any, owner: Any, result_k: Any) -> Any:
      """Fills in the examples that belong to `owner`, whose part this is."""

      def fill(x_b: jax.Array, old_k: jax.Array) -> jax.Array:
        return jnp.where(_like(home_k == owner, old_k), x_b[row_k], old_k)

      return jax.tree.map(fill, part_b, result_k)

    result_k = jax.tree.map(lambda x_b: x_b[row_k], tree_b)
    for direction, rounds in ((1, up), (-1, down)):

      def one_round(i: Any, carry: Any, direction: int = direction) -> Any:
        part_b, result_k = carry
        part_b = _from_neighbour(part_b, mesh, direction)
        owner = me + direction * (i + 1)
        return part_b, collect(part_b, owner, result_k)

      _, result_k = jax.lax.fori_loop(0, rounds, one_round, (tree_b, result_k))
    return result_k

  split, whole = PartitionSpec(axes), PartitionSpec()
  return jax.shard_map(
    on_device,
    in_specs=(split, split, whole, whole),
    out_specs=split,
  )(tree, chosen_c, rounds_up, rounds_down)


def _from_neighbour(tree: Any, mesh: Any, direction: int) -> Any:
  """The arrays of the next device along the batch, or of the one before."""
  axes = batches.batch_axes()
  in_mesh = tuple(axis for axis in mesh.axis_names if axis in axes)
  # ppermute numbers devices in the order of the mesh's axes, which need not be
  # that of the batch's.
  numbers = np.arange(batches.batch_ways(mesh))
  numbers = numbers.reshape([mesh.shape[axis] for axis in in_mesh])
  numbers = numbers.transpose([in_mesh.index(axis) for axis in axes])
  receivers = numbers.reshape(-1)
  senders = np.roll(receivers, -direction)
  pairs = list(zip(senders.tolist(), receivers.tolist()))
  return jax.lax.ppermute(tree, in_mesh, pairs)


def _like(x: jax.Array, other: jax.Array) -> jax.Array:
  """x [n] with as many dimensions as other [n, ...]."""
  return x.reshape(-1, *[1] * (other.ndim - 1))
