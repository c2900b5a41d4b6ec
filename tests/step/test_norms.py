"""Norms and statistics of parameters in rows."""

import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.step import norms

STATISTICS = ("weight_", "grad_rms/", "grad_norm/", "update_rms/", "stats_")


def statistics(workdir):
  """{step: {name: value}} of the rows."""
  return {
    step: {k: v for k, v in row.items() if k.startswith(STATISTICS)}
    for step, row in tiny.rows(workdir).items()
  }


def test_statistics_of_a_row_are_means_of_its_steps(tiny_config, tmp_path):
  """Also over a resume in the middle of a row."""
  changes = {"evals": {}, "total_steps": 6}
  config = tiny_config(changes | {"log_steps": 1, "weight_stats": "per_param"})
  main.train(config, str(tmp_path / "each"))
  changes |= {"log_steps": 3, "weight_stats": "per_param_mean"}
  main.train(
    tiny_config(changes | {"stop_at_steps": 5}), str(tmp_path / "mean")
  )
  main.train(tiny_config(changes), str(tmp_path / "mean"))
  each, mean = statistics(tmp_path / "each"), statistics(tmp_path / "mean")
  assert {row["stats_steps"] for row in each.values()} == {1}
  covered = {1: [1], 3: [2, 3], 6: [4, 5, 6]}
  for step, steps in covered.items():
    assert mean[step].pop("stats_steps") == len(steps)
    assert len(mean[step]) > 10
    for name, value in mean[step].items():
      expected = np.mean([each[s][name] for s in steps])
      assert value == pytest.approx(expected, rel=1e-5), (step, name)
  others = [tiny.rows(tmp_path / run)[6] for run in ("each", "mean")]
  assert others[0]["loss_last"] == others[1]["loss_last"]


def test_a_row_without_good_steps_has_no_means():
  named = norms.NamedScalars(("param_norm", "weight_rms/a"), np.zeros(2), True)
  assert named.log_values(0.0) == {}
  assert named.log_values(2.0)["stats_steps"] == 2
  one = norms.NamedScalars(("param_norm",), np.ones(1))
  assert one.log_values(0.0) == {"param_norm": 1.0}
