"""The best value of a metric."""

import math

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.tools import ranking


@pytest.mark.parametrize(
  "names, metric",
  [
    (["loss", "accuracy"], "loss"),
    (["loss", "val/loss", "val/exact"], "val/exact"),
    (["test/acc", "test/top5_acc", "val/acc"], "val/acc"),
    (["test/acc", "val/loss"], "test/acc"),
  ],
)
def test_an_evaluation_is_compared_unless_a_metric_is_named(names, metric):
  assert ranking.choose(names, None, None)[0] == metric


def test_less_is_better_for_losses():
  names = ["val/loss", "val/acc", "val/perplexity", "val/bleu"]
  modes = [ranking.choose(names, name, None)[1] for name in names]
  assert modes == ["min", "max", "min", "max"]
  assert ranking.choose(names, "val/loss", "max") == ("val/loss", "max")


def test_an_unknown_metric_is_an_error():
  with pytest.raises(ConfigError, match="Did you mean 'val/acc'"):
    ranking.choose(["val/acc"], "val/ac", None)


def test_values_that_are_not_finite_are_never_the_best():
  rows = [
    {"step": 1, "a": math.inf},
    {"step": 2, "a": 3.0},
    {"step": 3, "a": 3.0},
    {"step": 4, "a": math.nan},
    {"step": 5},
  ]
  assert ranking.best(rows, "a", "max") == (3.0, 2)
  assert ranking.best(rows, "b", "max") is None
  bests = [None, ranking.Best(2.0, 1), ranking.Best(1.0, 1)]
  assert ranking.order(bests, "min") == [2, 1, 0]
  assert ranking.order(bests, "max") == [1, 2, 0]
