"""Imports the modules and functions that a config names.

The file name is the registry: config.task="classification" is
bigtrain/tasks/classification.py. A name with a dot is the path of a user's
module.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from bigtrain.config.errors import ConfigError, did_you_mean

# What a module of each package is, in messages.
_KINDS = {
  "data": "data source",
  "evaluators": "evaluator",
  "hooks": "hook",
  "models": "model",
  "tasks": "task",
}


def module_names(kind: str) -> list[str]:
  """Returns the modules of a package, such as "tasks"."""
  package = importlib.import_module(f"bigtrain.{kind}")
  return sorted(
    m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg
  )


def find_module(kind: str, name: str, key: str) -> Any:
  """Imports bigtrain.<kind>.<name>, or any module by its dotted path.

  Args:
    key: place of the name in the config, for messages.
  """
  if not isinstance(name, str) or not name:
    hint = did_you_mean("", module_names(kind))
    raise ConfigError(f"{key}: expected a module's name, got {name!r}.{hint}")
  if "." not in name and name not in module_names(kind):
    hint = did_you_mean(name, module_names(kind))
    if "Did you mean" not in hint:
      hint += (
        " A module of your own has a dotted path, such as "
        "'my_project.my_module'."
      )
    raise ConfigError(f"{key}: unknown {_KINDS[kind]} {name!r}.{hint}")
  dotted = name if "." in name else f"bigtrain.{kind}.{name}"
  return _import(dotted, key)


def find_attribute(dotted: str, key: str) -> Any:
  """Returns a function or class by its dotted path, "package.module.name"."""
  module_name, _, attribute = dotted.rpartition(".")
  if not module_name:
    raise ConfigError(f"{key}: expected package.module.name, got {dotted!r}.")
  module = _import(module_name, key)
  if not hasattr(module, attribute):
    public = [name for name in dir(module) if not name.startswith("_")]
    hint = did_you_mean(attribute, public)
    raise ConfigError(f"{key}: {module_name} has no {attribute!r}.{hint}")
  return getattr(module, attribute)


def task_names(task: Any) -> str:
  """The names of the tasks in a sentence, from the value of config.task."""
  if not isinstance(task, Mapping):
    return str(task)
  return " + ".join(str(part.get("type")) for part in task.values())


def _import(dotted: str, key: str) -> Any:
  if "" in dotted.split("."):
    raise ConfigError(f"{key}: expected package.module, got {dotted!r}.")
  try:
    return importlib.import_module(dotted)
  except ModuleNotFoundError as e:
    # An import inside the module that fails is raised as it is.
    if e.name and (dotted == e.name or dotted.startswith(e.name + ".")):
      raise ConfigError(
        f"{key}: cannot import {dotted!r}: no module named {e.name!r}."
      ) from e
    raise
