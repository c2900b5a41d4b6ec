"""Builds the task and the model that a config, or its teacher, names."""

from typing import Any

from bigtrain.config import choices
from bigtrain.config.errors import check_kwargs
from bigtrain.config.modules import find_module
from bigtrain.config.settings import Config
from bigtrain.models.layers import lora, quantized
from bigtrain.objective import logical_axes, task_sum
from bigtrain.objective.published_sizes import PUBLISHED


def task(config: Config) -> Any:
  """The module of config.task, or the TaskSum of several."""
  if isinstance(config.task, Config):
    return task_sum.read(config)
  return find_module("tasks", config.task, "config.task")


def model(config: Config) -> tuple[Any, Any]:
  """(module of config.model_name, its Model with config.model).

  With config.logical_axes, the model runs under these rules. With
  config.quantize, its dense layers multiply in int8 or fp8. With
  config.adapters, it has a frozen base, and both have adapters.
  """
  choices.forget_choices()  # Of an earlier run.
  key = f"{config.path}.model_name"
  module = find_module("models", config["model_name"], key)
  options = config.kwargs("model")
  others = [PUBLISHED] if hasattr(module, "published_fields") else []
  path = f"{config.path}.model"
  check_kwargs(module.Model, options, path, others=others)
  cls = module.Model
  if axis_rules := logical_axes.logical_axes(config):
    key = f"{config.path}.logical_axes"
    cls = logical_axes.with_rules(cls, key, axis_rules)
  # A teacher has no adapters, so there the key is an error.
  if config.path == "config" and config.get("adapters"):
    adapters = config.kwargs("adapters")
    module, cls = lora.adapted(module, cls, adapters, "config.adapters")
  if rules := config.get("quantize"):  # Outermost, so that adapters are not.
    cls = quantized.model(cls, rules, f"{config.path}.quantize")
  return module, cls(**options)
