"""A finished run that is started again says so before slow imports."""

import json
import re

import pytest
from support import processes

from bigtrain import command
from bigtrain.checkpoints import finished

# Imported by models, the optimizer and input pipelines.
SLOW = ("flax", "optax", "tensorflow", "clu", "rich", "bigtrain.models")


def start(workdir, *words):
  args = processes.main_command("configs/digits.py:runlocal", workdir, *words)
  ended = processes.run([args[0], "-X", "importtime", *args[1:]])
  assert ended.returncode == 0, ended.stderr[-3000:]
  imported = set(re.findall(r"^import time: .*\| +(\S+)$", ended.stderr, re.M))
  return ended, imported


@pytest.mark.slow
def test_a_finished_run_imports_no_model(tmp_path):
  workdir = tmp_path / "run"
  first, imported = start(workdir)
  assert {"flax", "optax", "bigtrain.models"} <= imported
  rows = (workdir / "metrics.jsonl").read_text()
  second, imported = start(workdir)
  assert "nothing is left to do" in second.stderr
  assert second.stdout == first.stdout  # The results and the files.
  assert "bigtrain.checkpoints.finished" in imported
  assert not imported.intersection(SLOW)
  assert (workdir / "metrics.jsonl").read_text() == rows

  # Any change, and the run is looked at as a whole.
  words = [
    "main",
    "--config=configs/digits.py:runlocal",
    f"--workdir={workdir}",
  ]
  config = command.parse(words).config
  results = finished.read(str(workdir), config)
  assert results["step"] == 4 and results["val/acc"] > 0
  for change in ({"lr": 1.0}, {"total_steps": 8}, {"eval_only": True}):
    assert finished.read(str(workdir), {**config, **change}) is None
  note = workdir / "finished.json"
  for damaged in ("", "[]", "{}", note.read_text()[:-9]):
    content = note.read_text()
    note.write_text(damaged)
    assert finished.read(str(workdir), config) is None
    note.write_text(content)
  (chunk,) = workdir.glob("checkpoints/*4/params/head/kernel/c.0.0")
  content = bytearray(chunk.read_bytes())
  content[3] ^= 1
  chunk.write_bytes(content)
  assert finished.read(str(workdir), config) is None
  content[3] ^= 1
  chunk.write_bytes(content)
  assert finished.read(str(workdir), config) == results

  # A longer run replaces the note when it ends.
  longer = ("--config.total_steps=6", "--config.allow_changes=True")
  start(workdir, *longer)
  assert json.loads(note.read_text())["results"]["step"] == 6
  assert finished.read(str(workdir), config) is None
