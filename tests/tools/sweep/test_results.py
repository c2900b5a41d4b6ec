"""The table of a sweep and its files."""

import csv
import json

import pytest
from support import written_runs

from bigtrain.cluster import lease
from bigtrain.config.errors import ConfigError
from bigtrain.tools.sweep import results
from bigtrain.tools.sweep.variants import Variant


def make(folder, metric=None, mode=None, names=("lr=1", "lr=2", "lr=3")):
  variants = [Variant(n, {"lr": int(n[-1])}, [], f"{n}!") for n in names]
  return results.Results(str(folder), variants, metric, mode)


@pytest.fixture
def folder(tmp_path):
  for lr, evals in ((1, ("val",)), (2, ("val", "test"))):
    written_runs.write_run(tmp_path / f"lr={lr}", evals=evals)
  lines = (tmp_path / "lr=2" / "metrics.jsonl").read_text().splitlines(True)
  (tmp_path / "lr=2" / "metrics.jsonl").write_text("".join(lines[:30]))
  return tmp_path


def test_the_best_is_first_and_marked(folder):
  table = make(folder)
  table.entries[2].state = results.FAILED
  table.entries[2].reason = "error: too deep"
  head, *lines = table.table().splitlines()
  assert head.split() == "lr state step val/acc (max) reason".split()
  assert lines[0].startswith("*  1") and "0.8 @ 400" in lines[0]
  assert lines[1].startswith("   2") and "0.6 @ 300" in lines[1]
  assert lines[2].endswith("error: too deep")
  table = make(folder, "loss", "max")
  assert table.table().splitlines()[1].startswith("*  1")
  table = make(folder, "test/acc")
  assert table.table().splitlines()[1].startswith("*  2")


def test_files(folder):
  table = make(folder)
  table.entries[1].secs = 12.34
  table.write()
  content = json.loads((folder / "sweep.json").read_text())
  assert (content["metric"], content["mode"]) == ("val/acc", "max")
  assert content["best"] == "lr=1"
  assert content["variants"][1]["value"] == 0.6
  rows = list(csv.DictReader((folder / "sweep.csv").open()))
  assert [row["lr"] for row in rows] == ["1", "2", "3"]
  assert rows[1]["val/acc"] == "0.6" and rows[1]["secs"] == "12.3"


def test_states_of_an_earlier_call(folder):
  table = make(folder)
  states = [results.FINISHED, results.RUNNING, results.FAILED]
  for entry, state in zip(table.entries, states):
    entry.state, entry.reason = state, "why"
  table.write()
  # The second one's process has been killed.
  again = make(folder)
  assert [entry.state for entry in again.entries] == [
    results.FINISHED,
    results.INTERRUPTED,
    results.FAILED,
  ]
  assert again.entries[2].reason == "why"
  holder = lease.acquire(str(folder / "lr=2"))
  try:
    assert make(folder).entries[1].state == results.RUNNING
  finally:
    holder.release()
  # Another config, or no rows: not finished.
  variant = again.entries[0].variant._replace(digest="other")
  table = results.Results(str(folder), [variant], None, None)
  assert table.entries[0].state == results.WAITING
  (folder / "lr=1" / "metrics.jsonl").unlink()
  assert make(folder).entries[0].state == results.WAITING


def test_metrics_that_no_run_has(folder):
  with pytest.raises(ConfigError, match="Did you mean 'val/acc'"):
    make(folder, "val/accc").check_metric()
  with pytest.raises(ConfigError, match="no evaluation 'vall'"):
    results.check_evaluation("vall/acc", {"evals": {"val": {}}})
  results.check_evaluation("loss", {})
