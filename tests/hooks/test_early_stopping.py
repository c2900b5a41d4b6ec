"""Early stopping on any history of values."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import hooking

from bigtrain.settings import ConfigError

# Small numbers, so that equal values and exact tolerances occur.
VALUES = st.one_of(
  st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf])
)
HISTORIES = st.lists(VALUES, max_size=12)


def should_stop(values, mode, patience, atol, rtol):
  """The rule of the docstring, on the whole history."""
  if len(values) < patience + 1:
    return False
  for i in range(len(values) - patience, len(values)):
    before, now = values[i - 1], values[i]
    better = before - now if mode == "min" else now - before
    if better > atol + rtol * abs(before):
      return False
  return True


@given(
  HISTORIES,
  st.sampled_from(["min", "max"]),
  st.integers(1, 4),
  st.sampled_from([0.0, 0.5, 1.0]),
  st.sampled_from([0.0, 0.5]),
  st.data(),
)
def test_the_rule_on_any_history(values, mode, patience, atol, rtol, data):
  def start():
    entry = dict(
      type="early_stopping",
      metric="val/x",
      mode=mode,
      patience=patience,
      atol=atol,
      rtol=rtol,
    )
    return hooking.build(early=entry)

  running = start()
  for i, value in enumerate(values):
    if data.draw(st.booleans(), label=f"restart before {i}"):
      saved = json.loads(json.dumps(running.state()))
      running = start()
      running.restore(saved)
    # Rows of training and of other evaluations do not matter.
    assert running.after_step(i, {"step": i, "loss": 0.0}) is None
    assert running.after_step(i, {"step": i, "other/x": 0.0}) is None
    stop = running.after_step(i, {"step": i, "val/x": value})
    expected = should_stop(values[: i + 1], mode, patience, atol, rtol)
    assert (stop is not None) == expected
    if stop:
      assert not stop.failure
      assert "'early'" in stop.reason and "val/x" in stop.reason


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(), r"config.hooks.h.metric: missing"),
    (
      dict(metric="x", mode="mn"),
      r"config.hooks.h.mode: no mode 'mn'. Did you mean 'min'",
    ),
    (
      dict(metric="x", patience=0),
      r"hooks.h.patience: expected a whole number at least 1, got 0",
    ),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    hooking.build(h=dict(type="early_stopping", **options))
