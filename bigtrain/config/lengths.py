"""Converts lengths with units to steps: when a run logs, saves and ends.

A config gives each length once, in the unit that suits it: `total_steps`,
`total_epochs`, `total_examples` or `total_tokens`. The last word of the key is
the unit. Lengths within the run may also be a percentage of it, as in
`log_percent`.
"""

import dataclasses
from typing import Any, NamedTuple

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_number

UNITS = settings.UNITS

# Steps between two log steps, and between two checkpoints, where a config does
# not say.
_LOG_STEPS = 50
_CKPT_STEPS = 1000


def keys(prefix: str) -> list[str]:
  """Returns the names of a length in all units, such as "log_steps"."""
  return [f"{prefix}_{unit}" for unit in UNITS]


@dataclasses.dataclass(frozen=True)
class Units:
  """The sizes by which lengths are converted; None if a size is unknown."""

  batch_size: int
  examples_per_epoch: int | None = None
  tokens_per_example: int | None = None
  total_steps: int | None = None

  def to_steps(self, amount: float, unit: str, key: str) -> int:
    """Returns the nearest number of steps, at least 1 unless `amount` is 0."""
    most = 100 if unit == "percent" else None
    check_number(key, amount, least=0, most=most)
    epoch, tokens = self.examples_per_epoch, self.tokens_per_example
    steps_per_unit = {
      "steps": 1,
      "examples": 1 / self.batch_size,
      "epochs": epoch and epoch / self.batch_size,
      "tokens": tokens and 1 / tokens / self.batch_size,
      "percent": self.total_steps and self.total_steps / 100,
    }[unit]
    if not steps_per_unit:
      needed = {
        "epochs": "a training set of known size",
        "tokens": "an input with tokens",
        "percent": "the length of the run",
      }[unit]
      raise ConfigError(f"{key}: this unit needs {needed}.")
    if not amount:
      return 0
    return max(1, round(amount * steps_per_unit))


def steps(
  cfg: settings.Config | dict[str, Any],
  prefix: str,
  units: Units,
  default: int | None = None,
  path: str | None = None,
) -> int | None:
  """Reads the length f"{prefix}_{unit}", of any unit, in steps.

  A value of None counts as absent, so `total_epochs=None total_steps=100`
  changes the unit. `default` is in steps. The keys that are read are removed
  from a plain dict, so the rest can be passed on as keyword arguments.
  """
  path = path or getattr(cfg, "path", "config")
  given = {}
  for unit, name in zip(UNITS, keys(prefix)):
    # Reading all five names also makes each of them known to the hints.
    if isinstance(cfg, settings.Config):
      amount = cfg.get(name)
    else:
      amount = cfg.pop(name, None)
    if amount is not None:
      given[name] = amount, unit
  if not given:
    return default
  if len(given) > 1:
    names = [f"{path}.{name}" for name in given]
    both = " and ".join(names)
    raise ConfigError(
      f"{both}: give the length once, in one unit; "
      f"{names[0]}=None removes the first."
    )
  ((name, (amount, unit)),) = given.items()
  return units.to_steps(amount, unit, f"{path}.{name}")


class Lengths(NamedTuple):
  """The lengths of a run, in steps. Step s means the state after s updates."""

  units: Units
  total: int  # End of the schedules.
  last: int  # End of this run: `total`, or `stop_at` if that is earlier.
  log: int  # Steps between two log steps.
  ckpt: int  # Steps between two checkpoints.
  keep_ckpt: int | None  # Steps between two checkpoints that stay for good.
  local_ckpt: int | None  # Steps between two on the hosts' own disks.
  save_at_start: bool

  def is_log_step(self, step: int) -> bool:
    return step == 1 or step % self.log == 0 or step == self.total

  def saves(self, step: int) -> bool:
    return step % self.ckpt == 0 or step == self.last

  def about(self) -> dict[str, Any]:
    """Returns the facts for run.json."""
    return {
      "batch_size": self.units.batch_size,
      "total_steps": self.total,
      "last_step": self.last,
      "examples_per_epoch": self.units.examples_per_epoch,
      "tokens_per_example": self.units.tokens_per_example,
    }


def read(
  config: settings.Config,
  batch_size: int,
  examples_per_epoch: int | None = None,
  tokens_per_example: int | None = None,
) -> Lengths:
  """Reads total, stop_at, log, ckpt, keep_ckpt and local_ckpt, in any unit.

  0 means: only at the end of the run.
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
    log=steps(config, "log", units, _LOG_STEPS) or total,
    ckpt=steps(config, "ckpt", units, _CKPT_STEPS) or total,
    keep_ckpt=steps(config, "keep_ckpt", units),
    local_ckpt=steps(config, "local_ckpt", units),
    save_at_start=config.get("save_at_start", False),
  )
