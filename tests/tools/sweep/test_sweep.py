"""The command, with runs of the program."""

import json
import os
import signal
import sys

import pytest
import tiny
from support import processes

from bigtrain.tools.sweep import sweep


@pytest.fixture
def folder(tmp_path):
  tiny.write_data(tmp_path)
  config = tiny.config(tmp_path)
  (tmp_path / "x.py").write_text(f"def get_config():\n  return {config!r}\n")
  return tmp_path


def call(folder, *words):
  flags = [f"--config={folder}/x.py", f"--workdir={folder}/sweep"]
  return sweep.main([*flags, *map(str, words)])


@pytest.mark.parametrize(
  "words, message",
  [
    (["--grid", "lrr=1"], "config has no 'lrr'. Did you mean 'lr'"),
    (["--grid", "lr=1", "--jobs=0"], "expected a positive number"),
    (["--grid", "lr=1", "--job=2"], "Did you mean '--jobs'"),
    (["--grid", "lr=1", "--sbatch=-N2"], "needs --launcher=slurm"),
    (["--grid", "lr=1", "--metric=vall/acc"], "Did you mean 'val'"),
    ([], "has no function get_sweep"),
  ],
)
def test_mistakes_are_reported_before_anything_starts(
  folder, capsys, words, message
):
  assert call(folder, *words) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert not (folder / "sweep").exists()


# Slow steps, so that a signal comes in the middle of a run.
_SLOWLY = """
import time


class Hook:
  def before_step(self, step):
    time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_sweep_is_interrupted_and_continued(folder, tmp_path, capsys):
  (tmp_path / "slowly.py").write_text(_SLOWLY)
  hooks = "--config.hooks={'slowly': {'type': 'slowly.Hook'}}"
  words = [f"--config={folder}/x.py", f"--workdir={folder}/sweep", hooks]
  words += ["--grid", "lr=1e-2,-1,3e-2", "--jobs=2", "--config.total_steps=20"]
  words += ["--config.ckpt_steps=20"]
  path = processes.environment()["PYTHONPATH"] + f":{tmp_path}"

  def state():
    content = json.loads((folder / "sweep" / "sweep.json").read_text())
    return {v["name"]: v for v in content["variants"]}

  log = folder / "sweep" / "logs" / "lr=0.03.log"
  with processes.Processes(tmp_path) as started:
    command = [sys.executable, "-m", "bigtrain.tools.sweep", *words]
    job = started.start(command, env={"PYTHONPATH": path}, group=True)
    # The second variant fails, and the third one takes its place.
    rows = folder / "sweep" / "lr=0.03" / "metrics.jsonl"
    job.until(
      lambda: rows.exists() and rows.read_text().count("\n") > 1, "rows"
    )
    os.killpg(job.pid, signal.SIGINT)  # As a terminal does.
    assert job.wait() == 75, job.text()
    assert "second signal, SIG" not in log.read_text()
    first = state()
    assert first["lr=-1"]["state"] == "failed"
    assert "config.lr" in first["lr=-1"]["reason"]
    assert first["lr=0.03"]["state"] == "interrupted"
    assert 0 < first["lr=0.03"]["step"] < 20
    assert (folder / "sweep" / "lr=0.03" / "checkpoints").exists()
    assert "preempted: saved step" in log.read_text()
    job = started.start(command, env={"PYTHONPATH": path}, group=True)
    assert job.wait() == 1, job.text()  # The failed one fails again.
  second = state()
  assert [v["state"] for v in second.values()] == [
    "finished",
    "failed",
    "finished",
  ]
  assert {v["step"] for v in second.values()} == {0, 20}
  assert "resumed" in log.read_text().partition("preempted")[2]
  best = json.loads((folder / "sweep" / "sweep.json").read_text())["best"]
  (line,) = (x for x in job.text().splitlines() if x.startswith("*"))
  assert best == f"lr={line.split()[1]}"
  # Nothing is left to do but the failed variant.
  assert call(folder, *words[2:], "--table") == 0
  assert capsys.readouterr().out.count("finished") == 2
