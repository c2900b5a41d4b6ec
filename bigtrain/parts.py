"""Finds the task, the model and other parts that a config names."""

import contextlib
import functools
import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from bigtrain import settings

# Arguments of a task's loss_fn that the program passes.
_GIVEN = ("variables", "batch", "rng", "model", "teacher", "train")
# Key of config.model: a folder whose config.json gives the sizes.
_PUBLISHED = "published"


def module_names(kind: str) -> list[str]:
  package = importlib.import_module(f"bigtrain.{kind}")
  return sorted(
    m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg
  )


def find_module(kind: str, name: str, key: str) -> Any:
  """Imports bigtrain.<kind>.<name>, or a dotted path outside of the package.

  Errors of imports inside the module are raised unchanged.
  """
  if not isinstance(name, str) or not name:
    hint = settings.did_you_mean("", module_names(kind))
    raise settings.ConfigError(
      f"{key}: expected a module's name, got {name!r}.{hint}"
    )
  if "." not in name and name not in module_names(kind):
    hint = settings.did_you_mean(name, module_names(kind))
    if "Did you mean" not in hint:
      hint += (
        " A module of your own has a dotted path, such as "
        "'my_project.my_module'."
      )
    raise settings.ConfigError(f"{key}: no {kind} module {name!r}.{hint}")
  dotted = name if "." in name else f"bigtrain.{kind}.{name}"
  return _import(dotted, key)


def find_attribute(dotted: str, key: str) -> Any:
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
  return find_module("tasks", config.task, "config.task")


def model(config: settings.Config) -> tuple[Any, Any]:
  """(module of config.model_name, its Model with config.model).

  With config.logical_axes, the model runs under these rules. With
  config.quantize, its dense layers multiply in int8 or fp8. With
  config.adapters, it has a frozen base, and both have adapters.
  """
  settings.forget_choices()  # Of an earlier run.
  key = f"{config.path}.model_name"
  module = find_module("models", config["model_name"], key)
  options = config.kwargs("model")
  others = [_PUBLISHED] if hasattr(module, "published_fields") else []
  path = f"{config.path}.model"
  settings.check_kwargs(module.Model, options, path, others=others)
  cls = module.Model
  if rules := logical_axes(config):
    cls = _with_rules(cls, f"{config.path}.logical_axes", rules)
  # A teacher has none, so there the key is an error.
  if config.path == "config" and config.get("adapters"):
    given = config.kwargs("adapters")
    module, cls = _layers("lora").adapted(module, cls, given, "config.adapters")
  if rules := config.get("quantize"):  # Outermost, so that adapters are not.
    cls = _layers("quantized").model(cls, rules, f"{config.path}.quantize")
  return module, cls(**options)


class Variant(NamedTuple):
  """A model that a step may draw, with a probability of `share`."""

  name: str
  model: Any
  share: float = 1.0


def variants(config: settings.Config, model: Any) -> list[Variant]:
  """The models that steps draw from, by default the model alone.

  config.flexi = dict(seqhw=dict(values=(8, 16), weights=(1, 2))) draws a field
  of the model for each step, as for FlexiViT (https://arxiv.org/abs/2212.08013).
  """
  if not config.get("flexi"):
    return [Variant("", model)]
  names = model.__dataclass_fields__.keys() - {"name", "parent"}
  return [
    Variant(
      "_".join(f"{field}={value}" for field, value in fields.items()),
      model.clone(**fields),
      share,
    )
    for fields, share in draws(config, names)
  ]


def draws(
  cfg: settings.Config, names: Iterable[str]
) -> list[tuple[dict[str, Any], float]]:
  """All ({name: value}, share of the steps) that cfg.flexi draws from."""
  drawn = []
  for name, options in cfg.kwargs("flexi").items():
    key = f"{cfg.path}.flexi.{name}"
    settings.check_choice(f"{cfg.path}.flexi", name, names)
    settings.check_kwargs(_draws, options, key)
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
    raise settings.ConfigError(
      f"{key}: expected values, and a positive weight of each, got "
      f"values={values!r}, weights={weights!r}."
    )
  return [(v, weight / sum(weights)) for v, weight in zip(values, weights)]


def _layers(name: str) -> Any:
  return find_module("models.layers", name, "config.model")


