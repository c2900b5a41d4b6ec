"""The best checkpoint, on any history and in a run."""

import json
import logging
import math
import pathlib
import tempfile

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny import hooking

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.runtime import hooks

VALUES = st.one_of(
  st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf])
)


@given(
  st.lists(st.tuples(VALUES, st.booleans(), st.booleans()), max_size=12),
  st.sampled_from(["min", "max"]),
)
def test_the_rule_on_any_history(events, mode):
  """Runs the loop of main: save, evaluate, perhaps die and restart.

  Each event is a step: the value of its evaluation, whether a checkpoint is
  due, and whether the process dies after the step.
  """
  with tempfile.TemporaryDirectory() as workdir:

    def start(state):
      entry = dict(type="checkpoint_best", metric="val/x", mode=mode)
      running = hooking.build(workdir, best=entry)
      running.restore(state, 0, None)
      return running

    running, saves = start({}), {}

    def save(step):
      running.before_save(step)
      saves[step] = json.loads(json.dumps(running.state()))
      folder = pathlib.Path(workdir, "checkpoints", f"{step:08d}")
      folder.mkdir(parents=True, exist_ok=True)
      (folder / "manifest.json").touch()

    evaluated, step, deaths = {}, 0, set()
    while step < len(events):
      value, due, dies = events[step]
      step += 1
      running.after_step(step, None, None)
      hooking.show(running, {"step": step, "loss": 0.0})
      if due:
        save(step)
      hooking.show(running, {"step": step, "val/x": value})
      evaluated[step] = value
      if running.wants_save(step) and step not in saves:
        save(step)
      # The rule, on all values up to here.
      known = [s for s in evaluated if not math.isnan(evaluated[s])]
      pick = min if mode == "min" else max
      best = pick(known, key=evaluated.get, default=None)
      assert running.keep_steps() == ({best} if known else set())
      if known:
        assert best in saves
        with open(f"{workdir}/best_best.json") as file:
          record = json.load(file)
        assert record == {
          "step": best,
          "metric": "val/x",
          "value": evaluated[best],
        }
      if dies and step not in deaths:
        deaths.add(step)
        step = max(saves, default=0)
        running = start(saves.get(step, {}))
        running.after_step(step, None, None)
        evaluated = {s: v for s, v in evaluated.items() if s <= step}
        if step in evaluated:  # main shows a row on disk again.
          row = {"step": step, "val/x": evaluated[step]}
          hooking.show(running, row)


def test_a_training_metric_counts_at_saved_steps(tmp_path):
  entry = dict(type="checkpoint_best", metric="loss")
  running = hooking.build(str(tmp_path), best=entry)
  running.after_step(2, None, None)
  hooking.show(running, {"step": 1, "loss": 1.0})  # Step 2 has started.
  assert not running.wants_save(2) and running.keep_steps() == set()
  hooking.show(running, {"step": 4, "loss": 2.0})
  running.after_step(4, None, None)
  running.before_save(4)
  assert running.keep_steps() == {4}
  running.after_step(7, None, None)
  hooking.show(running, {"step": 6, "loss": 0.5})
  assert not running.wants_save(7) and running.keep_steps() == {4}


def test_a_missing_best_checkpoint_is_reported(tmp_path, caplog):
  entry = dict(type="checkpoint_best", metric="val/x")
  running = hooking.build(str(tmp_path), best=entry)
  for step, value in ((1, 1.0), (2, 3.0)):
    running.before_save(step)
    hooking.show(running, {"step": step, "val/x": value})
  running.before_save(3)
  again = hooking.build(str(tmp_path), best=entry)
  with caplog.at_level(logging.WARNING, logger="absl"):
    again.restore(
      running.state(), 3, None
    )  # The folder has no checkpoint of step 1.
  assert "of step 1 with val/x 1, no longer exists" in caplog.text
  hooking.show(again, {"step": 3, "val/x": 2.0})
  assert again.keep_steps() == {3}


def test_the_best_checkpoint_outlives_newer_ones_and_a_resume(
  tiny_config, tmp_path
):
  val = tiny_config()["evals"]["val"] | {"log_steps": 2}
  best = dict(type="checkpoint_best", metric="val/loss")
  config = tiny_config(
    {"keep_ckpts": 1, "evals": {"val": val}, "hooks": {"best": best}, "lr": 0.1}
  )
  # The learning rate is too high: step 2, without a due checkpoint, is best.
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [2, 3]
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  losses = {s: row["val/loss"] for s, row in rows.items() if "val/loss" in row}
  assert min(losses, key=losses.get) == 2
  assert tiny.checkpoint_steps(tmp_path) == [2, 6]
  with open(tmp_path / "best_best.json") as file:
    assert json.load(file)["value"] == losses[2]


def test_an_unknown_mode():
  entry = dict(type="checkpoint_best", metric="x", mode="mxa")
  message = r"config.hooks.h.mode: unknown 'mxa'. Did you mean 'max'"
  with pytest.raises(ConfigError, match=message):
    hooking.build(h=entry)


def test_a_run_that_saves_nothing_has_no_best_checkpoint(tmp_path):
  best = dict(type="checkpoint_best", metric="loss")
  config = Config({"keep_ckpts": 0, "hooks": {"best": best}})
  with pytest.raises(ConfigError, match=r"config.hooks.best: keeps checkpoin"):
    hooks.from_config(config, str(tmp_path))
