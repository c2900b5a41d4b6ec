"""A run that was interrupted ends bit-equal to one that was not."""

import json
import logging
import signal
import types

import numpy as np
import pytest
import tiny

from bigtrain import main, settings
from bigtrain.cluster import process
from bigtrain.evaluators import mean
from bigtrain.inputs import pipeline

# Everything that a checkpoint can hold: moments, running statistics, an
# average of the parameters; and randomness in the step and in the input.
EVERYTHING = {
  "model.statistics": True,
  "model.dropout": 0.3,
  "ema_decay": 0.5,
  "input.pp": "random_crop(8,pad=1)",
}


@pytest.fixture
def seen(monkeypatch):
  """The ids of the examples of each batch that the loop got, in order."""
  start = pipeline.TrainInput.start
  ids = []

  def recorded(self, first_step, last_step):
    batches = start(self, first_step, last_step)
    get = batches.__next__

    class Recorded:
      def __next__(self):
        batch = get()
        ids.append(np.asarray(batch["id"]).tolist())
        return batch

      def close(self):
        batches.close()

    return Recorded()

  monkeypatch.setattr(pipeline.TrainInput, "start", recorded)
  return ids


@pytest.fixture(scope="module")
def straight(tiny_config, tmp_path_factory):
  """{log_steps: workdir of a run that nothing interrupted}."""
  found = {}
  for log_steps in (2, 4):
    found[log_steps] = tmp_path_factory.mktemp(f"straight{log_steps}")
    config = tiny_config(EVERYTHING | {"log_steps": log_steps})
    main.train(config, str(found[log_steps]))
  return found


@pytest.mark.parametrize(
  ("log_steps", "stops"),
  [
    (2, (3,)),
    # A third start; checkpoints between rows, and where a row was written.
    (4, (3, 4)),
    (4, (5,)),
  ],
)
def test_resumed_runs_end_bit_equal(
  straight, tiny_config, tmp_path, seen, log_steps, stops
):
  config = tiny_config(EVERYTHING | {"log_steps": log_steps})
  for stop in stops:
    main.train(config | {"stop_at_steps": stop}, str(tmp_path))
    assert tiny.checkpoint_steps(tmp_path)[-1] == stop
  main.train(config, str(tmp_path))
  arrays = tiny.arrays(tmp_path)
  assert {name.split("/")[0] for name in arrays} == {
    "params",
    "opt",
    "mutable",
    "ema",
    "step",
  }
  assert arrays["mutable/running/mean"].any()
  tiny.assert_same(arrays, tiny.arrays(straight[log_steps]))
  tiny.assert_same(tiny.rows(tmp_path), tiny.rows(straight[log_steps]))
  # Every epoch has each example once, restarts or not.
  assert len(seen) == 6
  assert sorted(np.ravel(seen[:5])) == list(range(1000, 1080))
  starts = json.loads((tmp_path / "run.json").read_text())["starts"]
  assert len(starts) == len(stops) + 1


def test_rows_after_the_checkpoint_are_made_again(
  straight, tiny_config, tmp_path, seen
):
  config = tiny_config(EVERYTHING)
  fails = config | {"hooks": {"fails": dict(type="tiny.hooks.Fails", step=6)}}
  with pytest.raises(RuntimeError, match="fails before step 6"):
    main.train(fails, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [3]
  assert list(tiny.rows(tmp_path)) == [1, 2, 3, 4]
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  assert list(tiny.rows(tmp_path)) == [1, 2, 3]
  main.train(config, str(tmp_path))
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(straight[2]))
  tiny.assert_same(tiny.rows(tmp_path), tiny.rows(straight[2]))
  assert seen[3:5] == seen[5:7], "the same examples the second time"


def test_another_mesh_sees_the_same_examples(
  straight, tiny_config, tmp_path, seen
):
  config = tiny_config(EVERYTHING)
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  config["mesh"] = dict(replica=4, fsdp=2)
  main.train(config, str(tmp_path))
  assert sorted(np.ravel(seen[:5])) == list(range(1000, 1080))
  expected, rows = tiny.rows(straight[2]), tiny.rows(tmp_path)
  assert list(rows) == list(expected)
  for step in rows:
    assert rows[step] == pytest.approx(expected[step], rel=1e-4)


SIGNALS = []  # Those that have come, in the next test.


