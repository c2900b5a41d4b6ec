"""The tool that evaluates a checkpoint; test_modes.py compares its results."""

import contextlib
import io
import json
import os
import shutil
import types

import numpy as np
import pytest

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.reports import log_entries
from bigtrain.tools import evaluate


def test_files_of_the_run_are_not_overwritten(picture_run, tmp_path):
  run = shutil.copytree(picture_run / "runs" / "mine", tmp_path / "run")
  own = run / "predictions" / "val-00000030.npz"
  content = own.read_bytes()
  changes = ("evals.val.num_examples=2",)
  assert evaluate.evaluate(str(run), changes=changes)["val/num_examples"] == 2
  assert own.read_bytes() == content
  new = run / "evaluate" / "predictions" / own.name
  assert len(np.load(new)["predictions"]) == 2
  new.unlink()
  # A key that the run does not have and that nothing reads is misspelled.
  with pytest.raises(ConfigError, match=r"mean 'config\.input\.batch_size'"):
    evaluate.evaluate(str(run), changes=("batch_siz=2",))
  words = [f"--workdir={run}", f"--output={tmp_path / 'out'}"]
  assert evaluate.main(words) == 0
  new = tmp_path / "out" / "predictions" / own.name
  np.testing.assert_allclose(
    np.load(new)["predictions"], np.load(own)["predictions"], rtol=1e-5
  )
  assert own.read_bytes() == content
  assert not (run / "evaluate" / "predictions" / own.name).exists()


def test_all_checkpoints_and_those_to_come(tiny_config, tmp_path, monkeypatch):
  """A job beside the run sees all it saves, and each checkpoint once."""
  val = tiny_config()["evals"]["val"] | dict(log_steps=2)
  changes = dict(evals=dict(val=val), ckpt_steps=2, keep_ckpts=10)
  workdir = tmp_path / "run"
  config = tiny_config(changes | dict(total_steps=8, log_steps=2))
  main.train(config | dict(stop_at_steps=4), str(workdir))
  assert list(tool(workdir, all_checkpoints=True)) == [2, 4]
  naps = []

  def go_on(secs):  # While the tool waits.
    naps.append(secs)
    main.train(config, str(workdir))

  clock = types.SimpleNamespace(sleep=go_on)
  monkeypatch.setattr(evaluate, "time", clock)
  assert list(tool(workdir, follow=True)) == [6, 8] and len(naps) == 1
  assert list(tool(workdir, follow=True)) == []
  assert list(tool(workdir, all_checkpoints=True)) == []
  own = {row["step"]: row for row in log_entries.read(str(workdir))}
  others = log_entries.read(str(workdir / "evaluate"))
  assert [row["step"] for row in others] == [2, 4, 6, 8]
  for row in others:
    assert row["val/loss"] == own[row["step"]]["val/loss"]


def test_all_of_no_checkpoints_is_an_error(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ConfigError, match="there are no checkpoints"):
    next(evaluate.evaluate_all(str(tmp_path)))


def tool(workdir, all_checkpoints=False, follow=False):
  """{step: row}, of what the tool prints."""
  out = io.StringIO()
  words = [f"--workdir={workdir}", *["--all_checkpoints"] * all_checkpoints]
  with contextlib.redirect_stdout(out):
    assert evaluate.main([*words, *["--follow"] * follow]) == 0
  printed = map(json.loads, out.getvalue().splitlines())
  return {row["step"]: row for row in printed}


@pytest.mark.slow
def test_a_checkpoint_that_the_run_removes_is_skipped(
  tiny_config, tmp_path, monkeypatch, caplog
):
  workdir = tmp_path / "run"
  changes = dict(ckpt_steps=2, keep_ckpts=10, total_steps=6)
  main.train(tiny_config(changes), str(workdir))
  load = evaluate.restore.load

  def too_late(directory, *args, **options):
    if directory.endswith("04") and os.path.exists(directory):
      shutil.rmtree(directory)
    return load(directory, *args, **options)

  monkeypatch.setattr(evaluate.restore, "load", too_late)
  assert list(tool(workdir, all_checkpoints=True)) == [2, 6]
  assert "Step 4: its checkpoint is gone" in caplog.text
  words = [f"--workdir={workdir}", "--follow", "--step=2"]
  assert evaluate.main(words) == 2
  assert evaluate.main([*words[:2], f"--output={workdir}"]) == 2


@pytest.mark.parametrize("name", ["nowhere", "file.json"])
def test_a_path_that_is_no_run(tmp_path, capsys, name):
  (tmp_path / "file.json").write_text("{}")
  assert evaluate.main([f"--workdir={tmp_path / name}"]) == 2
  error = capsys.readouterr().err
  assert f"{name}: expected the folder of a run" in error
