"""The HTML page."""

import pytest
import written_runs

from bigtrain.tools.report import curves, page, panels, report


def test_differences_of_configs():
  runs = [
    panels.Run("a", {"lr": 1e-3, "model": {"width": 64}, "pp": "x"}, {}, []),
    panels.Run("b", {"lr": 1e-3, "model": {"width": 32, "mlp": {}}}, {}, []),
  ]
  assert page.differences(runs) == {
    "model.width": ["64", "32"],
    "pp": ["x", ""],
    "model.mlp": ["", "{}"],
  }


def test_pages_are_reproducible(tmp_path):
  pytest.importorskip("matplotlib")
  workdir = written_runs.write_run(tmp_path / "a")
  first, second = (
    page.render(runs, curves.svgs(runs))
    for runs in [report.read([workdir])] * 2
  )
  assert first == second
