"""Steps of a run that are computed again."""

import json

import pytest

from bigtrain import main
from bigtrain.tools import replay as tool


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory):
  """A run with checkpoints of steps 4 and 6, and rows of 1, 2, 4 and 6."""
  workdir = tmp_path_factory.mktemp("replay") / "run"
  local = workdir / "local"
  saves = dict(ckpt_steps=2, local_ckpt_steps=1, local_ckpt_dir=str(local))
  main.train(tiny_config(saves), str(workdir))
  # A replay keeps no local checkpoints, for which this would be an error.
  local.rmdir()
  local.touch()
  return workdir


def files(workdir):
  return {
    str(path): path.read_bytes()
    for path in workdir.rglob("*")
    if path.is_file()
  }


def test_the_same_machine_computes_the_same(run, capsys):
  before = files(run)
  assert tool.main([str(run), "--step=6"]) == 0
  assert capsys.readouterr().out.endswith(
    "No metric differs in the log entries (step 6), and no bit in the "
    "checkpoint of step 6.\n"
  )
  # From scratch, and only rows, none of them of the step.
  path = run / "metrics.jsonl"
  content = path.read_text()
  try:
    path.write_text(content.splitlines(keepends=True)[0])
    equal = (
      "No metric differs in the log entries (step 1); step 2 has no checkpoint."
    )
    assert tool.replay(str(run), 2) == ("", equal)
  finally:
    path.write_text(content)
  assert files(run) == before


def test_the_first_difference_is_printed(run, capsys):
  path = run / "metrics.jsonl"
  content = path.read_text()
  rows = [json.loads(line) for line in content.splitlines()]
  rows[-1]["loss"] += 1e-6
  try:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert tool.main([str(run), "--step=6"]) == 1
  finally:
    path.write_text(content)
  assert "step 6: loss: the run wrote " in capsys.readouterr().out
  # Another seed draws other batches; with the rows gone, arrays differ.
  try:
    path.write_text("")
    changes = ("seed=1", "allow_changes=True")
    text, _ = tool.replay(str(run), 6, changes)
  finally:
    path.write_text(content)
  assert text.startswith("step 6: array 'opt/") and "other bits" in text


def test_mistakes(run, tmp_path, capsys):
  assert tool.main([str(tmp_path), "--step=1"]) == 2
  assert tool.main([str(run), "--step=9"]) == 2
  assert "newest steps with one: 1, 2, 3, 4, 6." in capsys.readouterr().err
