"""The text tower: its poolings. test_two_towers.py tests the rest of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.models import text_transformer


@pytest.mark.parametrize(
  ("pool_type", "expected"),
  [
    ("last", [[5, 1], [7, 8]]),
    ("first", [[1, 9], [0, 0]]),
    ("gap", [[3, 5], [3.5, 4]]),
    ("max", [[5, 9], [7, 8]]),
  ],
)
def test_poolings_have_the_known_values(pool_type, expected):
  x_BLD = jnp.asarray([[[1.0, 9], [5, 1]], [[0, 0], [7, 8]]])
  model = text_transformer.Model(variant="mu", pool_type=pool_type)
  np.testing.assert_array_equal(model._pool(x_BLD), expected)
