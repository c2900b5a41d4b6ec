"""How long a run is, and what happens at which steps."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from bigtrain import input_pipeline, settings


class Lengths(NamedTuple):
  """Lengths in steps; step s is after s updates.

  Attributes:
    units: to convert other lengths.
    total: of the schedules.
    last: where the run ends: `total`, or `stop_at` if that is earlier.
    log: a row every so often.
    ckpt: a checkpoint every so often.
    keep_ckpt: multiples of it stay for good; None for no such rule.
    save_at_start: whether there is a checkpoint of step 0.
  """

  units: settings.Units
  total: int
  last: int
  log: int
  ckpt: int
  keep_ckpt: int | None
  save_at_start: bool

  def makes_row(self, step: Any) -> Any:
    """Whether a row is written after `step`, on the device and the host."""
    return (step == 1) | (step % self.log == 0) | (step == self.total)

  def about(self) -> dict[str, Any]:
    """What a clock (chrono.py) has to know of the run."""
    return {
      "batch_size": self.units.batch_size,
      "total_steps": self.total,
      "last_step": self.last,
      "examples_per_epoch": self.units.examples_per_epoch,
      "tokens_per_example": self.units.tokens_per_example,
    }

  def saves(self, step: int) -> bool:
    """Whether there is a checkpoint of `step`, one of at least 1."""
    return step % self.ckpt == 0 or step == self.last


def read(
  config: settings.Config,
  train_input: input_pipeline.TrainInput,
  batch_spec: Mapping[str, Any],
) -> Lengths:
  """Reads total, stop_at, log, ckpt and keep_ckpt, in whichever unit.

  A length of 0 means: only at the end.

  Raises:
    ConfigError: no total, or a unit that does not apply.
  """
  units = settings.Units(
    batch_size=train_input.batch_size,
    examples_per_epoch=train_input.num_examples,
    tokens_per_example=input_pipeline.tokens_per_example(batch_spec),
  )
  total = settings.steps(config, "total", units)
  if not total:
    raise settings.ConfigError(
      f"config.total_steps: missing{config.misspelled('total_steps')}; give "
      "total_steps, total_epochs, total_examples or total_tokens."
    )
  units = dataclasses.replace(units, total_steps=total)
  stop_at = settings.steps(config, "stop_at", units) or total
  return Lengths(
    units=units,
    total=total,
    last=min(total, stop_at),
    log=settings.steps(config, "log", units, 50) or total,
    ckpt=settings.steps(config, "ckpt", units, 1000) or total,
    keep_ckpt=settings.steps(config, "keep_ckpt", units),
    save_at_start=config.get("save_at_start", False),
  )
