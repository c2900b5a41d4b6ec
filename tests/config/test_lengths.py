"""Lengths with units, and their conversion to steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigtrain.config import lengths
from bigtrain.config.errors import ConfigError
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config

UNITS = Units(
  batch_size=1024,
  examples_per_epoch=1_281_167,
  tokens_per_example=256,
  total_steps=112_603,
)


@pytest.mark.parametrize(
  "key, amount, expected",
  [
    ("total_steps", 100, 100),
    ("total_epochs", 90, 112_603),  # 90 * 1281167 / 1024 = 112602.57
    ("total_epochs", 0.5, 626),
    ("total_examples", 1024 * 7, 7),
    ("total_examples", 1, 1),  # At least one step.
    ("total_examples", 0, 0),  # No step at all.
    ("total_tokens", 1024 * 256 * 3, 3),
    ("total_percent", 10, 11_260),
    ("total_percent", 100, 112_603),
  ],
)
@pytest.mark.parametrize("tracked", [True, False])
def test_steps_converts_every_unit(key, amount, expected, tracked):
  source = {key: amount, "other": 1}
  cfg = Config(source) if tracked else source
  assert lengths.steps(cfg, "total", UNITS) == expected
  if tracked:
    assert [line.split(":")[0] for line in cfg.unread()] == ["config.other"]
  else:
    assert cfg == {"other": 1}


@pytest.mark.parametrize("tracked", [True, False])
def test_steps_without_a_key_are_the_default(tracked):
  def make(source):
    return Config(source) if tracked else source

  assert lengths.steps(make({}), "log", UNITS) is None
  assert lengths.steps(make({}), "log", UNITS, default=50) == 50
  assert lengths.steps(make({"log_steps": None}), "log", UNITS, 50) == 50
  # The command line replaces the unit in the config file by another one.
  both = make({"log_epochs": None, "log_steps": 3})
  assert lengths.steps(both, "log", UNITS) == 3
  assert not tracked or both.unread() == []


def test_every_unit_is_a_suggestion_for_a_misspelled_key():
  config = Config({"total_epoch": 90})
  assert lengths.steps(config, "total", UNITS) is None
  assert config.unread() == [
    "config.total_epoch: unknown key. Did you mean 'total_epochs'?"
  ]


@pytest.mark.parametrize(
  "source, units, message",
  [
    (
      {"log_steps": 1, "log_epochs": 1},
      UNITS,
      r"config\.x\.log_steps and config\.x\.log_epochs: give the length once",
    ),
    ({"log_steps": -1}, UNITS, r"config\.x\.log_steps: .* at least 0, got -1"),
    ({"log_epochs": math.inf}, UNITS, "finite"),
    ({"log_epochs": math.nan}, UNITS, "finite"),
    ({"log_steps": "10"}, UNITS, "expected a number at least 0, got '10'"),
    ({"log_steps": True}, UNITS, "expected a number at least 0, got True"),
    ({"log_epochs": 1}, Units(8), "needs a training set of known size"),
    ({"log_tokens": 1}, Units(8), "needs an input with tokens"),
    ({"log_percent": 1}, Units(8), "needs the length of the run"),
  ],
)
def test_steps_rejects_bad_lengths(source, units, message):
  with pytest.raises(ConfigError, match=message):
    lengths.steps(Config(source, "config.x"), "log", units)
  with pytest.raises(ConfigError, match=message):
    lengths.steps(dict(source), "log", units, path="config.x")


@given(st.integers(0, 10**9), st.integers(1, 10**5))
def test_every_unit_converts_whole_steps_exactly(num_steps, batch_size):
  units = Units(batch_size, examples_per_epoch=batch_size, tokens_per_example=7)
  for unit, amount_per_example in [
    ("examples", 1),
    ("epochs", 1 / batch_size),
    ("tokens", 7),
  ]:
    amount = num_steps * batch_size * amount_per_example
    assert units.to_steps(amount, unit, "key") == num_steps


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_a_run_without_steps_is_refused(unit):
  config = Config({f"total_{unit}": 0})
  with pytest.raises(ConfigError) as e:
    lengths.read(config, 8, 80)
  assert str(e.value) == (
    f"config.total_{unit}: expected a length above 0, got 0; "
    "config.eval_only=True evaluates without training."
  )
