"""Keeps the checkpoint with the best value of a metric."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from bigtrain.checkpoints import folders
from bigtrain.files import paths
from bigtrain.runtime.hook_context import Context, WatchedMetric, sign


class Hook:
  """Keeps the checkpoint of the step with the best value of a metric.

  An evaluated state is saved even if no checkpoint was due. For a training
  metric, only steps with a checkpoint count. Of two equal values, the earlier
  one is kept. <workdir>/best_<name of the hook>.json names the step.

  Args:
    metric: name as in metrics.jsonl, such as "val/acc".
    mode: "min" if smaller is better, "max" if larger is better.
  """

  def __init__(self, metric: str, mode: str = "min", *, context: Context):
    self._sign = sign(mode, f"{context.path}.mode")
    self._metric = WatchedMetric(metric)
    self._context = context
    self._path = os.path.join(context.workdir, f"best_{context.name}.json")
    self._saved_step: int | None = None  # Of the newest checkpoint.
    # (step, value) of the best checkpoint, and of a better state that has no
    # checkpoint yet.
    self._best: tuple[int, float] | None = None
    self._candidate: tuple[int, float] | None = None
    self.watches = [metric]

  def after_row(self, step: int, entry: Mapping[str, Any]) -> None:
    value = self._metric.value(entry)
    if value is None or math.isnan(value):
      return
    is_better = self._best is None or self._sign * (self._best[1] - value) > 0
    if not is_better:
      return
    self._candidate = step, value
    if step == self._saved_step:
      self._accept_candidate()
    elif step == self._context.step:  # The state of this step still exists.
      self._context.request_save()

  def before_save(self, step: int) -> None:
    self._saved_step = step
    if self._candidate and self._candidate[0] == step:
      self._accept_candidate()

  def keep_steps(self) -> list[int]:
    return [self._best[0]] if self._best else []

  def state(self) -> dict[str, Any]:
    return {"best": self._best, "saved": self._saved_step}

  def restore(self, state: Mapping[str, Any]) -> None:
    self._saved_step = state["saved"]
    self._best = tuple(state["best"]) if state["best"] else None
    # The run resumes from the checkpoint of `_saved_step`, wherever it is.
    checkpoints = folders.listing(self._context.workdir).checkpoints
    existing = {*checkpoints, self._saved_step}
    if self._best and self._best[0] not in existing:
      step, value = self._best
      logging.warning(
        f"config.hooks: the best checkpoint so far, of step {step} with "
        f"{self._metric.name} {value:g}, no longer exists; the next best one "
        "will be kept."
      )
      self._best = None
    self._write()

  def _accept_candidate(self) -> None:
    self._best, self._candidate = self._candidate, None
    self._write()

  def _write(self) -> None:
    if self._best and jax.process_index() == 0:
      step, value = self._best
      record = {"step": step, "metric": self._metric.name, "value": value}
      with paths.replacing(self._path) as file:
        json.dump(record, file)
