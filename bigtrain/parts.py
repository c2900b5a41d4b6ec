"""Finds the task, the model and other parts that a config names."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from bigtrain import settings

# Arguments of a task's loss_fn that the program passes.
_GIVEN = ("variables", "batch", "rng", "model", "train")


def module_names(kind: str) -> list[str]:
  """Returns the names of the modules in bigtrain.<kind>."""
  package = importlib.import_module(f"bigtrain.{kind}")
  return sorted(
    m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg
  )


def find_module(kind: str, name: str, key: str) -> Any:
  """Imports the module that a config names.

  Args:
    kind: subpackage: "tasks", "models", "evaluators", "data" or "hooks".
    name: file name without .py, or a dotted path outside of the package.
    key: config key of the name, for error messages.

  Raises:
    ConfigError: there is no such module. Errors of imports inside the module
      are raised unchanged.
  """
  if not isinstance(name, str) or not name:
    hint = settings.did_you_mean("", module_names(kind))
    raise settings.ConfigError(
      f"{key}: expected a module's name, got {name!r}.{hint}"
    )
  if "." not in name and name not in module_names(kind):
    hint = settings.did_you_mean(name, module_names(kind))
    raise settings.ConfigError(f"{key}: no {kind} module {name!r}.{hint}")
  dotted = name if "." in name else f"bigtrain.{kind}.{name}"
  return _import(dotted, key)


def find_attribute(dotted: str, key: str) -> Any:
  """Returns the object "package.module.attribute", or raises ConfigError."""
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
  """Returns the module that config.task names."""
  return find_module("tasks", config.task, "config.task")


def model(config: settings.Config) -> tuple[Any, Any]:
  """Returns (module of config.model_name, its Model with config.model)."""
  module = find_module("models", config.model_name, "config.model_name")
  options = config.kwargs("model")
  settings.check_kwargs(module.Model, options, "config.model")
  return module, module.Model(**options)


class ClassCount(int):
  """Number of classes of a feature with class numbers.

  Such a feature may also hold a vector with one entry per class.

  Attributes:
    key: config key of the number, or of the classes' names.
  """

  key: str

  def __new__(
    cls, value: int, key: str = "config.model.num_classes"
  ) -> "ClassCount":
    """Returns `value` with its key."""
    result = super().__new__(cls, value)
    result.key = key
    return result


def vocab_sizes(task: Any, model: Any) -> dict[str, int]:
  """Returns {feature of a batch: number of ids that the model can take}.

  Token ids have the size of the vocabulary, class numbers a ClassCount.
  """
  sizes: dict[str, int] = {}
  if hasattr(task, "vocab_sizes"):
    sizes.update(task.vocab_sizes(model))
  if hasattr(task, "class_counts"):
    counts = task.class_counts(model)
    sizes.update({name: ClassCount(n) for name, n in counts.items()})
  return sizes


class Features(dict[str, Any]):
  """A batch as tasks and evaluators receive it: a missing feature is an error.

  The program wraps every batch before it calls a loss or predict function, so
  these read `batch["labels"]` without a check of their own. Names with a
  leading underscore ("_mask") belong to the program and are not suggested.

  Args:
    batch: arrays, or their specs, by the names of features.
    path: location of the input in the config, such as "config.input".
  """

  def __init__(
    self, batch: Mapping[str, Any] | Iterable[tuple[str, Any]], path: str
  ):
    super().__init__(batch)
    self.path = path

  def __missing__(self, name: str) -> Any:
    features = [feature for feature in self if not feature.startswith("_")]
    raise settings.ConfigError(
      f"{self.path}: the examples have no feature {name!r}."
      f"{settings.did_you_mean(name, features)}"
    )


def _flatten(features: Features) -> tuple[list[tuple[Any, Any]], Any]:
  names = tuple(sorted(features))
  children = [(jax.tree_util.DictKey(name), features[name]) for name in names]
  return children, (names, features.path)


# jax takes an unregistered subclass of dict for a leaf.
jax.tree_util.register_pytree_with_keys(
  Features,
  _flatten,
  lambda aux, values: Features(zip(aux[0], values), aux[1]),
)


def loss_fn(
  config: settings.Config, task: Any, model: Any
) -> Callable[[Any, Any, Any], Any]:
  """Binds config.loss: returns (variables, batch, rng) -> (pairs, mutable)."""
  options = config.kwargs("loss")
  settings.check_kwargs(task.loss_fn, options, "config.loss", given=_GIVEN)

  def bound_loss_fn(variables: Any, batch: Any, rng: Any) -> Any:
    batch = Features(batch, "config.input")
    return task.loss_fn(
      variables, batch, rng, model=model, train=True, **options
    )

  return bound_loss_fn
