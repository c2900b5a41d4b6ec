"""Finds the task, the model and other parts that a config names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from bigtrain.arrays.types import ClassCount
from bigtrain.config import choices, flexi, settings
from bigtrain.config.errors import ConfigError, check_kwargs
from bigtrain.config.modules import find_module
from bigtrain.inputs.named_features import Features
from bigtrain.models.layers import lora, quantized
from bigtrain.objective import logical_axes
from bigtrain.objective.published_sizes import PUBLISHED

# Arguments of a task's loss_fn that the program passes.
_GIVEN = ("variables", "batch", "rng", "model", "teacher", "train")


def task(config: settings.Config) -> Any:
  return find_module("tasks", config.task, "config.task")


def model(config: settings.Config) -> tuple[Any, Any]:
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
  if rules := logical_axes.logical_axes(config):
    cls = logical_axes.with_rules(cls, f"{config.path}.logical_axes", rules)
  # A teacher has none, so there the key is an error.
  if config.path == "config" and config.get("adapters"):
    given = config.kwargs("adapters")
    module, cls = lora.adapted(module, cls, given, "config.adapters")
  if rules := config.get("quantize"):  # Outermost, so that adapters are not.
    cls = quantized.model(cls, rules, f"{config.path}.quantize")
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
    for fields, share in flexi.draws(config, names)
  ]


def vocab_sizes(task: Any, model: Any) -> dict[str, int]:
  """{feature of a batch: number of ids that the model takes, or ClassCount}."""
  sizes = task.vocab_sizes(model) if hasattr(task, "vocab_sizes") else {}
  if hasattr(task, "class_counts"):
    counts = task.class_counts(model)
    sizes = sizes | {name: ClassCount(n) for name, n in counts.items()}
  return sizes


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
    raise ConfigError(
      f"config.teacher: missing: config.task={config.task!r} needs "
      "dict(model_name=..., model=..., model_init=...)."
    )
  several = isinstance(teacher, dict)  # By name.
  takes = {"distill", "weights"} if several else {"teacher"}
  if given and not takes & {*parameters}:
    raise ConfigError(
      f"config.teacher: config.task={config.task!r} does not use a teacher, or "
      "several; 'distillation' and 'language_modeling' do."
    )
  check_kwargs(task.loss_fn, options, "config.loss", given=_GIVEN)

  def bound_loss_fn(variables: Any, batch: Any, rng: Any) -> Any:
    batch = Features(batch, "config.input")
    own = {**options, **given, "model": model, "train": True}
    with logical_axes.no_logical_axes():
      result = task.loss_fn(variables, batch, rng, **own)
    for each in (model, *jax.tree.leaves(given)):
      quantized.check(each)
    lora.check(model)
    return result

  return bound_loss_fn