def signal_on_row_2(step, row):
  """A hook of a user."""
  if step == 2:
    SIGNALS.append(signal.SIGTERM)


def test_a_signal_in_a_step_saves_and_the_rest_is_the_same(
  straight, tiny_config, tmp_path, monkeypatch
):
  SIGNALS.clear()
  monkeypatch.setattr(process, "_signals", SIGNALS)
  config = tiny_config(EVERYTHING)
  hook = dict(type="call", function=f"{__name__}.signal_on_row_2")
  with pytest.raises(process.Preempted, match="saved step 3 of 6"):
    main.train(config | {"hooks": {"signal": hook}}, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [3]
  SIGNALS.clear()
  main.train(config, str(tmp_path))
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(straight[2]))
  tiny.assert_same(tiny.rows(tmp_path), tiny.rows(straight[2]))


def test_hooks_go_on_with_what_they_remember(tiny_config, tmp_path):
  # Progress never gets smaller: the fourth row, that of step 6, is enough.
  early = dict(type="early_stopping", metric="progress", patience=3)
  config = tiny_config({"total_steps": 12, "hooks": {"early": early}})
  for name, stops in (("straight", ()), ("cut", (1, 3, 5))):
    for stop in (*stops, None):
      main.train(config | {"stop_at_steps": stop}, str(tmp_path / name))
    assert list(tiny.rows(tmp_path / name)) == [1, 2, 3, 4, 6]
    assert tiny.checkpoint_steps(tmp_path / name)[-1] == 6
  tiny.assert_same(
    tiny.arrays(tmp_path / "cut"), tiny.arrays(tmp_path / "straight")
  )


# Evaluations.


@pytest.fixture
def two_evaluations(tiny_config):
  """Evaluations "a" and "b", both due at 3 and 6."""
  val = tiny_config()["evals"]["val"] | {"type": "mean", "pred": "loss"}
  return tiny_config({"evals": {"a": val, "b": val}})


@pytest.fixture
def runs(monkeypatch):
  """.begun: (name, step) of each evaluation; that of .fail fails."""
  run = mean.Evaluator.run
  found = types.SimpleNamespace(begun=[], fail=None)

  def recorded(self, variables, step):
    this = (self._batches._context.name, step)
    found.begun.append(this)
    if this == found.fail:
      raise OSError("the data have gone away")
    return run(self, variables, step)

  monkeypatch.setattr(mean.Evaluator, "run", recorded)
  return found


@pytest.mark.parametrize("step", [3, 6])
def test_an_evaluation_that_was_cut_off_is_done_at_the_next_start(
  two_evaluations, tmp_path, runs, step
):
  runs.fail = ("b", step)
  with pytest.raises(OSError, match="gone away"):
    main.train(two_evaluations, str(tmp_path))
  row = tiny.rows(tmp_path)[step]
  assert "a/loss" in row and "b/loss" not in row
  runs.begun, runs.fail = [], None
  main.train(two_evaluations, str(tmp_path))
  assert runs.begun == [("b", step)] + [("a", 6), ("b", 6)] * (step == 3)
  row = tiny.rows(tmp_path)[step]
  assert row["a/loss"] == row["b/loss"]
  runs.begun = []
  main.train(two_evaluations, str(tmp_path))
  assert runs.begun == []


def test_a_signal_ends_an_evaluation_between_its_batches(
  two_evaluations, tmp_path, runs, monkeypatch
):
  monkeypatch.setattr(process, "_signals", signals := [])
  evaluate = mean.Evaluator.run

  def signalled(self, variables, step):
    signals.append(signal.SIGTERM)
    return evaluate(self, variables, step)

  monkeypatch.setattr(mean.Evaluator, "run", signalled)
  for _ in range(2):  # The second start is stopped in the same evaluation.
    with pytest.raises(process.Preempted):
      main.train(two_evaluations, str(tmp_path))
    signals.clear()
  assert tiny.checkpoint_steps(tmp_path) == [3]
  assert runs.begun == [("a", 3), ("a", 3)]
  monkeypatch.setattr(mean.Evaluator, "run", evaluate)
  main.train(two_evaluations, str(tmp_path))
  assert runs.begun[2:] == [("a", 3), ("b", 3), ("a", 6), ("b", 6)]


