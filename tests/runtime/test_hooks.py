"""Builds hooks from a config and runs them."""

import json
import logging
import math
import pathlib
import re
import signal
import sys

import numpy as np
import pytest
import tiny
from tiny import hooking
from tiny import hooks as tiny_hooks

from bigtrain import main
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import classification
from bigtrain.runtime import hook_context, hooks
from bigtrain.step import guard


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good")])
def test_a_failure_wins_over_a_success(order):
  entries = {
    "good": dict(type="early_stopping", metric="loss", patience=2),
    "bad": dict(type="stop_on_nan"),
  }
  running = hooking.build(**{name: entries[name] for name in order})
  assert hooking.show(running, {"step": 1, "loss": 1.0}) is None
  stop = hooking.show(running, {"step": 2, "loss": math.inf})
  assert stop.failure and "'bad': loss is inf at step 2" in stop.reason


def test_metrics_of_an_evaluation_that_does_not_exist(caplog):
  for entry, metrics in (
    (dict(type="early_stopping", metric="vall/loss"), ["'vall/loss'"]),
    (dict(type="stop_on_nan", metrics=["loss", "tst/a"]), ["'tst/a'"]),
    (dict(type="checkpoint_best", metric="val/sub/loss"), []),
    (dict(type="stop_on_nan", metrics="grad_rms/head/kernel"), []),
  ):
    caplog.clear()
    config = settings.Config({"hooks": {"h": entry}, "evals": {"val": {}}})
    with caplog.at_level(logging.WARNING, logger="absl"):
      hooks.from_config(config, "w")
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == len(metrics)
    assert all(name in text for name, text in zip(metrics, messages))
    assert all("config.hooks.h" in text for text in messages)


# Rows are seen once each, and decisions are kept.


def test_a_row_that_a_resumed_run_shows_again_counts_once():
  entry = dict(type="early_stopping", metric="val/x", patience=3)
  running = hooking.build(early=entry)
  hooking.show(running, {"step": 1, "val/x": 1.0})
  hooking.show(running, {"step": 2, "loss": 1.0, "val/x": 1.0})
  saved = json.loads(json.dumps(running.state()))
  again = hooking.build(early=entry)
  again.restore(saved, 2, None)
  assert hooking.show(again, {"step": 2, "val/x": 1.0}) is None
  # Results after the checkpoint are new.
  assert hooking.show(again, {"step": 2, "other/x": 1.0}) is None
  assert hooking.show(again, {"step": 3, "val/x": 1.0}) is not None


def test_a_stop_is_kept_until_the_hooks_change():
  entry = dict(type="early_stopping", metric="x", patience=2)
  running = hooking.build(early=entry)
  assert running.stopped is None
  hooking.show(running, {"step": 1, "x": 1.0})
  stop = hooking.show(running, {"step": 2, "x": 1.0})
  saved = json.loads(json.dumps(running.state()))
  for changes, expected in (({}, stop), ({"patience": 3}, None)):
    again = hooking.build(early=entry | changes)
    again.restore(saved, 2, None)
    assert again.stopped == expected


# Users' own hooks.


class Own:
  """A user's class with all methods."""

  def __init__(self, limit, *, context):
    self.limit, self.context, self.calls = limit, context, []

  def before_train(self, step):
    self.calls.append(("before_train", step))

  def before_step(self, step):
    self.calls.append(("before_step", step))

  def after_row(self, step, row):
    where = f"{self.context.name} {self.context.workdir} {self.context.path}"
    if row.get("x", 0) > self.limit:
      self.context.stop(f"too much in {where}", failure=True)

  def after_train(self, step, end):
    self.calls.append(("after_train", step, end.how))

  def state(self):
    return {"calls": self.calls}

  def restore(self, state):
    self.calls = [tuple(call) for call in state["calls"]]


class FailsAtTheEnd:
  """A user's class whose last method fails."""

  def after_train(self, step, end):
    raise OSError("disk full")


class Nothing:
  """A user's class without methods."""


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
  """Makes the classes of this file importable as users.hooks."""
  monkeypatch.setitem(sys.modules, "users.hooks", sys.modules[__name__])


