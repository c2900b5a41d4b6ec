"""Other ways to run: without compiling, without training, from a checkpoint."""

import json
import logging

import numpy as np
import pytest
import tiny

from bigtrain import main, settings
from bigtrain.checkpoints import start
from bigtrain.inputs import pipeline
from bigtrain.tools import evaluate

EVERYTHING = {
  "model.statistics": True,
  "model.dropout": 0.3,
  "ema_decay": 0.5,
  "log_steps": 1,
}


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory):
  """(config, workdir) of a run that evaluates and saves at 0, 3 and 6."""
  workdir = tmp_path_factory.mktemp("finished")
  val = tiny_config()["evals"]["val"]
  changes = EVERYTHING | {
    "evals": {"val": val, "averaged": val | {"weights": "ema"}},
    "eval_at_start": True,
    "save_at_start": True,
    "keep_ckpts": 3,
  }
  config = tiny_config(changes)
  main.train(config, str(workdir))
  return config, workdir


def of_evaluations(row):
  prefixes = ("val/", "averaged/")
  return {
    name: value
    for name, value in row.items()
    if name.startswith(prefixes) and not name.endswith("/secs")
  }


def test_step_0_is_evaluated_and_saved_if_asked_for(finished):
  _, workdir = finished
  assert tiny.checkpoint_steps(workdir) == [0, 3, 6]
  rows = tiny.rows(workdir)
  assert list(rows) == [0, 1, 2, 3, 4, 5, 6]
  assert rows[0]["val/loss"] > rows[6]["val/loss"]
  assert rows[0]["val/loss"] == rows[0]["averaged/loss"]


def test_evaluations_that_are_alike_share_a_program(finished):
  _, workdir = finished
  (start,) = json.loads((workdir / "run.json").read_text())["starts"]
  programs = start["programs"]
  assert {programs[n]["cache"] for n in ("val", "averaged")} >= {"shared"}


def test_a_checkpoint_is_evaluated_bit_for_bit(finished):
  _, workdir = finished
  before = (workdir / "metrics.jsonl").read_bytes()
  rows = tiny.rows(workdir)
  for step in (0, 3, None):
    found = evaluate.evaluate(str(workdir), step)
    assert found["step"] == (6 if step is None else step)
    assert of_evaluations(found) == of_evaluations(rows[found["step"]])
  # Fewer examples, and another way to cut the batches.
  changes = ("evals.val.num_examples=8", "evals.averaged.batch_size=8")
  found = evaluate.evaluate(str(workdir), 6, changes)
  assert found["val/loss"] != rows[6]["val/loss"]
  assert found["averaged/loss"] == pytest.approx(rows[6]["averaged/loss"])
  assert (workdir / "metrics.jsonl").read_bytes() == before


def test_the_tool_tells_mistakes(finished, tmp_path, capsys):
  _, workdir = finished
  for arguments, message in (
    ([f"--workdir={tmp_path}"], "there is no config.json"),
    ([f"--workdir={workdir}", "--step=5"], "has 0, 3, 6"),
    ([f"--workdir={workdir}", "--config.evals.val.top_kk=1"], "top_k"),
    ([f"--workdir={workdir}", "here"], "unknown argument"),
    ([], "--workdir is missing"),
  ):
    assert evaluate.main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err
  assert evaluate.main(["evaluate", f"--workdir={workdir}"]) == 0
  row = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert of_evaluations(row) == of_evaluations(tiny.rows(workdir)[6])


def test_evaluating_only_trains_nothing(finished, tmp_path):
  config, workdir = finished
  rows, arrays = tiny.rows(workdir), tiny.arrays(workdir)
  results = main.train(config | {"eval_only": True}, str(workdir))
  assert of_evaluations(results) == of_evaluations(rows[6])
  assert tiny.rows(workdir) == rows
  tiny.assert_same(tiny.arrays(workdir), arrays)
  # From elsewhere, in a folder of its own.
  init = dict(path=str(workdir), step=3)
  config = config | {"eval_only": True, "resume": init, "save_at_start": False}
  results = main.train(config, str(tmp_path))
  assert of_evaluations(results) == of_evaluations(rows[3])
  assert tiny.checkpoint_steps(tmp_path) == []
  assert list(tiny.rows(tmp_path)) == [3]