def logical_axes(config: settings.Config) -> tuple[tuple[str, Any], ...]:
  """config.logical_axes as flax's rules: (name, axes of the mesh).

  A dict or a list of pairs, of names that the model gives to dimensions. Of two
  names of an array with the same axis of the mesh, the first gets it.
  """
  key = f"{config.path}.logical_axes"
  rules = config.get("logical_axes") or ()
  if isinstance(rules, settings.Config):
    rules = tuple(config.kwargs("logical_axes").items())
  on_mesh = jax.sharding.get_abstract_mesh().axis_names
  result = []
  for rule in rules if isinstance(rules, list | tuple) else [rules]:
    if not isinstance(rule, list | tuple) or len(rule) != 2:
      raise settings.ConfigError(
        f"{key}: expected a dict or a list of (name, axis of the mesh), got "
        f"{rule!r}."
      )
    name, axes = rule
    for axis in jax.tree.leaves(axes):
      if on_mesh and axis not in on_mesh:
        raise settings.ConfigError(
          f"{key}.{name}: expected None or axes of the mesh, got {axes!r}."
          f"{settings.did_you_mean(axis, on_mesh)}"
        )
    result.append((name, tuple(axes) if isinstance(axes, list) else axes))
  return tuple(result)


def no_rule(
  key: str, axis: str, names: Iterable[str], where: str
) -> settings.ConfigError:
  return settings.ConfigError(
    f"{key}: expected a rule for {axis!r}, an axis of {where}, such as "
    f"{{{axis!r}: None}}.{settings.did_you_mean(axis, names)}"
  )


class _Unknown:
  """First of flax's rules: raises ConfigError for a name without a rule.

  Flax compares it with the names of a constraint, and by itself would take a
  name without a rule for None.
  """

  def __init__(self, key: str, rules: Iterable[tuple[str, Any]]):
    self._key = key
    self._names = [name for name, _ in rules]

  def __eq__(self, axis: object) -> bool:
    if isinstance(axis, str) and axis not in self._names:
      raise no_rule(self._key, axis, self._names, "an activation or parameter")
    return self is axis

  __hash__ = object.__hash__


def no_logical_axes() -> contextlib.AbstractContextManager[None]:
  """Refuses nn.with_logical_constraint unless config.logical_axes has rules."""
  unknown: Any = _Unknown("config.logical_axes", ())
  return nn.logical_axis_rules([(unknown, None)])