def test_a_class_by_its_dotted_path():
  entries = dict(
    own=dict(type="users.hooks.Own", limit=3),
    no=dict(type="users.hooks.Nothing"),
  )
  running = hooking.build(**entries)
  running.before_train()
  running.before_step(1)
  running.after_step(1, {}, None)
  running.after_train(None, None, None)
  assert hooking.show(running, {"step": 1, "x": 3}) is None
  stop = hooking.show(running, {"step": 2, "x": 4})
  reason = "hook 'own': too much in own w config.hooks.own"
  assert stop == hook_context.Stop(reason, True)
  saved = json.loads(json.dumps(running.state()))
  assert list(saved["hooks"]) == ["own"]
  again = hooking.build(**entries)
  again.restore(saved, 1, {})
  assert json.loads(json.dumps(again.state())) == saved
  # A hook that is new since the checkpoint, and one that is gone.
  new = hooking.build(new=dict(type="users.hooks.Own", limit=1))
  new.restore(saved, 1, {})


def test_no_hooks():
  config = settings.Config({})
  none = hooks.from_config(config, "w")
  none.before_step(1)
  none.after_step(1, {}, None)
  assert hooking.show(none, {"step": 1, "loss": math.nan}) is None
  none.restore(none.state(), 1, {})


@pytest.mark.parametrize(
  ("entry", "message"),
  [
    (dict(type="early_stoping"), r"hooks.h.type: .* mean 'early_stopping'"),
    (
      dict(),
      r"hooks.h.type: expected a module's name, got None. "
      "There are: call, checkpoint_best",
    ),
    (3, r"hooks.h: expected a dict, got 3"),
    (dict(type="users.hooks.Onw"), r"h.type: users.hooks has no 'Onw'.*'Own'"),
    (dict(type="users.hooks.Own"), r"config.hooks.h.limit: missing"),
  ],
)
def test_mistakes(entry, message):
  with pytest.raises(ConfigError, match=message):
    hooking.build(h=entry)


# In runs.


def acts(**options):
  return dict(type="tiny.hooks.Acts", **options)


def test_hooks_act_in_a_run_and_in_one_that_is_cut(tiny_config, tmp_path):
  plan = {2: ["request_save"], 4: ["request_evaluation"]}
  changes = {
    "keep_ckpts": 9,
    "evals.val.log_steps": 0,
    "hooks": {"acts": acts(plan=plan, scalars_at=[1, 3])},
  }
  config = tiny_config(changes)
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(config, str(whole))
  for stop in (3, 4, None):
    main.train(config | {"stop_at_steps": stop}, str(cut))
  assert tiny.checkpoint_steps(whole) == [2, 3, 6]
  rows = tiny.rows(whole)
  assert {s for s in rows if "val/loss" in rows[s]} == {4, 6}
  # The scalars of step 3 wait for the row of step 4, also in the checkpoint.
  counts = {s: row.get("acts/count") for s, row in rows.items()}
  assert {s: n for s, n in counts.items() if n} == {1: 1, 4: 3}
  assert rows == tiny.rows(cut)
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(cut))


