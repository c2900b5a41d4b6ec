"""How a layer with experts is split over the mesh, and how tokens travel.

With an axis for the experts, each of its n devices has E / n of them. Tokens go
to the devices of their experts in one all-to-all, and their results return in
another. The gradients take the same ways back.

Axes: B batch, L length, D model width, F hidden width, E experts; n devices of
the experts' axis, Q rows from one device to another.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import sharding

# XLA's CPU compiler has no ragged all-to-all.
_RAGGED = ("tpu", "gpu")


class Split(NamedTuple):
  """The split of a layer.

  Attributes:
    mesh: the mesh.
    axis: axis that the experts are split over; None if each device needs all.
    stream: spec of the stream [B, L, D] between layers.
    hidden: whether the hidden units of the experts are split over `tensor`.
  """

  mesh: Any
  axis: str | None
  stream: PartitionSpec
  hidden: bool

  @property
  def ways(self) -> int:
    """Number of devices that the experts are split over."""
    return 1 if self.axis is None else int(self.mesh.shape[self.axis])

  @property
  def length(self) -> tuple[str, ...]:
    """Axes that split the length of the stream."""
    return sharding.axes_of_length(self.stream)

  @property
  def own(self) -> tuple[str, ...]:
    """Axes that split the length where the experts' hidden units are split."""
    return tuple(a for a in self.length if not (self.hidden and a == "tensor"))

  @property
  def rows(self) -> PartitionSpec:
    """Spec of [B, L, ...] split over `own`."""
    return PartitionSpec(sharding.BATCH_AXES, self.own or None)

  @property
  def units(self) -> str | None:
    """The axis of hidden units."""
    return "tensor" if self.hidden else None

  @property
  def varying(self) -> tuple[str, ...]:
    """Axes over which the work of the devices differs."""
    hidden = ("tensor",) if self.hidden else ()
    return (*sharding.BATCH_AXES, *self.own, *hidden)


def split_of(
  x_BLD: jax.Array, hidden: int, num_experts: int, axis: str | None
) -> Split | None:
  """Returns the split of a layer in the ambient mesh, None without one.

  Args:
    axis: axis of the mesh for whole experts, if any.
  """
  mesh = sharding.ambient(x_BLD.shape[0])
  if mesh is None:
    return None
  stream = sharding.stream_spec(mesh, x_BLD)
  tensor = mesh.shape.get("tensor", 1)
  in_parts = axis != "tensor" and tensor > 1 and hidden % tensor == 0
  # Where all devices of the axis have the same tokens, such as a single one in
  # decoding, nothing is exchanged: each device gathers the experts.
  splits = (*sharding.BATCH_AXES, *sharding.axes_of_length(stream))
  ways = 1 if axis is None else mesh.shape.get(axis, 1)
  if axis not in splits or ways == 1 or num_experts % ways:
    axis = None
  return Split(mesh, axis, stream, in_parts)


class Weights(NamedTuple):
  """How the kernels of the experts come to a device.

  Attributes:
    specs: specs of the kernels, by name.
    gathered: the dimensions that are gathered over `fsdp`, by name.
  """

  specs: dict[str, PartitionSpec]
  gathered: dict[str, int]


def weights_of(split: Split, weights: Mapping[str, jax.Array]) -> Weights:
  """Returns how the kernels (E, D, F) or, for "down", (E, F, D) come.

  `fsdp` splits the dimension that the layout "fsdp" chooses, and a gather that
  is written down has a gradient that is reduce-scattered; XLA's own choice for
  experts was an all-reduce of kernels padded with zeros.
  """
  specs, gathered = {}, {}
  for name, kernel in weights.items():
    placed: dict[int, tuple[str, ...]] = {}
    if split.axis is not None:
      placed[0] = (split.axis,)
    if split.hidden:
      placed[1 if name == "down" else 2] = ("tensor",)
    ways = split.mesh.shape["fsdp"]
    dim = None
    if split.axis != "fsdp" and ways > 1:
      dim = sharding.largest_free(kernel.shape, ways, placed)
    if dim is not None:
      placed[dim] = ("fsdp",)
      gathered[name] = dim
    specs[name] = sharding.spec_of(placed)
  return Weights(specs, gathered)


def gather(
  split: Split, how: Weights, weights: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
  """Inside a shard_map: the kernels that a device multiplies with.

  Their gradients are summed over the devices, once.
  """
  result = {}
  for name, kernel in weights.items():
    if name in how.gathered:
      kernel = jax.lax.all_gather(
        kernel, "fsdp", axis=how.gathered[name], tiled=True
      )
    missing = tuple(a for a in split.varying if a not in how.specs[name])
    result[name] = jax.lax.pcast(kernel, missing, to="varying")
  return result


def to_experts(axis: str | None, x_ESD: jax.Array) -> jax.Array:
  """Inside a shard_map: sends buffers of one size to their experts.

  Args:
    axis: the experts' axis; None leaves all where they are.

  Returns:
    [E / n, n S, D]: all devices' slots of this device's experts.
  """
  if axis is None:
    return x_ESD
  return jax.lax.all_to_all(x_ESD, axis, 0, 1, tiled=True)


def from_experts(axis: str | None, y_ESD: jax.Array) -> jax.Array:
  """The inverse of `to_experts`."""
  if axis is None:
    return y_ESD
  return jax.lax.all_to_all(y_ESD, axis, 1, 0, tiled=True)


def exchange(
  axis: str, x_nQD: jax.Array, send_n: jax.Array, receive_n: jax.Array
) -> jax.Array:
  """Inside a shard_map: sends some rows to each device of the axis.

  TPUs and GPUs send the rows alone, by a ragged all-to-all. Elsewhere all Q
  rows travel, Q being the safe bound: every choice may be for one device.

  Returns:
    [n, Q, D], the rows from each device, then zeros.
  """
  ragged = sharding.device()[0] in _RAGGED
  return _exchange((axis, ragged), x_nQD, send_n, receive_n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(
  how: tuple[str, bool],
  x_nQD: jax.Array,
  send_n: jax.Array,
  receive_n: jax.Array,
) -> jax.Array:
  axis, ragged = how
  if not ragged:
    return jax.lax.all_to_all(x_nQD, axis, 0, 0, tiled=True)
  n, Q = x_nQD.shape[:2]
  rows = x_nQD.reshape(n * Q, *x_nQD.shape[2:])
  # Device i writes into the i-th part of its receivers.
  at_n = jnp.full(n, jax.lax.axis_index(axis) * Q, jnp.int32)
  received = jax.lax.ragged_all_to_all(
    rows,
    jnp.zeros_like(rows),
    jnp.arange(n, dtype=jnp.int32) * Q,
    send_n,
    at_n,
    receive_n,
    axis_name=axis,
  )
  return received.reshape(x_nQD.shape)


def _exchange_forward(how: tuple[str, bool], *args: Any) -> tuple[Any, Any]:
  return _exchange(how, *args), args[1:]


def _exchange_backward(
  how: tuple[str, bool], sizes: Any, grad_nQD: jax.Array
) -> tuple[Any, ...]:
  send_n, receive_n = sizes
  return _exchange(how, grad_nQD, receive_n, send_n), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)
