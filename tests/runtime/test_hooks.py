"""Builds hooks from a config and runs them."""

import json
import logging
import math
import sys

import pytest
from tiny import hooking

from bigtrain import settings
from bigtrain.runtime import hooks
from bigtrain.settings import ConfigError


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good")])
def test_a_failure_wins_over_a_success(order):
  entries = {
    "good": dict(type="early_stopping", metric="loss", patience=2),
    "bad": dict(type="stop_on_nan"),
  }
  running = hooking.build(**{name: entries[name] for name in order})
  assert running.after_step(1, {"step": 1, "loss": 1.0}) is None
  stop = running.after_step(2, {"step": 2, "loss": math.inf})
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
  running.after_step(1, {"step": 1, "val/x": 1.0})
  running.after_step(2, {"step": 2, "loss": 1.0, "val/x": 1.0})
  saved = json.loads(json.dumps(running.state()))
  again = hooking.build(early=entry)
  again.restore(saved)
  assert again.after_step(2, {"step": 2, "val/x": 1.0}) is None
  # Results after the checkpoint are new.
  assert again.after_step(2, {"step": 2, "other/x": 1.0}) is None
  assert again.after_step(3, {"step": 3, "val/x": 1.0}) is not None


def test_a_stop_is_kept_until_the_hooks_change():
  entry = dict(type="early_stopping", metric="x", patience=2)
  running = hooking.build(early=entry)
  assert running.stopped is None
  running.after_step(1, {"step": 1, "x": 1.0})
  stop = running.after_step(2, {"step": 2, "x": 1.0})
  saved = json.loads(json.dumps(running.state()))
  for changes, expected in (({}, stop), ({"patience": 3}, None)):
    again = hooking.build(early=entry | changes)
    again.restore(saved)
    assert again.stopped == expected


# Users' own hooks.


class Own:
  """A user's class with all methods."""

  failure = True

  def __init__(self, limit, *, context):
    self.limit, self.context, self.calls = limit, context, []

  def before_train(self, step):
    self.calls.append(("before_train", step))

  def before_step(self, step):
    self.calls.append(("before_step", step))

  def after_step(self, step, row):
    where = f"{self.context.name} {self.context.workdir} {self.context.path}"
    return f"too much in {where}" if row.get("x", 0) > self.limit else None

  def after_train(self, step):
    self.calls.append(("after_train", step))

  def state(self):
    return {"calls": self.calls}

  def restore(self, state):
    self.calls = [tuple(call) for call in state["calls"]]


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
  assert len(running) == 2
  running.call("before_train", 0)
  running.call("before_step", 1)
  running.call("after_train", 1)
  assert running.after_step(1, {"step": 1, "x": 3}) is None
  stop = running.after_step(2, {"step": 2, "x": 4})
  reason = "hook 'own': too much in own w config.hooks.own"
  assert stop == hooks.Stop(reason, True)
  saved = json.loads(json.dumps(running.state()))
  assert list(saved["hooks"]) == ["own"]
  again = hooking.build(**entries)
  again.restore(saved)
  assert json.loads(json.dumps(again.state())) == saved
  # A hook that is new since the checkpoint, and one that is gone.
  hooking.build(new=dict(type="users.hooks.Own", limit=1)).restore(saved)


def test_no_hooks():
  config = settings.Config({})
  none = hooks.from_config(config, "w")
  assert len(none) == 0
  none.call("before_step", 1)
  assert none.after_step(1, {"step": 1, "loss": math.nan}) is None
  none.restore(none.state())


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