def test_an_evaluation_that_was_asked_for_outlives_a_restart(
  tiny_config, tmp_path, monkeypatch
):
  changes = {
    "evals.val.log_steps": 0,
    "hooks": {"acts": acts(plan={2: ["request_evaluation"]})},
  }
  config = tiny_config(changes)

  def interrupted(self, variables, step):
    raise process.Preempted("while evaluating")

  with monkeypatch.context() as patch:
    patch.setattr(classification.Evaluator, "run", interrupted)
    with pytest.raises(process.Preempted):
      main.train(config, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [2]
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert {s for s in rows if "val/loss" in rows[s]} == {2, 6}


def fails(config, workdir):
  fault = dict(type="tiny.hooks.Fails", step=3)
  config["hooks"]["fault"] = fault
  with pytest.raises(RuntimeError, match="fails before step 3"):
    main.train(config, workdir)


def signalled(config, workdir):
  config["hooks"]["call"] = dict(type="call", function=f"{__name__}.send")
  with pytest.raises(process.Preempted):
    main.train(config, workdir)


def send(step, row):
  process._signals.append(signal.SIGTERM)


def stops(config, workdir):
  config["hooks"]["stop"] = acts(plan={2: ["stop", "enough"]})
  main.train(config, workdir)


@pytest.mark.parametrize(
  ("run", "expected"),
  [
    (main.train, (4, "finished", "")),
    (stops, (2, "stopped", "hook 'stop': enough")),
    (fails, (2, "failed", "RuntimeError: the hook fails before step 3")),
    (signalled, (2, "preempted", "Preempted: saved step 2 of 4")),
  ],
  ids=["finished", "stopped", "failed", "preempted"],
)
def test_the_end_of_a_run_is_told(
  tiny_config, tmp_path, monkeypatch, run, expected
):
  monkeypatch.setattr(process, "_signals", [])
  monkeypatch.setattr(tiny_hooks.Acts, "ends", [])
  changes = {"total_steps": 4, "evals": {}, "hooks": {"acts": acts()}}
  run(tiny_config(changes), str(tmp_path))
  assert tiny_hooks.Acts.ends[0] == expected


def test_a_rollback_is_an_end_and_errors_of_hooks_do_not_hide_others():
  running = hooking.build(
    fails=dict(type="users.hooks.FailsAtTheEnd"),
    own=dict(type="users.hooks.Own", limit=3),
  )
  running.after_step(7, {}, None)
  running.after_train(None, guard.Rollback(guard.NotFinite("nan"), 7, 4), None)
  calls = running.state()["hooks"]["own"]["calls"]
  assert calls == [("after_train", 7, "rolled_back")]
  with pytest.raises(OSError, match="disk"):
    running.after_train(None, None, None)
  assert calls[1:] == [("after_train", 7, "finished")]


def test_values_predictions_and_the_example_of_the_docs(
  tiny_config, tmp_path, monkeypatch, capsys
):
  page = pathlib.Path(__file__).parents[2] / "docs" / "hooks.md"
  (tmp_path / "hooks_of_the_docs.py").write_text(
    re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  changes = {
    "total_steps": 3,
    "log_steps": 1,
    "evals": {},
    "keep_ckpts": 9,
    "hooks": {
      "values": dict(type="tiny.hooks.Values"),
      "predicts": dict(type="tiny.hooks.Predicts"),
      "spikes": dict(type="hooks_of_the_docs.Spikes", factor=0.5),
      "head": dict(type="hooks_of_the_docs.HeadNorm", every=2),
    },
  }
  main.train(tiny_config(changes), str(tmp_path / "run"))
  rows = tiny.rows(tmp_path / "run")
  losses = [row["loss"] for row in rows.values()]
  assert rows[3]["values/losses"] == str(losses)
  assert all(math.isfinite(row["predicts/sum"]) for row in rows.values())
  assert [row["spikes/count"] for row in rows.values()] == [1, 2, 3]
  assert tiny.checkpoint_steps(tmp_path / "run") == [1, 2, 3]
  kernel = tiny.arrays(tmp_path / "run", 2)["params/head/kernel"]
  assert rows[2]["head/norm"] == pytest.approx(np.linalg.norm(kernel))
  assert "head/norm" not in rows[3]
  assert "finished after step 3: 3 spikes" in capsys.readouterr().out


def test_values_must_be_declared_and_names_must_differ():
  context = hook_context.Context("val", hook_context.Run("w", {}))
  with pytest.raises(RuntimeError, match="hooks.val.*needs_values = True"):
    context.values  # noqa: B018
  run = hook_context.Run("w", {}, evaluations=["val"])
  context = hook_context.Context("val", run)
  with pytest.raises(ConfigError, match=r"hooks.val: .* rename the hook"):
    context.add_scalars({"x": 1})
  with pytest.raises(RuntimeError, match="hooks.val: .* asks = True"):
    context.request_save()
  context.asks = True
  with pytest.raises(ConfigError, match=r"no evaluation 'vall'.* mean 'val'"):
    context.request_evaluation("vall")


def test_a_checkpoint_of_an_earlier_version_restores():
  entry = dict(type="early_stopping", metric="x", patience=2)
  saved = hooking.build(early=entry).state()
  saved = {k: saved[k] for k in ("hooks", "seen", "stopped", "config")}
  saved["stopped"] = ["enough", False]
  again = hooking.build(early=entry)
  again.restore(saved, 3, None)
  assert again.stopped == hook_context.Stop("enough", False)
