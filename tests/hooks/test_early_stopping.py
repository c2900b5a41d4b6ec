"""Early stopping on any history of values."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import hooking

from bigtrain.config.errors import ConfigError

# Small numbers, so that equal values and exact tolerances occur.
VALUES = st.one_of(
  st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf])
)
HISTORIES = st.lists(VALUES, max_size=12)


def should_stop(values, mode, patience, atol, rtol):
  """T5X's formula, on the whole history."""
  no_better = np.greater_equal if mode == "min" else np.less_equal
  newest = values[-patience:]
  return len(newest) == patience and all(
    no_better(
      np.float32(now),
      np.float32(
        before - (atol + rtol * abs(before)) * (1 if mode == "min" else -1)
      ),
    )
    for before, now in zip(newest[:-1], newest[1:])
  )


nan, inf = math.nan, math.inf


# Number of values after which EarlyStoppingAction of T5X (t5x/trainer.py,
# commit 01c23d8) stopped, or None.
@pytest.mark.parametrize(
  ("values", "mode", "patience", "atol", "rtol", "stops"),
  [
    ([3.0, 2.0, 2.0, 2.0, 2.0], "min", 3, 0, 0, 4),
    ([3.0, 2.0, 2.0, 2.0, 2.0], "max", 2, 0, 0, 2),
    ([1.0, 1.0, 1.0], "min", 2, 0, 0, 2),
    ([0.5, 0.6, 0.6, 0.7, 0.7, 0.7], "max", 3, 0, 0, 6),
    # Exactly the tolerance, in float32, and a little more.
    ([1.0, 0.999, 0.998, 0.997], "min", 3, 1e-3, 0, 3),
    ([1.0, 0.999, 0.998, 0.997], "min", 3, 0, 1e-3, None),
    ([1.0, 0.9, 0.8, 0.7], "min", 3, 0, 0.2, 3),
    ([1.0, 1.0 - 1e-9, 1.0 - 2e-9], "min", 3, 0, 0, 3),
    ([-1.0, -1.0, -2.0, -3.0], "max", 3, 0.5, 0.5, 3),
    ([1.0, nan, nan, nan, nan], "min", 2, 0, 0, None),
    ([1.0, nan, 2.0, 3.0], "min", 3, 0, 0, None),
    ([1.0, inf, inf, inf], "min", 2, 0, 0, 2),
    ([inf, inf, inf, inf], "min", 3, 0, 0, None),
    ([1.0, inf, 2.0, 3.0, 4.0], "max", 3, 0, 0, None),
    ([1.0, -inf, -inf, 0.0, 1.0, 2.0], "min", 3, 0, 0, 6),
  ],
)
def test_stops_where_t5x_does(values, mode, patience, atol, rtol, stops):
  options = dict(mode=mode, patience=patience, atol=atol, rtol=rtol)
  running = hooking.build(h=dict(type="early_stopping", metric="x", **options))
  at = [
    number
    for number, value in enumerate(values, 1)
    if hooking.show(running, {"step": number, "x": value})
  ]
  assert at[:1] == ([stops] if stops else [])


@given(
  HISTORIES,
  st.sampled_from(["min", "max"]),
  st.integers(2, 5),
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
      running.restore(saved, i, None)
    # Rows of training and of other evaluations do not matter.
    assert hooking.show(running, {"step": i, "loss": 0.0}) is None
    assert hooking.show(running, {"step": i, "other/x": 0.0}) is None
    stop = hooking.show(running, {"step": i, "val/x": value})
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
      r"config.hooks.h.mode: unknown 'mn'. Did you mean 'min'",
    ),
    (
      dict(metric="x", patience=1),
      r"hooks.h.patience: expected a whole number at least 2, got 1",
    ),
    (dict(metric="x", atol=-0.1), r"h.atol: expected a number at least 0, got"),
    (dict(metric="x", rtol=-1), r"h.rtol: expected a number at least 0, got"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    hooking.build(h=dict(type="early_stopping", **options))
