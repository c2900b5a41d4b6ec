"""Task and model that a config names, with their options checked."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from bigtrain import settings

# What the program gives to a task's loss_fn.
_GIVEN = ("variables", "batch", "rng", "model", "train")


def module_names(kind: str) -> list[str]:
  """Names of the modules in bigtrain.<kind> that a config may name."""
  package = importlib.import_module(f"bigtrain.{kind}")
  return sorted(
    m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg
  )


def find_module(kind: str, name: str, key: str) -> Any:
  """The module that `name` stands for.

  Args:
    kind: subpackage: "tasks", "models", "evaluators" or "data".
    name: file name without .py, or a dotted path outside of the package.
    key: the config key that holds the name, for the message.

  Raises:
    ConfigError: there is no such module. A failing import inside of the
      module is raised as itself.
  """
  if not isinstance(name, str) or not name:
    raise settings.ConfigError(
      f"{key}: expected a module's name, got {name!r}."
    )
  if "." not in name and name not in module_names(kind):
    hint = settings.did_you_mean(name, module_names(kind))
    raise settings.ConfigError(f"{key}: no {kind} module {name!r}.{hint}")
  dotted = name if "." in name else f"bigtrain.{kind}.{name}"
  return _import(dotted, key)


def find_attribute(dotted: str, key: str) -> Any:
  """The object that "package.module.attribute" names, or ConfigError."""
  module_name, _, attribute = dotted.rpartition(".")
  if not module_name:
    raise settings.ConfigError(
      f"{key}: expected package.module.name, got {dotted!r}."
    )
  module = _import(module_name, key)
  if not hasattr(module, attribute):
    hint = settings.did_you_mean(
      attribute, [n for n in dir(module) if n[0] != "_"]
    )
    raise settings.ConfigError(
      f"{key}: {module_name} has no {attribute!r}.{hint}"
    )
  return getattr(module, attribute)


def _import(dotted: str, key: str) -> Any:
  if "" in dotted.split("."):
    raise settings.ConfigError(
      f"{key}: expected package.module, got {dotted!r}."
    )
  try:
    return importlib.import_module(dotted)
  except ModuleNotFoundError as e:
    if e.name and (dotted == e.name or dotted.startswith(e.name + ".")):
      raise settings.ConfigError(
        f"{key}: cannot import {dotted!r}: no module named {e.name!r}."
      ) from e
    raise


def task(config: settings.Config) -> Any:
  """The module that config.task names."""
  return find_module("tasks", config.task, "config.task")


def model(config: settings.Config) -> tuple[Any, Any]:
  """(module that config.model_name names, its Model with config.model)."""
  module = find_module("models", config.model_name, "config.model_name")
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
