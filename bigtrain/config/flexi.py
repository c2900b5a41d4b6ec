"""Values that each step draws anew: config.flexi and config.input.flexi."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from bigtrain.config.errors import ConfigError, check_choice, check_kwargs
from bigtrain.config.settings import Config


def draws(
  cfg: Config, names: Iterable[str]
) -> list[tuple[dict[str, Any], float]]:
  """All ({name: value}, share of the steps) that cfg.flexi draws from."""
  drawn = []
  for name, options in cfg.kwargs("flexi").items():
    key = f"{cfg.path}.flexi.{name}"
    check_choice(f"{cfg.path}.flexi", name, names)
    check_kwargs(_draws, options, key)
    drawn.append([(name, *draw) for draw in _draws(key=key, **options)])
  return [
    ({n: x for n, x, _ in each}, math.prod(share for *_, share in each))
    for each in itertools.product(*drawn)
  ]


def _draws(
  values: Sequence[Any], weights: Sequence[float] | None = None, key: str = ""
) -> list[tuple[Any, float]]:
  weights = [1] * len(values) if weights is None else weights
  if len(weights) != len(values) or not sum(weights) or min(weights) < 0:
    raise ConfigError(
      f"{key}: expected values, and a positive weight of each, got "
      f"values={values!r}, weights={weights!r}."
    )
  return [(v, weight / sum(weights)) for v, weight in zip(values, weights)]