def test_compiling_only_leaves_a_record_of_what_it_takes(
  tiny_config, tmp_path, monkeypatch
):
  def never(*args):
    raise AssertionError("a state was made, or data was read")

  monkeypatch.setattr(start, "begin", never)
  monkeypatch.setattr(pipeline.TrainInput, "start", never)
  main.train(tiny_config({"compile_only": True}), str(tmp_path))
  (begun,) = json.loads((tmp_path / "run.json").read_text())["starts"]
  assert begun["programs"]["update"]["temporary_bytes"] > 0
  assert begun["model_flops_per_step"] > 0
  assert not (tmp_path / "metrics.jsonl").exists()
  assert tiny.checkpoint_steps(tmp_path) == []


def test_cooling_down_from_a_checkpoint_of_another_run(
  finished, tiny_config, tmp_path
):
  _, workdir = finished
  cooldown = {
    "total_steps": 5,
    "resume": dict(path=str(workdir), step=3),
    "schedule": dict(decay_type="constant", cooldown_steps=2),
    "evals": {},
  }
  config = tiny_config(EVERYTHING | cooldown)
  with pytest.raises(settings.ConfigError, match=r"config.total_steps: 6 -> 5"):
    main.train(config, str(tmp_path))
  config["allow_changes"] = ["schedule", "total_steps"]
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert list(rows) == [4, 5]  # Steps and examples go on.
  assert [rows[s]["examples_seen"] for s in rows] == [64, 80]
  assert rows[4]["lr"] == pytest.approx(config["lr"])
  assert rows[5]["lr"] == pytest.approx(config["lr"] / 2)
  # The same examples as in the run that went on: before the rates differ,
  # so are the losses.
  assert rows[4]["loss"] == tiny.rows(workdir)[4]["loss"]


def test_eager_steps_are_the_compiled_ones(
  finished, tiny_config, tmp_path, caplog
):
  changes = EVERYTHING | {"evals": {}, "stop_at_steps": 3}
  eager = {"eager": True, "debug_shapes": True, "microbatches": 2}
  with caplog.at_level(logging.INFO, logger="absl"):
    main.train(tiny_config(changes | eager), str(tmp_path / "eager"))
  assert "first (Dense): float32[16,64] -> float32[16,32]" in caplog.text
  compiled = {"microbatches": 2}
  main.train(tiny_config(changes | compiled), str(tmp_path / "compiled"))
  rows = tiny.rows(tmp_path / "eager")
  expected = tiny.rows(tmp_path / "compiled")
  assert list(rows) == list(expected) == [1, 2, 3]
  for step, row in rows.items():
    for name in ("loss", "grad_norm", "lr", "param_norm"):
      assert row[name] == pytest.approx(expected[step][name], rel=1e-5), name
  one, two = (tiny.arrays(tmp_path / name) for name in ("eager", "compiled"))
  for name in one:
    np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-6)


def test_a_nan_is_traced_to_its_operation(tiny_config, tmp_path):
  with np.load(tiny_config()["input"]["data"]["path"]) as file:
    data = dict(file)
  data["image"][0] = np.inf
  np.savez(tmp_path / "bad.npz", **data)
  changes = {
    "input.data.path": str(tmp_path / "bad.npz"),
    "input.shuffle": False,
    "debug_nans": True,
    "evals": {},
    "stop_at_steps": 2,
  }
  with pytest.raises(FloatingPointError, match="nan"):
    main.train(tiny_config(changes), str(tmp_path / "run"))