def test_a_finished_run_stays_as_it_is(straight, tiny_config, caplog):
  before = tiny.rows(straight[2])
  with caplog.at_level(logging.INFO, logger="absl"):
    results = main.train(tiny_config(EVERYTHING), str(straight[2]))
  assert "resumed from step 6" in caplog.text
  assert tiny.rows(straight[2]) == before
  assert results["val/loss"] == before[6]["val/loss"]
  assert results["step"] == 6


# A config that has changed.


def test_a_change_of_the_trajectory_is_refused_with_the_key(
  tiny_config, tmp_path
):
  main.train(tiny_config({"stop_at_steps": 3}), str(tmp_path))
  changed = tiny_config({"input.shuffle": False, "lr": 0.1})
  with pytest.raises(settings.ConfigError) as told:
    main.train(changed, str(tmp_path))
  assert "config.input.shuffle: None -> false" in str(told.value)
  assert "config.lr: 0.01 -> 0.1" in str(told.value)
  with pytest.raises(settings.ConfigError, match=r"config.lr: 0.01") as told:
    main.train(changed | {"allow_changes": ["input.shuffle"]}, str(tmp_path))
  assert "shuffle" not in str(told.value)
  # Asking harmed nothing: config.json is that of the run.
  written = json.loads((tmp_path / "config.json").read_text())
  assert written["lr"] == 0.01
  main.train(changed | {"allow_changes": ["input", "lr"]}, str(tmp_path))
  written = json.loads((tmp_path / "config.json").read_text())
  assert written["lr"] == 0.1
  assert tiny.rows(tmp_path)[4]["lr"] > 0.01


def test_harmless_changes_pass(straight, tiny_config, tmp_path, caplog):
  main.train(tiny_config(EVERYTHING | {"stop_at_steps": 3}), str(tmp_path))
  harmless = {
    "log_steps": 1,
    "ckpt_steps": 2,
    "evals": {},
    "keep_ckpts": 1,
    "tensorboard": True,
    "weight_stats": "per_param",
    "nonfinite": "skip",
    "input.prefetch": 1,
    "hooks": {"nan": dict(type="stop_on_nan")},
  }
  with caplog.at_level(logging.INFO, logger="absl"):
    main.train(tiny_config(EVERYTHING | harmless), str(tmp_path))
  assert "config.log_steps: 2 -> 1 (harmless)" in caplog.text
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(straight[2]))
  assert list(tiny.rows(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_the_whole_state_is_taken_over_from_elsewhere(
  straight, tiny_config, tmp_path
):
  config = tiny_config(EVERYTHING)
  source, here = tmp_path / "source", tmp_path / "here"
  main.train(config | {"stop_at_steps": 3}, str(source))
  main.train(config | {"resume": str(source)}, str(here))
  tiny.assert_same(tiny.arrays(here), tiny.arrays(straight[2]))
  rows = tiny.rows(here)
  assert list(rows) == [4, 6]
  tiny.assert_same(rows, {s: tiny.rows(straight[2])[s] for s in (4, 6)})


def test_parameters_alone_are_taken_over(straight, tiny_config, tmp_path):
  init = dict(path=str(straight[2]), prefix="ema")
  # The first step of the warm-up has a learning rate of 0.
  config = tiny_config(EVERYTHING | {"model_init": init, "stop_at_steps": 1})
  main.train(config, str(tmp_path))
  given, taken = tiny.arrays(straight[2]), tiny.arrays(tmp_path)
  for name in ("first/kernel", "head/bias"):
    tiny.assert_same(taken[f"params/{name}"], given[f"ema/{name}"])
    np.testing.assert_allclose(
      taken[f"ema/{name}"], given[f"ema/{name}"], rtol=1e-6
    )
  assert taken["step"] == 1
  moments = [name for name in taken if name.endswith("/mu/head/bias")]
  assert moments
  for name in moments:
    assert np.abs(taken[name] - given[name]).max() > 0


def test_a_new_run_in_a_folder_with_old_rows_has_none_of_them(
  tiny_config, tmp_path
):
  old = '{"step": 1, "old": 9.0}\n{"step": 50, "old": 9.0}\n'
  (tmp_path / "metrics.jsonl").write_text(old)
  results = main.train(tiny_config({"stop_at_steps": 2}), str(tmp_path))
  assert "old" not in tiny.rows(tmp_path)[1]
  assert list(tiny.rows(tmp_path)) == [1, 2]
  assert results["step"] == 2
