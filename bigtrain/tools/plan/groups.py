"""Groups of devices that send to one another.

A program names the devices of a group by their numbers, a plan by axes of the
mesh. Devices are numbered in the order of `sharding.AXES`, the last axis
fastest: with fsdp=4 and tensor=2, a group over `fsdp` has the devices 0, 2, 4
and 6. All groups over the same axes look alike, so the distances between the
numbers in one of them identify the axes.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bigtrain import sharding


class Group(NamedTuple):
  """The number of devices in a group, and the distances between them."""

  size: int
  stride: int  # From one device of the group to the next.
  # A group over two axes can have two distances. Then `inner` is the number of
  # neighbours at `stride`, and `span` the number of devices from the first to
  # the last of the group. Both are 0 if there is one distance.
  inner: int = 0
  span: int = 0


def of_devices(ids: Sequence[int]) -> Group:
  if len(ids) < 2:
    return Group(len(ids), 1)
  steps = [abs(b - a) for a, b in itertools.pairwise(ids)]
  for i, step in enumerate(steps):
    if step != steps[0]:
      span = max(ids) - min(ids) + 1
      return Group(len(ids), steps[0], inner=i + 1, span=span)
  return Group(len(ids), steps[0])


def over_axes(axes: str, mesh: Mapping[str, int]) -> Group:
  """The devices that share a group over some axes.

  The axes are names such as "replica, sequence", the slowest first. "others"
  are all axes.
  """
  return _over_axes(axes, tuple(mesh[axis] for axis in sharding.AXES))


@functools.cache
def _over_axes(axes: str, sizes: tuple[int, ...]) -> Group:
  names = sharding.AXES if axes == "others" else axes.split(", ")
  grid = np.arange(math.prod(sizes)).reshape(sizes)
  # The group of device 0, with its axes in the order of the mesh.
  index = tuple(slice(None) if a in names else 0 for a in sharding.AXES)
  in_mesh_order = [axis for axis in sharding.AXES if axis in names]
  ids = grid[index].transpose([in_mesh_order.index(name) for name in names])
  return of_devices(ids.ravel().tolist())


def axes_of(group: Group, mesh: Mapping[str, int]) -> str:
  """The axes that a group goes over, or "others"."""
  axes = [axis for axis in sharding.AXES if mesh[axis] > 1]
  for count in range(1, len(axes) + 1):
    for names in itertools.combinations(axes, count):
      # Where two axes split one dimension of an array, the partitioner orders
      # the devices of a group by the dimension, not by the mesh.
      for order in itertools.permutations(names):
        if over_axes(", ".join(order), mesh) == group:
          return ", ".join(names)
  return "others"


def axis_of_stride(stride: int, mesh: Mapping[str, int]) -> str:
  """The slowest axis whose neighbours are at most `stride` apart."""
  strides = {
    axis: over_axes(axis, mesh).stride
    for axis in sharding.AXES
    if mesh[axis] > 1 and over_axes(axis, mesh).stride <= stride
  }
  return max(strides, key=strides.__getitem__, default="others")
