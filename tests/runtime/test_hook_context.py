"""Warnings about metrics that are missing or not numbers."""

import logging

from tiny import hooking

from bigtrain.config import settings
from bigtrain.runtime import hooks


def warnings(caplog, *rows, metric="val/los"):
  entry = dict(type="early_stopping", metric=metric)
  config = dict(hooks={"early": entry}, evals={"val": {}, "test": {}})
  running = hooks.from_config(settings.Config(config), "w")
  with caplog.at_level(logging.WARNING, logger="absl"):
    for row in rows:
      assert hooking.show(running, row) is None
  return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_a_missing_metric_is_reported_once_with_the_nearest(caplog):
  training = {"step": 1, "loss": 1.0}
  evaluation = {"step": 1, "val/loss": 1.0, "val/acc": 1.0}
  (message,) = warnings(caplog, training, evaluation, training, evaluation)
  assert "'val/los' is not in the rows. Did you mean 'val/loss'?" in message


def test_rows_of_another_kind_do_not_warn(caplog):
  training, other = {"step": 1, "loss": 1.0}, {"step": 1, "test/los": 1.0}
  assert warnings(caplog, training, other, training) == []


def test_a_missing_training_metric(caplog):
  (message,) = warnings(caplog, {"step": 1, "loss": 1.0}, metric="los")
  assert "'los' is not in the rows. Did you mean 'loss'?" in message


def test_a_metric_that_is_not_a_number(caplog):
  (message,) = warnings(caplog, {"step": 1, "val/los": "much"})
  assert "'val/los' is not a number" in message
