"""The mesh: sizes, the order of devices, and absent devices."""

import jax
import pytest

from bigtrain import sharding
from bigtrain.config.errors import ConfigError


@pytest.mark.parametrize(
  "sizes, expected",
  [
    ({}, (1, 1, 8, 1, 1)),
    (dict(replica=-1, fsdp=1), (8, 1, 1, 1, 1)),
    (dict(replica=2), (2, 1, 4, 1, 1)),
    (dict(replica=-1, fsdp=4), (2, 1, 4, 1, 1)),
    (dict(replica=2, fsdp=4), (2, 1, 4, 1, 1)),
    (dict(tensor=4), (1, 1, 2, 1, 4)),
    (dict(replica=-1, fsdp=1, sequence=2, tensor=2), (2, 1, 1, 2, 2)),
    (dict(fsdp=1, tensor=-1), (1, 1, 1, 1, 8)),
    (dict(pipeline=2, tensor=2), (1, 2, 2, 1, 2)),
  ],
)
def test_mesh_has_the_sizes_of_the_config(sizes, expected):
  mesh = sharding.make_mesh(**sizes)
  axes = ("replica", "pipeline", "fsdp", "sequence", "tensor")
  assert mesh.axis_names == axes
  assert mesh.devices.shape == expected
  assert set(mesh.devices.flat) == set(jax.devices())


def test_mesh_of_given_devices():
  mesh = sharding.make_mesh(devices=jax.devices()[:2])
  assert mesh.devices.shape == (1, 1, 2, 1, 1)


@pytest.mark.parametrize(
  "sizes, message",
  [
    (dict(replica=3), "replica=3 x fsdp=2 = 6, but the number of devices is 8"),
    (
      dict(replica=1, fsdp=4),
      "= 4, but .* devices is 8; .*: replica=2 or fsdp=8",
    ),
    (
      dict(tensor=3),
      "tensor=3 = 6, .*; the nearest .*: tensor=2 or tensor=4",
    ),
    (
      dict(replica=2, fsdp=-1, sequence=2, tensor=3),
      "replica=2 x fsdp=1 x sequence=2 x tensor=3 = 12, .*: tensor=2",
    ),
    (dict(tensor=0), r"config\.mesh\.tensor: expected .* got 0"),
    (dict(replica=-1, fsdp=16), "= 16, but the number of devices is 8"),
    (dict(replica=-1, fsdp=-1), "only one of replica and fsdp can be -1"),
    (dict(replica=0), r"config\.mesh\.replica: expected .* got 0"),
    (dict(fsdp="all"), r"config\.mesh\.fsdp: expected .* got 'all'"),
    (
      dict(pipeline=3, fsdp=2),
      "pipeline=3 x fsdp=2 = 6, .*: .*pipeline=4",
    ),
    (dict(pipeline_rounds=0), r"pipeline_rounds: expected .* got 0"),
    (
      dict(pipeline=4, pipeline_microbatches=6),
      "pipeline_microbatches=6: expected a multiple of config.mesh.pipeline=4",
    ),
    (dict(fsdp=2.0), r"config\.mesh\.fsdp: expected .* got 2\.0"),
  ],
)
def test_mesh_rejects_sizes_that_do_not_fit(sizes, message):
  with pytest.raises(ConfigError, match=message):
    sharding.make_mesh(**sizes)


def test_devices_of_a_tensor_group_are_neighbours():
  mesh = sharding.make_mesh(replica=2, fsdp=1, sequence=2, tensor=2)
  numbers = [[d.id for d in pair] for pair in mesh.devices.reshape(4, 2)]
  assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]
