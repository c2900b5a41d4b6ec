"""Devices of several slices or servers, as objects with their attributes."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.sharding.mesh import arranged, crossing, grouped


class Device(NamedTuple):
  id: int
  platform: str
  process_index: int
  slice_index: int | None = None
  device_kind: str = "H100"
  coords: Any = None
  core_on_chip: int = 0


def gpus(servers, each, per_process=1):
  """GPUs whose order is not that of the servers."""
  order = [(i, s) for i in range(each) for s in range(servers)]
  return [
    Device(n, "gpu", (s * each + i) // per_process, s)
    for n, (i, s) in enumerate(order)
  ]


def tpus(number, bounds):
  """Chips of v5p in slices of the same shape."""
  return [
    Device(
      *(s * math.prod(bounds) + n, "tpu", n // 4, s, "TPU v5"),
      coords=at,
    )
    for s in range(number)
    for n, at in enumerate(np.ndindex(*bounds))
  ]


def place(devices, shape, number=None):
  groups = grouped(devices, number)
  grid = arranged(groups, shape)
  assert grid.shape == shape and set(grid.flat) == set(devices)
  return grid, crossing(grid, groups)


@pytest.mark.parametrize(
  "shape, crossed",
  [
    ((4, 1, 8, 1, 1), {"replica": 4}),
    ((8, 1, 1, 2, 2), {"replica": 4}),
    ((4, 1, 1, 2, 4), {"replica": 4}),
    # A group of fsdp does not fit into a server.
    ((1, 1, 32, 1, 1), {"fsdp": 4}),
    ((2, 1, 4, 1, 4), {"replica": 2, "fsdp": 2}),
    ((1, 1, 2, 1, 16), {"fsdp": 2, "tensor": 2}),
    ((1, 4, 8, 1, 1), {"pipeline": 4}),
  ],
)
def test_replica_goes_over_servers_and_tensor_stays_inside(shape, crossed):
  assert place(gpus(4, 8), shape, 4)[1] == crossed
  assert place(gpus(4, 8), shape)[1] == crossed


def test_tensor_stays_inside_where_the_servers_do_not_divide():
  _, crossed = place(gpus(3, 8), (1, 1, 6, 1, 4))
  assert crossed == {"fsdp": 3}
  # Seven groups of eight in servers with 28 GPUs: nothing divides evenly.
  assert "tensor" in place(gpus(2, 28), (7, 1, 1, 1, 8))[1]


def test_slices_of_tpus_are_toruses_with_the_replicas_across():
  grid, crossed = place(tpus(2, (2, 2, 4)), (4, 1, 2, 1, 4), 2)
  assert crossed == {"replica": 2}
  for group in grid.reshape(-1, 4):
    coords = np.asarray([d.coords for d in group])
    # A square or a line of neighbours.
    assert sorted(np.ptp(coords, axis=0)) in ([0, 1, 1], [0, 0, 3])


def test_the_number_of_slices_is_checked():
  with pytest.raises(
    ConfigError, match="slices=2: expected 4, the number of slices"
  ):
    grouped(gpus(4, 2), 2)
  with pytest.raises(ConfigError, match=r"slices: expected .* got 0"):
    sharding.make_mesh(slices=0)
  with pytest.raises(ConfigError, match=r"slices=3: expected 1, .*\(8\)"):
    sharding.make_mesh(slices=3)


def test_simulated_devices_form_slices_of_neighbours():
  mesh = sharding.make_mesh(replica=2, fsdp=2, tensor=2, slices=2)
  assert [d.id for d in mesh.devices.flat] == [*range(8)]
  groups = grouped(jax.devices(), 2)
  crossed = crossing(mesh.devices, groups)
  assert crossed == {"replica": 2}


def test_one_warning_has_the_traffic_of_the_slow_axes(caplog):
  sharding.make_mesh(replica=4, fsdp=2, slices=4)
  assert not caplog.records
  sharding.make_mesh(fsdp=2, sequence=2, tensor=2, slices=8)
  (record,) = caplog.records
  text = record.getMessage()
  for axis in ("fsdp=2", "sequence=2", "tensor=2"):
    assert f"config.mesh.{axis} is in 2 slices" in text
  assert "3 x 0.50 x the bytes of the parameters" in text
  assert "8 x 0.50 x its activations" in text
  assert "has 1 devices" in text
