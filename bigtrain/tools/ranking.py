"""The best value of a metric, in a run and among runs."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import check_choice

# Endings of the metrics that compare runs unless one is named, best first.
_PREFERRED = ("acc", "exact", "loss")
# Metrics whose smaller values are better.
_LESS = re.compile(r"loss|perplexity|bits_|nll|error|_rate$|_norm$|secs|bytes")


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

  Test sets come last: a choice by their results would spoil them.
  """
  evaluated = sorted(name for name in names if "/" in name)
  evaluated.sort(key=lambda name: name.startswith("test"))
  for ending in _PREFERRED:
    for name in evaluated:
      if name.rpartition("/")[2] == ending:
        return name
  return "loss"


def mode_of(metric: str) -> str:
  """Returns "min" for losses, errors, times and sizes, else "max"."""
  return "min" if _LESS.search(metric.rpartition("/")[2]) else "max"


def choose(
  names: Iterable[str], metric: str | None, mode: str | None
) -> tuple[str, str]:
  names = sorted(set(names) - {"step"})
  if metric and names:
    check_choice("--metric", metric, names, "no run has")
  metric = metric or default_metric(names)
  return metric, mode or mode_of(metric)


def best(
  rows: Iterable[Mapping[str, Any]], metric: str, mode: str
) -> Best | None:
  values = [
    Best(row[metric], row["step"])
    for row in rows
    if isinstance(row.get(metric), int | float) and math.isfinite(row[metric])
  ]
  if not values:
    return None
  return (max if mode == "max" else min)(values, key=lambda b: b.value)


def order(bests: Sequence[Best | None], mode: str) -> list[int]:
  sign = -1 if mode == "max" else 1
  keys = [(b is None, sign * b.value if b else 0.0) for b in bests]
  return sorted(range(len(bests)), key=keys.__getitem__)
