import numpy as np
import pytest

from bigtrain.config.errors import DataError
from bigtrain.inference import ops, preprocessing
from bigtrain.pp import parse, registry


@pytest.mark.parametrize(
  "spec, image, raw, picture, message",
  [
    pytest.param(
      "value_range(-1,1,0,16)", [8, 8, 1], ["uint8", [8, 8, 1], 0, 16],
      np.zeros((6, 8, 1), np.uint8),
      r"6x8x1, but config\.input\.pp is for the run's pictures, which are "
      r"8x8x1: .*resize\(\(8, 8\)\)",
      id="size",
    ),
    pytest.param(
      "value_range(-1,1,0,16)", [8, 8, 1], ["uint8", [8, 8, 1], 0, 16],
      np.full((8, 8, 1), 255, np.uint8),
      r"values from 255 to 255, but .* 0 to 16: scale them, .*resize\(\(8, 8\)",
      id="values",
    ),
    pytest.param(
      "resize(8)", [8, 8, 3], ["float32", [None, None, 3], 0, 1],
      np.full((9, 9, 3), 255, np.float32),
      r"scale them, .*resize\(\(8, 8\)\)",
      id="of the size that the model takes",
    ),
    pytest.param(
      "value_range(-1,1)|naflex(4,8)", [8, 48], ["uint8", [8, 12, 3], 0, 16],
      np.zeros((12, 8, 3), np.uint8),
      r"12x8x3, but .* which are 8x12x3: .*naflex\(4, 256\)",
      id="size of pictures that become patches",
    ),
    pytest.param(
      "value_range(-1,1)|naflex(4,8)", [8, 48], ["uint8", [None, 8, 3], 0, 9],
      np.full((12, 8, 3), 255, np.uint8),
      r"scale them, .*naflex\(4, 256\)",
      id="values of pictures that become patches",
    ),
  ],
)  # fmt: skip
def test_a_picture_unlike_those_of_the_run_is_refused(
  spec, image, raw, picture, message
):
  features = ["image", "shapes"] if "naflex" in spec else ["image"]
  needs = registry.needed(parse.parse(spec), features)
  chain = ops.Chain(tuple(features), "config.input.pp", needs)
  data = {"features": {"image": ["float32", image]}, "raw": {"image": raw}}
  with pytest.raises(DataError, match=message):
    preprocessing.Pictures(chain, data)([picture])
