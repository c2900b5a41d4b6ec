"""The list of runs."""

import json
import os
import time

import pytest
from support import written_runs

from bigtrain.cluster import lease
from bigtrain.tools import runs as tool


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("a", "b/c"):
    written_runs.write_run(str(tmp_path / "runs" / name))
  info = {"starts": [{"command": ["/a/bigtrain/main.py", "--config=x y.py"]}]}
  (tmp_path / "runs" / "a" / "run.json").write_text(json.dumps(info))
  (tmp_path / "runs" / "empty").mkdir()
  return tmp_path / "runs"


def table(capsys, *words):
  assert tool.main(list(map(str, words))) == 0
  head, *rows = capsys.readouterr().out.splitlines()
  starts = [head.index(name) for name in ("state", "step", "best", "last")]
  starts += [head.index(name) for name in ("folder", "command")]
  return [
    [row[i:j].strip() for i, j in zip(starts, [*starts[1:], None])]
    for row in rows
  ]


def test_one_line_a_run(folder, capsys):
  an_hour_ago = time.time() - 3600
  for path in (folder / "b").rglob("*"):
    os.utime(path, (an_hour_ago, an_hour_ago))
  first, second = table(capsys, "runs")
  assert first[:3] == ["finished", "400 (100%)", "val/acc 0.8 @ 400"]
  assert first[3].endswith(" s ago")
  assert first[4:] == ["runs/a", "python -m bigtrain.main '--config=x y.py'"]
  assert second[3:5] == ["1 h ago", "runs/b/c"]
  (line,) = table(capsys, "runs/a", "--metric=loss", "--mode=min")
  assert line[2] == "loss 0.05 @ 400"


def test_a_run_that_ended_with_an_error(folder, capsys):
  path = folder / "b/c/metrics.jsonl"
  path.write_text(json.dumps({"step": 10, "loss": 1.0, "progress": 0.1}) + "\n")
  assert table(capsys, folder)[1][0] == "stopped"
  info = {"starts": [{"error": "error: x"}, {}]}
  (folder / "b/c/run.json").write_text(json.dumps(info))
  assert table(capsys, folder)[1][0] == "stopped"  # The newest start had none.
  info["starts"].append({"error": "error: x"})
  (folder / "b/c/run.json").write_text(json.dumps(info))
  assert table(capsys, folder)[1][0] == "failed"


def test_states(folder, capsys):
  holder = lease.acquire(str(folder / "a"))
  try:
    assert table(capsys, folder)[0][0] == "running"
    path = folder / "a" / lease.FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"process_start": 1}))
    assert table(capsys, folder)[0][0] == "lost"
    path.write_text(json.dumps(content | {"machine": "x"}))
    assert table(capsys, folder)[0][0] == "running"
    path.write_text(json.dumps(content | {"machine": "x", "expires": 1.0}))
    assert table(capsys, folder)[0][0] == "lost"
    path.write_text(json.dumps(content))
  finally:
    holder.release()
  metrics = folder / "a" / "metrics.jsonl"
  metrics.write_text("".join(metrics.read_text().splitlines(True)[:20]))
  state, step, best = table(capsys, folder)[0][:3]
  assert (state, best[:8]) == ("stopped", "val/acc ") and "%" in step


@pytest.mark.parametrize(
  "arguments, message",
  [
    ("none", "no such folder"),
    ("runs/empty", "no run"),
    ("runs --metric=val/accc", "Did you mean 'val/acc'?"),
  ],
)
def test_mistakes_give_a_one_line_error(folder, capsys, arguments, message):
  assert tool.main(arguments.split()) == 2
  assert message in capsys.readouterr().err