@functools.cache
def _with_rules(
  cls: type[nn.Module], key: str, rules: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
  """A subclass whose methods set flax's rules, which are kept by thread."""
  unknown: Any = _Unknown(key, rules)
  with_check = [(unknown, None), *rules]

  def under_rules(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
      with nn.logical_axis_rules(with_check):
        return method(*args, **kwargs)

    return nn.nowrap(call)

  names = ("apply", "init_with_output")
  members = {name: under_rules(getattr(cls, name)) for name in names}
  return _layers("options").subclass(cls, members)


def with_published_sizes(config: settings.Config) -> settings.Config:
  """Puts a published model's sizes in place of config.model.published.

  The run saves them, so its checkpoints do not need the published folder.
  """
  plain = config.to_dict()
  parts: dict[str, dict[str, Any] | None] = {
    config.path: plain,
    f"{config.path}.teacher": plain.get("teacher"),
  }
  teachers = config.kwargs("teacher") if plain.get("teacher") else {}
  if "model_name" not in teachers:
    parts |= {f"{config.path}.teacher.{n}": x for n, x in teachers.items()}
  for path, part in parts.items():
    model = part.get("model") if isinstance(part, dict) else None
    if part and isinstance(model, dict) and model.get(_PUBLISHED) is not None:
      part["model"] = _published_sizes(part, path)
  return settings.Config(plain)


def _published_sizes(part: Mapping[str, Any], path: str) -> dict[str, Any]:
  options = dict(part["model"])
  folder, name = options.pop(_PUBLISHED), str(part.get("model_name"))
  module = find_module("models", name, f"{path}.model_name")
  key = f"{path}.model.{_PUBLISHED}"
  if not hasattr(module, "published_fields"):
    raise settings.ConfigError(
      f"{key}: the model {name!r} takes no sizes from a folder."
    )
  if options.get("variant") is not None:
    raise settings.ConfigError(
      f"{path}.model.variant={options['variant']!r}: expected none beside "
      f"{key}, which gives all sizes."
    )
  init = part.get("model_init")
  allowed = lambda key: init.get(key, ()) if isinstance(init, dict) else ()
  fields = module.published_fields(folder, allowed("allow_unread"))
  if fields is None:
    raise settings.ConfigError(
      f"{key}: expected the folder of a published model, with a config.json, "
      f"got {folder!r}."
    )
  return fields.merge(options, allowed("allow_changed"), f"{path}.model")


class ClassCount(int):
  """Number of classes of a feature with class numbers, or vectors over them."""

  key: str  # Of the config: the number, or the names of the classes.

  def __new__(
    cls, value: int, key: str = "config.model.num_classes"
  ) -> "ClassCount":
    result = super().__new__(cls, value)
    result.key = key
    return result


def vocab_sizes(task: Any, model: Any) -> dict[str, int]:
  """{feature of a batch: number of ids that the model takes, or ClassCount}."""
  sizes = task.vocab_sizes(model) if hasattr(task, "vocab_sizes") else {}
  if hasattr(task, "class_counts"):
    counts = task.class_counts(model)
    sizes = sizes | {name: ClassCount(n) for name, n in counts.items()}
  return sizes


class Features(dict[str, Any]):
  """A batch for tasks and evaluators; a missing feature is a ConfigError."""

  def __init__(
    self, batch: Mapping[str, Any] | Iterable[tuple[str, Any]], path: str
  ):
    super().__init__(batch)
    self.path = path

  def __missing__(self, name: str) -> Any:
    features = [feature for feature in self if not feature.startswith("_")]
    raise settings.ConfigError(
      f"{self.path}: after pp, the examples have no feature {name!r}."
      f"{settings.did_you_mean(name, features)}"
    )


def _flatten(features: Features) -> tuple[list[tuple[Any, Any]], Any]:
  names = tuple(sorted(features))
  children = [(jax.tree_util.DictKey(name), features[name]) for name in names]
  return children, (names, features.path)


# jax takes an unregistered subclass of dict for a leaf.
jax.tree_util.register_pytree_with_keys(
  Features, _flatten, lambda aux, values: Features(zip(aux[0], values), aux[1])
)


def predict_fns(
  config: settings.Config, task: Any, model: Any, teacher: Any = None
) -> Mapping[str, Callable[..., Any]]:
  """The task's functions; with config.flexi also such as "logits_seqhw=8"."""
  takes_one = "teacher" in inspect.signature(task.predict_fns).parameters
  given = {"teacher": teacher} if takes_one else {}
  fns = dict(task.predict_fns(model, **given))
  for variant in variants(config, model) if config.get("flexi") else ():
    of_variant = task.predict_fns(variant.model, **given)
    fns |= {f"{name}_{variant.name}": fn for name, fn in of_variant.items()}
  return fns


def loss_fn(
  config: settings.Config, task: Any, model: Any, teacher: Any = None
) -> Callable[[Any, Any, Any], Any]:
  """Binds config.loss: (variables, batch, rng) -> (metrics, mutable)."""
  options = config.kwargs("loss")
  given = {} if teacher is None else {"teacher": teacher}
  parameters = inspect.signature(task.loss_fn).parameters
  parameter = parameters.get("teacher")
  if parameter and parameter.default is parameter.empty and teacher is None:
    raise settings.ConfigError(
      f"config.teacher: missing: config.task={config.task!r} needs "
      "dict(model_name=..., model=..., model_init=...)."
    )
  several = isinstance(teacher, dict)  # By name.
  takes = {"distill", "weights"} if several else {"teacher"}
  if given and not takes & {*parameters}:
    raise settings.ConfigError(
      f"config.teacher: config.task={config.task!r} does not use a teacher, or "
      "several; 'distillation' and 'language_modeling' do."
    )
  settings.check_kwargs(task.loss_fn, options, "config.loss", given=_GIVEN)

  def bound_loss_fn(variables: Any, batch: Any, rng: Any) -> Any:
    batch = Features(batch, "config.input")
    own = {**options, **given, "model": model, "train": True}
    with no_logical_axes():
      result = task.loss_fn(variables, batch, rng, **own)
    for each in (model, *jax.tree.leaves(given)):
      _layers("quantized").check(each)
    _layers("lora").check(model)
    return result

  return bound_loss_fn
