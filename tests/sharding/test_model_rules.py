"""A model's rules for the axis `tensor`."""

import pytest

from bigtrain import main, sharding
from bigtrain.config.errors import ConfigError

DIMS = {r".*/query/kernel": "D -> H K", r".*/key/kernel": "D -> G K"}
SHAPES = {
  "block_0/query/kernel": (32, 6, 8),
  "blocks/query/kernel": (4, 32, 6, 8),
  "block_0/key/kernel": (32, 2, 8),
  "norm/scale": (32,),
}


def test_the_first_match_names_the_dimension():
  assert sharding.place(DIMS, SHAPES, {"tensor": 2}) == {
    "block_0/query/kernel": ((32, 6, 8), {1: ("tensor",)}),
    "blocks/query/kernel": ((4, 32, 6, 8), {2: ("tensor",)}),
    "block_0/key/kernel": ((32, 2, 8), {1: ("tensor",)}),
  }
  assert sharding.place(DIMS, SHAPES, {"tensor": 1}) == {}


def test_an_array_that_must_divide_is_an_error_with_sizes_that_work():
  with pytest.raises(ConfigError) as e:
    sharding.place(DIMS, SHAPES, {"tensor": 4})
  assert str(e.value) == (
    "config.mesh.tensor=4 does not divide block_0/query/kernel (dimension 1 of "
    "(32, 6, 8) is 6), blocks/query/kernel (dimension 2 of (4, 32, 6, 8) is "
    "6); the nearest sizes that work for all: 2 and 3."
  )


def test_an_array_that_may_be_whole_is_a_warning(caplog):
  placed = sharding.place(DIMS, SHAPES, {"tensor": 3})
  assert list(placed) == ["block_0/query/kernel", "blocks/query/kernel"]
  assert "tensor=3 does not divide block_0/key/kernel" in caplog.text


def test_a_model_without_rules_cannot_be_split(tiny_config, tmp_path):
  config = tiny_config({"mesh": {"fsdp": 4, "tensor": 2}})
  with pytest.raises(
    ConfigError, match=r"tensor=2: .* has no function param_dims\(model\)"
  ):
    main.train(config, str(tmp_path))
