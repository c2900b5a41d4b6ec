"""The text tower: its poolings. test_two_towers.py tests the rest of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.models import text_transformer


@pytest.mark.parametrize(
  ("pool_type", "expected"),
  [
    ("last", [[5, 1], [7, 8]]),
    ("first", [[1, 9], [0, 0]]),
    ("gap", [[3, 5], [3.5, 4]]),
    ("max", [[5, 9], [7, 8]]),
    ("eos", [[5, 1], [0, 0]]),
  ],
)
def test_poolings_have_the_known_values(pool_type, expected):
  x_BLD = jnp.asarray([[[1.0, 9], [5, 1]], [[0, 0], [7, 8]]])
  text = jnp.asarray([[3, 2], [2, 2]])
  model = text_transformer.Model(variant="mu", pool_type=pool_type, eos_id=2)
  np.testing.assert_array_equal(model._pool(x_BLD, text), expected)


def test_a_causal_tower_sees_no_later_token():
  options = dict(variant="mu", vocab_size=8, pool_type="first")
  text = jnp.asarray([[1, 2, 3], [1, 7, 5]])
  same = {}
  for causal in (True, False):
    model = text_transformer.Model(causal=causal, **options)
    params = model.init(jax.random.key(0), text)
    first, second = model.apply(params, text)[0]
    same[causal] = np.allclose(first, second)
  assert same == {True: True, False: False}


def test_pooling_at_the_end_needs_its_id():
  with pytest.raises(ConfigError, match="eos_id: missing"):
    text_transformer.Model(variant="mu", pool_type="eos")
