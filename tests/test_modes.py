"""Modes of the program: evaluating only, compiling only, eager, cooldown."""

import json
import logging
import shutil

import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.checkpoints import start
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
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
  """(config, workdir) of a run that evaluates and saves at steps 0, 3 and 6."""
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


def evaluation_results(row):
  prefixes = ("val/", "averaged/")
  return {
    name: value
    for name, value in row.items()
    if name.startswith(prefixes) and not name.endswith("/secs")
  }


def test_step_0_is_evaluated_and_saved_on_request(finished):
  _, workdir = finished
  assert tiny.checkpoint_steps(workdir) == [0, 3, 6]
  rows = tiny.rows(workdir)
  assert list(rows) == [0, 1, 2, 3, 4, 5, 6]
  assert rows[0]["val/loss"] > rows[6]["val/loss"]
  assert rows[0]["val/loss"] == rows[0]["averaged/loss"]


def test_evaluations_of_the_same_shapes_share_a_program(finished):
  _, workdir = finished
  (start,) = json.loads((workdir / "run.json").read_text())["starts"]
  programs = start["programs"]
  assert {programs[n]["cache"] for n in ("val", "averaged")} >= {"shared"}


def test_the_evaluate_tool_reproduces_the_results_bit_for_bit(finished):
  _, workdir = finished
  before = (workdir / "metrics.jsonl").read_bytes()
  rows = tiny.rows(workdir)
  for step in (0, 3, None):
    results = evaluate.evaluate(str(workdir), step)
    assert results["step"] == (6 if step is None else step)
    assert evaluation_results(results) == evaluation_results(
      rows[results["step"]]
    )
  # Fewer examples, and another batch size.
  changes = ("evals.val.num_examples=8", "evals.averaged.batch_size=8")
  results = evaluate.evaluate(str(workdir), 6, changes)
  assert results["val/loss"] != rows[6]["val/loss"]
  assert results["averaged/loss"] == pytest.approx(rows[6]["averaged/loss"])
  assert (workdir / "metrics.jsonl").read_bytes() == before


def test_the_evaluate_tool_explains_mistakes(finished, tmp_path, capsys):
  _, workdir = finished
  for arguments, message in (
    ([f"--workdir={tmp_path}"], "with a config.json"),
    ([f"--workdir={workdir}", "--step=5"], "step 5; there are 0, 3, 6"),
    ([f"--workdir={workdir}", "--config.evals.val.top_kk=1"], "top_k"),
    ([f"--workdir={workdir}", "here"], "unknown argument"),
    ([], "required: --workdir"),
  ):
    assert evaluate.main([*arguments]) == 2
    assert message in capsys.readouterr().err
  assert evaluate.main([f"--workdir={workdir}"]) == 0
  row = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert evaluation_results(row) == evaluation_results(tiny.rows(workdir)[6])


def test_eval_only_does_not_train(finished, tmp_path):
  config, trained = finished
  workdir = tmp_path / "evaluated"
  shutil.copytree(trained, workdir)
  rows, arrays = tiny.rows(workdir), tiny.arrays(workdir)
  results = main.train(config | {"eval_only": True}, str(workdir))
  assert evaluation_results(results) == evaluation_results(rows[6])
  assert tiny.rows(workdir) == rows
  tiny.assert_same(tiny.arrays(workdir), arrays)
  # With the state of another run, in a new workdir.
  init = dict(path=str(workdir), step=3)
  config = config | {"eval_only": True, "resume": init, "save_at_start": False}
  results = main.train(config, str(tmp_path / "new"))
  assert evaluation_results(results) == evaluation_results(rows[3])
  assert tiny.checkpoint_steps(tmp_path / "new") == []
  assert list(tiny.rows(tmp_path / "new")) == [3]


def test_an_update_can_be_compiled_without_a_run(
  tiny_config, tmp_path, monkeypatch
):
  def never(*args):
    raise AssertionError("on_update made a state or read data")

  def on_update(run, update_fn, specs, compile):
    return run.lengths.last, compile().as_text()

  monkeypatch.setattr(start, "start", never)
  monkeypatch.setattr(pipeline.TrainInput, "start", never)
  folder = tmp_path / "none"
  last, text = main.train(tiny_config(), str(folder), on_update=on_update)
  assert last == 6 and "HloModule" in text
  assert not folder.exists()


def test_cooldown_from_a_checkpoint_of_another_run(
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
  with pytest.raises(ConfigError, match=r"config.total_steps: 6 -> 5"):
    main.train(config, str(tmp_path))
  config["allow_changes"] = ["schedule", "total_steps"]
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert list(rows) == [4, 5]  # Steps and examples continue.
  assert [rows[s]["examples_seen"] for s in rows] == [64, 80]
  assert rows[4]["lr"] == pytest.approx(config["lr"])
  assert rows[5]["lr"] == pytest.approx(config["lr"] / 2)
  # The same examples as in the original run, so the losses are equal until the
  # learning rates differ.
  assert rows[4]["loss"] == tiny.rows(workdir)[4]["loss"]


@pytest.mark.slow
def test_eager_and_compiled_steps_agree(
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
  eager_arrays, compiled_arrays = (
    tiny.arrays(tmp_path / name) for name in ("eager", "compiled")
  )
  for name, value in eager_arrays.items():
    np.testing.assert_allclose(
      value, compiled_arrays[name], rtol=1e-4, atol=1e-6
    )


def test_debug_nans_finds_the_operation_of_a_nan(tiny_config, tmp_path):
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


def test_the_loop_runs_without_implicit_transfers(tiny_config, tmp_path):
  changes = EVERYTHING | {"transfer_guard": "disallow", "eval_at_start": True}
  main.train(tiny_config(changes), str(tmp_path / "clean"))
  # A hook that passes a numpy array to a compiled function.
  hooks = {"numpy": dict(type="tiny.hooks.Predicts")}
  with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
    main.train(tiny_config(changes | {"hooks": hooks}), str(tmp_path / "bad"))
  config = tiny_config({"transfer_guard": "disalow"})
  with pytest.raises(ConfigError, match="mean 'disallow'"):
    main.train(config, str(tmp_path / "typo"))


def test_each_evaluation_decides_whether_it_runs_at_the_start(
  finished, tiny_config, tmp_path
):
  _, workdir = finished
  val = tiny_config()["evals"]["val"] | {"log_steps": 0}
  changes = {
    "evals": {"val": val, "first": val | {"at_start": True}},
    "resume": dict(path=str(workdir), step=3),
    "save_at_start": True,
    "keep_ckpts": 9,
  }
  main.train(tiny_config(EVERYTHING | changes), str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert rows[3]["first/loss"] == tiny.rows(workdir)[3]["val/loss"]
  assert {s for s in rows if "val/loss" in rows[s]} == {6}
  assert tiny.checkpoint_steps(tmp_path) == [3, 6]


def test_the_config_json_of_a_run_repeats_it(finished, tmp_path):
  _, workdir = finished
  config = loading.load(str(workdir / "config.json"))
  main.train(config, str(tmp_path))
  assert tiny.rows(tmp_path) == tiny.rows(workdir)
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(workdir))
