"""Task and model that a config names, with their options checked."""

import functools
from collections.abc import Callable
from typing import Any

from bigtrain import settings

# What the program gives to a task's loss_fn.
_GIVEN = ("variables", "batch", "rng", "model", "train")


def task(config: settings.Config) -> Any:
  """The module that config.task names."""
  return settings.find_module("tasks", config.task, "config.task")


def model(config: settings.Config) -> tuple[Any, Any]:
  """(module that config.model_name names, its Model with config.model)."""
  module = settings.find_module(
    "models", config.model_name, "config.model_name"
  )
  options = config.kwargs("model")
  settings.check_kwargs(module.Model, options, "config.model")
  return module, module.Model(**options)


def vocab_sizes(task: Any, model: Any) -> dict[str, int]:
  """{feature of a batch: ids the model has}, where the task knows of some."""
  return getattr(task, "vocab_sizes", lambda model: {})(model)


def loss_fn(
  config: settings.Config, task: Any, model: Any
) -> Callable[[Any, Any, Any], Any]:
  """(variables, batch, rng) -> (pairs, mutable), with config.loss in it."""
  options = config.kwargs("loss")
  settings.check_kwargs(task.loss_fn, options, "config.loss", given=_GIVEN)
  return functools.partial(task.loss_fn, model=model, train=True, **options)
