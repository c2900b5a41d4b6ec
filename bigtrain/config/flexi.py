"""Reads config.flexi and config.input.flexi: values that every step draws.

  config.flexi = dict(patch_size=dict(values=[16, 32], weights=[1, 3]))

Each step uses one value for each name, such as FlexiViT's patch size. The
values are static, so the program is compiled once for each combination.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from bigtrain.config.errors import ConfigError, check_choice, check_kwargs
from bigtrain.config.settings import Config


def draws(
  cfg: Config, names: Iterable[str]
) -> list[tuple[dict[str, Any], float]]:
  """Returns every combination of values with its share of the steps.

  Args:
    cfg: config with the key "flexi".
    names: names that may be drawn.
  """
  values_by_name = {}
  for name, options in cfg.kwargs("flexi").items():
    key = f"{cfg.path}.flexi.{name}"
    check_choice(f"{cfg.path}.flexi", name, names)
    check_kwargs(_values_with_shares, options, key)
    values_by_name[name] = _values_with_shares(key=key, **options)
  combinations = []
  for drawn in itertools.product(*values_by_name.values()):
    values = {name: value for name, (value, _) in zip(values_by_name, drawn)}
    combinations.append((values, math.prod(share for _, share in drawn)))
  return combinations


def _values_with_shares(
  values: Sequence[Any], weights: Sequence[float] | None = None, key: str = ""
) -> list[tuple[Any, float]]:
  if weights is None:
    weights = [1] * len(values)
  if len(weights) != len(values) or not sum(weights) or min(weights) < 0:
    raise ConfigError(
      f"{key}: expected values and one weight for each, not all 0, got "
      f"values={values!r}, weights={weights!r}."
    )
  total = sum(weights)
  return [(value, weight / total) for value, weight in zip(values, weights)]
