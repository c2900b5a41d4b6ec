"""Weights of a mixture that change over the run."""

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.config.lengths import Units
from bigtrain.inputs import weights

UNITS = Units(batch_size=10, examples_per_epoch=200, total_steps=100)


def read(value):
  return weights.read(value, UNITS, "key")


def stages(*values):
  return weights.stages([read(value) for value in values], "mixture")


def test_numbers_have_one_stage():
  assert stages(3, 1) == [(0, (3.0, 1.0))]
  assert stages(dict(at_steps=[10, 20], values=[2, 2]), 1) == [(0, (2.0, 1.0))]


@pytest.mark.parametrize(
  "points",
  [
    dict(at_steps=[20, 40]),
    dict(at_percent=[20, 40.0]),
    dict(at_examples=[200, 400]),
    dict(at_epochs=[1, 2], at_steps=None),
  ],
)
def test_points_have_any_unit(points):
  made = stages(dict(values=[1, 3], shape="stair", **points), 2)
  assert made == [(0, (1.0, 2.0)), (40, (3.0, 2.0))]


def test_linear_weights_equal_interpolation_at_each_step():
  linear = dict(at_steps=[5, 25, 30], values=[1, 3, 0])
  stair = dict(at_steps=[0, 12, 28], values=[1, 0, 2], shape="stair")
  made = stages(linear, stair)
  assert made[0][0] == 0
  for step in range(60):
    _, values = [stage for stage in made if stage[0] <= step][-1]
    expected = np.interp(step, [5, 25, 30], [1, 3, 0])
    np.testing.assert_allclose(values[0], expected, atol=1e-15)
    assert values[1] == (1 if step < 12 else 0 if step < 28 else 2)


def test_long_changes_have_stages_with_the_mean_of_their_steps():
  made = stages(dict(at_steps=[0, 100_001], values=[0, 1]), 1)
  assert len(made) == 257
  ends = [step for step, _ in made[1:]]
  for (begin, values), end in zip(made, ends):
    mean = np.arange(begin, end).mean() / 100_001
    np.testing.assert_allclose(values[0], mean, rtol=1e-12)
  assert made[-1] == (100_001, (1.0, 1.0))


@pytest.mark.parametrize(
  "value, message",
  [
    (dict(at_steps=[0], valeus=[1]), "key.valeus: unknown.*'values'"),
    (dict(values=[1]), "in one unit, such as .*none"),
    (dict(at_steps=[0], at_epochs=[0], values=[1]), "in one unit"),
    (dict(at_steps=3, values=[1]), "key.at_steps: expected a list"),
    (dict(at_steps=[3]), "key.values: expected a list"),
    (dict(at_steps=[3, 2], values=[1, 2]), "ascending points.*3, 2"),
    (dict(at_percent=[1, 1.2], values=[1, 2]), r"steps \[1, 1\]"),
    (dict(at_steps=[1], values=[1, 2]), "expected 2 ascending"),
    (dict(at_tokens=[1], values=[1]), "an input with tokens"),
    (dict(at_steps=[0, 1], values=[1, -2]), r"values\[1\]: expected.*-2"),
    (dict(at_steps=[0, 1], values=[0, 0]), "a value above 0"),
    (
      dict(at_steps=[0, 1], values=[0, 1], shape="stairs"),
      "shape: unknown 'stairs'. Did you mean 'stair'",
    ),
    (dict(at_steps=[0, 7], values=[1, 0]), "mixture: .* sources at step 7"),
  ],
)
def test_mistakes_name_the_key(value, message):
  with pytest.raises(ConfigError, match=message):
    stages(value)
