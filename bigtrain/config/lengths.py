"""Lengths with units, and the steps at which a run logs, saves and ends."""

import dataclasses
from typing import Any, NamedTuple

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_number


@dataclasses.dataclass(frozen=True)
class Units:
  """Sizes that convert lengths to steps; None where one is unknown."""

  batch_size: int
  examples_per_epoch: int | None = None
  tokens_per_example: int | None = None
  total_steps: int | None = None

  def to_steps(self, amount: float, unit: str, key: str) -> int:
    """Whole steps in `amount` units: rounded, and at least one unless 0."""
    most = 100 if unit == "percent" else None
    check_number(key, amount, least=0, most=most)
    epoch, tokens = self.examples_per_epoch, self.tokens_per_example
    scale = {
      "steps": 1,
      "examples": 1 / self.batch_size,
      "epochs": epoch and epoch / self.batch_size,
      "tokens": tokens and 1 / tokens / self.batch_size,
      "percent": self.total_steps and self.total_steps / 100,
    }[unit]
    if not scale:
      needs = {
        "epochs": "a training set of known size",
        "tokens": "an input with tokens",
        "percent": "the length of the run",
      }[unit]
      raise ConfigError(f"{key}: this unit needs {needs}.")
    return max(1, round(amount * scale)) if amount else 0


# Units of a length: the last word of its key.
UNITS = ("steps", "epochs", "examples", "tokens", "percent")


def steps(
  cfg: settings.Config | dict[str, Any],
  prefix: str,
  units: Units,
  default: int | None = None,
  path: str | None = None,
) -> int | None:
  """Reads a length as whole steps from the key f"{prefix}_{unit}" of any unit.

  `default` also stands for keys that are all None, so that `total_epochs=None
  total_steps=100` changes the unit. From a plain dict, the key is removed.
  """
  path = path or getattr(cfg, "path", "config")
  names = keys(prefix)
  # `get` also marks each name as known in a tracked config.
  read = (
    cfg.get if isinstance(cfg, settings.Config) else lambda k: cfg.pop(k, None)
  )
  values = {name: read(name) for name in names}
  given = [name for name in names if values[name] is not None]
  if len(given) > 1:
    both = " and ".join(f"{path}.{name}" for name in given)
    raise ConfigError(f"{both}: give the length once, in one unit.")
  if not given:
    return default
  (name,) = given
  return units.to_steps(values[name], name[len(prefix) + 1 :], f"{path}.{name}")


def keys(prefix: str) -> list[str]:
  return [f"{prefix}_{unit}" for unit in UNITS]


class Lengths(NamedTuple):
  """Lengths in steps. Step s means: after s updates."""

  units: Units
  total: int  # Length of the schedules.
  last: int  # Of the run: `total`, or `stop_at` if that is earlier.
  log: int  # Steps between two log steps.
  ckpt: int  # Between two checkpoints.
  keep_ckpt: int | None  # Between two that stay for good.
  local_ckpt: int | None  # Between two on the hosts' own disks.
  save_at_start: bool

  def is_log_step(self, step: int) -> bool:
    return step == 1 or step % self.log == 0 or step == self.total

  def about(self) -> dict[str, Any]:
    return {
      "batch_size": self.units.batch_size,
      "total_steps": self.total,
      "last_step": self.last,
      "examples_per_epoch": self.units.examples_per_epoch,
      "tokens_per_example": self.units.tokens_per_example,
    }

  def saves(self, step: int) -> bool:
    return step % self.ckpt == 0 or step == self.last


def read(
  config: settings.Config,
  batch_size: int,
  examples_per_epoch: int | None = None,
  tokens_per_example: int | None = None,
) -> Lengths:
  """Reads total, stop_at, log, ckpt, keep_ckpt and local_ckpt, in any unit.

  A length of 0 means only at the end.
  """
  units = Units(batch_size, examples_per_epoch, tokens_per_example)
  total = steps(config, "total", units)
  if total == 0:
    key = next(k for k in keys("total") if config.get(k) is not None)
    raise ConfigError(
      f"config.{key}: expected a length above 0, got {config.get(key)!r}; "
      "config.eval_only=True evaluates without training."
    )
  if total is None:
    raise ConfigError(
      f"config.total_steps: missing{config.misspelled('total_steps')}; give "
      "total_steps, total_epochs, total_examples or total_tokens."
    )
  units = dataclasses.replace(units, total_steps=total)
  stop_at = steps(config, "stop_at", units) or total
  return Lengths(
    units=units,
    total=total,
    last=min(total, stop_at),
    log=steps(config, "log", units, 50) or total,
    ckpt=steps(config, "ckpt", units, 1000) or total,
    keep_ckpt=steps(config, "keep_ckpt", units),
    local_ckpt=steps(config, "local_ckpt", units),
    save_at_start=config.get("save_at_start", False),
  )
