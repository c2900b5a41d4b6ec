"""A sweep whose variants are Slurm jobs."""

import json
import sys

import pytest
import tiny
from support.processes import LIMIT_SECS

from bigtrain.checkpoints import folders

pytestmark = pytest.mark.cluster


def test_variants_are_jobs(slurm, tmp_path):
  tiny.write_data(tmp_path)
  path = tmp_path / "x.py"
  config = tiny.config(tmp_path)
  path.write_text(f"def get_config():\n  return {config!r}\n")
  workdir = tmp_path / "sweep"

  def sweep(*words):
    command = [sys.executable, "-m", "bigtrain.tools.sweep"]
    command += [f"--config={path}", f"--workdir={workdir}", *words]
    command += ["--grid", "lr=1e-2,-1,3e-2", "--launcher=slurm"]
    return slurm.run(*command, check=False, cwd=tmp_path)

  def entries():
    content = json.loads((workdir / "sweep.json").read_text())
    return {v["name"]: v for v in content["variants"]}

  text = sweep("--jobs=1", "--sbatch=--time=10 --comment=mine")
  first = entries()
  assert {v["state"] for v in first.values()} <= {"queued", "running"}, text
  numbers = [v["job"] for v in first.values()]
  assert slurm.state(numbers[2])["TimeLimit"] == "00:10:00"
  assert slurm.state(numbers[2])["Comment"] == "mine"
  assert slurm.state(numbers[2])["NumNodes"].startswith("1")
  # A second call submits nothing again.
  sweep("--jobs=1")
  assert [v["job"] for v in entries().values()] == numbers
  ends = [slurm.wait(number, LIMIT_SECS) for number in numbers]
  states = [end["JobState"] for end in ends]
  assert states == ["COMPLETED", "FAILED", "COMPLETED"], text
  # One at a time: each starts when the one before has ended.
  times = [(end["StartTime"], end["EndTime"]) for end in ends]
  assert all(a[1] <= b[0] for a, b in zip(times, times[1:])), times
  table = sweep("--table")
  last = entries()
  assert [v["state"] for v in last.values()] == [
    "finished",
    "failed",
    "finished",
  ], table
  assert "config.lr" in last["lr=-1"]["reason"]
  assert table.count("*") == 1 and "val/acc" in table
  assert folders.steps(str(workdir / "lr=0.03"))[-1] == 6
  # Only the failed variant is submitted again.
  sweep()
  again = [v["job"] for v in entries().values()]
  assert [a == b for a, b in zip(again, numbers)] == [True, False, True]
