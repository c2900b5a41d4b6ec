"""Stopping at metrics that are not finite."""

import math

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny import hooking

from bigtrain import main

VALUES = st.one_of(
  st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf])
)


@given(
  st.lists(
    st.dictionaries(st.sampled_from(["loss", "val/a", "val/b"]), VALUES),
    max_size=6,
  ),
  st.sampled_from([None, "val/a", ["loss", "val/b"]]),
)
def test_the_rule_on_any_history(rows, metrics):
  running = hooking.build(nan=dict(type="stop_on_nan", metrics=metrics))
  watched = [metrics] if isinstance(metrics, str) else metrics
  watched = watched or ["loss", "val/a", "val/b"]
  for i, row in enumerate(rows):
    stop = hooking.show(running, {"step": i, "count": 3, **row})
    bad = [k for k in watched if k in row and not math.isfinite(row[k])]
    assert (stop is not None) == bool(bad)
    if stop:
      assert stop.failure
      assert any(name in stop.reason for name in bad)


def test_a_result_that_is_not_finite_fails_a_run(tiny_config, tmp_path):
  path = "tiny.mine"
  config = tiny_config(
    {
      "task": path,
      "model_name": path,
      "model": {},
      "input.data": dict(type=path, length=64),
      "evals": {
        "own": dict(type=path, pred="shifted", at=math.nan, log_steps=2)
      },
      "hooks": {"nan": dict(type="stop_on_nan", metrics="own/out")},
    }
  )
  with pytest.raises(RuntimeError, match="'nan': own/out is nan at step 2"):
    main.train(config, str(tmp_path))
  assert max(tiny.rows(tmp_path)) == 2
