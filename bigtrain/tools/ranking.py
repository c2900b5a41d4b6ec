"""The best value of a metric, in a run and among runs."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import check_choice

# Last parts of the metrics to compare runs by, unless the user names one.
_PREFERRED = ("acc", "exact", "loss")
# Metrics whose smaller values are better.
_SMALLER_IS_BETTER = re.compile(
  r"loss|perplexity|bits_|nll|error|_rate$|_norm$|secs|bytes"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds --metric and --mode, by which several tools compare runs."""
  parser.add_argument(
    "--metric",
    help="metric to compare, such as val/acc (default: one of an evaluation)",
  )
  parser.add_argument(
    "--mode",
    choices=["max", "min"],
    help="whether the largest or the smallest value is the best (default: min "
    "for losses, errors, times and sizes, else max)",
  )


class Best(NamedTuple):
  """The best value of a metric in a run, and its step."""

  value: float
  step: int


def default_metric(names: Iterable[str]) -> str:
  """Returns the metric to compare: one of an evaluation, or the loss.

  Test sets come last, because choosing a run by them would make them useless.
  """
  evaluated = [name for name in names if "/" in name]
  evaluated.sort(key=lambda name: (name.startswith("test"), name))
  for ending in _PREFERRED:
    for name in evaluated:
      if name.rpartition("/")[2] == ending:
        return name
  return "loss"


def mode_of(metric: str) -> str:
  """Returns "min" for losses, errors, times and sizes, else "max"."""
  return (
    "min" if _SMALLER_IS_BETTER.search(metric.rpartition("/")[2]) else "max"
  )


def choose(
  names: Iterable[str], metric: str | None, mode: str | None
) -> tuple[str, str]:
  """Returns the metric and the mode; checks a metric that is given."""
  names = sorted(set(names) - {"step"})
  if metric and names:
    check_choice("--metric", metric, names, "no run has")
  metric = metric or default_metric(names)
  return metric, mode or mode_of(metric)


def best(
  entries: Iterable[Mapping[str, Any]], metric: str, mode: str
) -> Best | None:
  """The best finite value in a run's log entries; the first among equals."""
  values = []
  for entry in entries:
    value = entry.get(metric)
    if isinstance(value, int | float) and math.isfinite(value):
      values.append(Best(value, entry["step"]))
  if not values:
    return None
  choose_from = max if mode == "max" else min
  return choose_from(values, key=lambda best: best.value)


def order(bests: Sequence[Best | None], mode: str) -> list[int]:
  """Indices of runs, the best one first; runs without a value come last."""

  def key(i: int) -> tuple[bool, float]:
    best = bests[i]
    if best is None:
      return True, 0.0
    return False, -best.value if mode == "max" else best.value

  return sorted(range(len(bests)), key=key)
