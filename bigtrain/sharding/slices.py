"""The order of the devices of a mesh on several slices or servers.

A slice is a set of devices with a fast network among them: a slice of TPUs, or
a server with GPUs. The network between slices is slower. So an axis of the mesh
that sends little is spread over the slices, `replica` first, and one that sends
much stays inside of a slice, `tensor` above all.

The functions need only the attributes of devices: `platform`, `slice_index`,
`process_index`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.settings import ConfigError

# What an axis sends over the network between slices in each step, for the
# warning; "part" is (n - 1) / n.
_TRAFFIC = {
  "fsdp": "in each microbatch, a device sends 3 x {part:.2f} x the bytes of "
  "the parameters of its tensor group",
  "sequence": "every attention sends 2 x {part:.2f} x its keys and values, and "
  "every step 2 x {part:.2f} x the gradients of a device",
  "tensor": "every block sends 8 x {part:.2f} x its activations (tokens x "
  "width), 4 forward and 4 backward",
}


def slice_of(device: Any) -> int:
  """Returns the number of a device's slice or server.

  jax numbers servers with GPUs as slices. Elsewhere a server is a process.
  """
  number = getattr(device, "slice_index", None)
  if number is None and device.platform == "tpu":
    return 0  # One slice.
  return int(device.process_index if number is None else number)


def grouped(devices: Sequence[Any], slices: int | None) -> list[list[Any]]:
  """Returns the devices of each slice.

  Args:
    slices: expected number of slices, or None for any. Simulated devices of one
      process form this number of slices, each of neighbours.

  Raises:
    ConfigError: there is another number of slices.
  """
  groups: dict[int, list[Any]] = {}
  for device in devices:
    groups.setdefault(slice_of(device), []).append(device)
  result = [groups[number] for number in sorted(groups)]
  if slices is None:
    return result
  if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
    raise ConfigError(
      f"config.mesh.slices: expected a positive whole number, got {slices!r}."
    )
  simulated = len(result) == 1 and devices[0].platform == "cpu"
  if simulated and len(devices) % slices == 0:
    size = len(devices) // slices
    return [list(devices[i * size : (i + 1) * size]) for i in range(slices)]
  if len(result) != slices:
    raise ConfigError(
      f"config.mesh.slices={slices}: expected {len(result)}, the number of "
      f"slices or servers that the devices ({len(devices)}) are in."
    )
  return result


def spread(shape: Sequence[int], slices: int) -> tuple[int, ...] | None:
  """Returns over how many slices each axis goes, outer axes first.

  >>> spread((4, 8, 1, 2), 4), spread((2, 16, 1, 2), 8), spread((3, 8), 2)
  ((4, 1, 1, 1), (2, 4, 1, 1), (1, 2))

  Returns:
    Factors of the sizes whose product is `slices`; None if none exist.
  """
  factors = []
  for size in shape:
    factors.append(math.gcd(size, slices))
    slices //= factors[-1]
  return tuple(factors) if slices == 1 else None


def arranged(groups: Sequence[Sequence[Any]], shape: Sequence[int]) -> Any:
  """Returns an array of devices with the shape of a mesh."""
  outer = spread(shape, len(groups))
  if outer is None or len({len(group) for group in groups}) > 1:
    devices = [device for group in groups for device in group]
    return _inside(devices, shape)
  inner = [size // factor for size, factor in zip(shape, outer)]
  grids = [_inside(group, inner) for group in groups]
  # One array [factors of all axes, sizes within a slice].
  grid = np.stack(grids).reshape(*outer, *inner)
  number = len(shape)
  order = [at for axis in range(number) for at in (axis, number + axis)]
  return grid.transpose(order).reshape(tuple(shape))


def _inside(devices: Sequence[Any], shape: Sequence[int]) -> Any:
  """Returns an array of the devices of a slice; on TPUs near in the torus."""
  # Devices of several slices are not in one torus.
  one_torus = len({slice_of(device) for device in devices}) == 1
  if devices[0].platform == "tpu" and one_torus:
    from jax.experimental import mesh_utils

    # fsdp=8 in a 4x4x4 slice needs one axis and half of the next.
    return mesh_utils.create_device_mesh(
      tuple(shape), devices=list(devices), allow_split_physical_axes=True
    )
  grid = np.empty(len(devices), object)
  grid[:] = devices
  return grid.reshape(tuple(shape))


def crossing(
  grid: Any, axes: Sequence[str], groups: Sequence[Sequence[Any]]
) -> dict[str, int]:
  """Returns the axes with groups of devices in several slices.

  Returns:
    The largest number of slices of a group, by axis.
  """
  number_of = {d: i for i, group in enumerate(groups) for d in group}
  numbers = np.vectorize(number_of.get, otypes=[int])(grid)
  crossed = {}
  for at, axis in enumerate(axes):
    rows = np.moveaxis(numbers, at, -1).reshape(-1, grid.shape[at])
    most = max(len(set(row)) for row in rows.tolist())
    if most > 1:
      crossed[axis] = most
  return crossed


def warn_of_slow_axes(
  grid: Any, axes: Sequence[str], groups: Sequence[Sequence[Any]]
) -> None:
  """Warns if an axis other than `replica` is in several slices or servers."""
  crossed = crossing(grid, axes, groups)
  crossed.pop("replica", None)
  if not crossed:
    return
  sizes = dict(zip(axes, grid.shape))
  size = min(len(group) for group in groups)
  parts = [
    f"config.mesh.{axis}={sizes[axis]} is in {number} slices or servers: "
    + _TRAFFIC[axis].format(part=(sizes[axis] - 1) / sizes[axis])
    for axis, number in crossed.items()
  ]
  logging.warning(
    "%s; all of it over the network between them. A slice or server has %d "
    "devices: axes whose product (without replica) divides %d stay inside.",
    "; ".join(parts),
    size,
    size,
  )
