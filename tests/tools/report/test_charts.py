"""The data of the curves."""

import json
import math

import numpy as np
from support.written_runs import write_run

from bigtrain.tools.report import charts, panels, report


def test_long_curves_keep_their_extremes():
  rng = np.random.default_rng(0)
  values = rng.normal(size=100_000).tolist()
  values[54_321], values[99_999] = 100.0, math.nan
  steps, kept = charts.thin(range(100_000), values, 2000)
  assert 1000 < len(steps) <= 2000 and steps == sorted(set(steps))
  assert all(values[s] == k for s, k in zip(steps, kept))
  assert max(kept) == 100.0 and min(kept) == min(values[:-1])
  short = [3, 5], [1.0, math.nan]
  assert charts.thin(*short, 2000) == short


def test_the_content_is_json_without_nan(tmp_path):
  runs = report.read([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
  content = json.loads(
    json.dumps(charts.content(panels.panels(runs)), allow_nan=False)
  )
  norms = next(p for p in content["panels"] if p["title"] == "Gradient norm")
  assert [s["run"] for s in norms["series"]] == [0, 1]
  assert norms["series"][0]["y"][2] is None  # It is NaN.
  assert norms["series"][0]["x"][:3] == [10, 20, 30]
