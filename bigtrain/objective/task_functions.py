"""The functions of a task, bound to the model and the options of a config.

A task is a module of pure functions, see bigtrain/tasks. This module passes
config.loss to its `loss_fn`, the model to its `predict_fns`, and a teacher to
both if there is one.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from bigtrain.arrays.types import (
  TASK,
  Batch,
  ClassCount,
  LossFn,
  Metrics,
  PredictFn,
  Variables,
)
from bigtrain.config import piecewise
from bigtrain.config.errors import ConfigError, check_kwargs
from bigtrain.config.settings import Config
from bigtrain.inputs.named_features import Features
from bigtrain.models.layers import lora, quantized
from bigtrain.objective import logical_axes, model_variants, task_state

# Arguments of a task's loss_fn that the program passes; config.loss has others.
_GIVEN = (
  "variables",
  "batch",
  "rng",
  "model",
  "teacher",
  "train",
  "state",
  "log_step",
)


def vocab_sizes(task: Any, model: Any) -> dict[str, int]:
  """Returns {feature of a batch: number of ids that the model accepts}.

  The number is a ClassCount where the ids are class numbers.
  """
  sizes = task.vocab_sizes(model) if hasattr(task, "vocab_sizes") else {}
  if hasattr(task, "class_counts"):
    counts = task.class_counts(model)
    sizes = sizes | {name: ClassCount(n) for name, n in counts.items()}
  return sizes


def loss_fn(
  config: Config,
  task: Any,
  model: Any,
  teacher: Any = None,
  input_key: str = "config.input",
) -> LossFn:
  """Binds the loss's options: (variables, batch, rng) -> (metrics, mutable).

  Args:
    config: has the options as "loss": the whole config, or with several tasks
      the part of this one.
    teacher: a model, or several as a dict by name; None without config.teacher.
    input_key: location of the input in the config, for messages.
  """
  options = config.kwargs("loss")
  key = f"{config.path}.loss"
  _check_teacher(config, task, teacher)
  # Some options are only for the functions of the task's state.
  names = inspect.signature(task.loss_fn).parameters
  others = task_state.option_names(task) - set(names)
  own = {name: x for name, x in options.items() if name not in others}
  check_kwargs(task.loss_fn, own, key, given=_GIVEN, others=others)
  fixed = {k: x for k, x in fixed_options(config).items() if k in own}
  if teacher is not None:
    fixed["teacher"] = teacher

  def bound_loss_fn(
    variables: Variables, batch: Batch, rng: Any
  ) -> tuple[Metrics, Variables]:
    variables, changing = split_task(variables, task.loss_fn)
    features = Features(batch, input_key)
    with logical_axes.no_logical_axes(), _naming(key, options):
      result = task.loss_fn(
        variables, features, rng, model=model, train=True, **fixed, **changing
      )
    # Only now is it known whether rules for layers have matched any layer.
    for each in (model, *jax.tree.leaves(teacher)):
      quantized.check(each)
    lora.check(model)
    return result

  return bound_loss_fn


@contextlib.contextmanager
def _naming(key: str, options: Mapping[str, Any]) -> Iterator[None]:
  """Makes the errors of a loss name its key, which they call config.loss.

  Args:
    key: of the loss's options, such as "config.task.distill.loss".
  """
  try:
    yield
  except ConfigError as e:
    raise type(e)(re.sub(r"config\.loss\b", key, str(e))) from e
  except jax.errors.ConcretizationTypeError as e:
    scheduled = [k for k, x in options.items() if piecewise.is_schedule(x)]
    if not scheduled:
      raise
    raise ConfigError(
      f"{key}.{' and '.join(scheduled)}: the loss needs one number for all "
      "steps, not a schedule."
    ) from e


def fixed_options(config: Config) -> dict[str, Any]:
  """The options of a loss that do not follow a schedule."""
  options = config.kwargs("loss")
  return {k: x for k, x in options.items() if not piecewise.is_schedule(x)}


def split_task(
  variables: Variables, fn: Callable[..., Any]
) -> tuple[Variables, dict[str, Any]]:
  """Splits a step's state into the model's variables and other arguments.

  The other arguments are options that follow a schedule and the task's state.
  """
  variables = dict(variables)
  changing: Mapping[str, Any] = variables.pop(TASK, {})
  names = inspect.signature(fn).parameters
  takes_any = any(p.kind == p.VAR_KEYWORD for p in names.values())
  return variables, {
    name: x for name, x in changing.items() if takes_any or name in names
  }


def uses_teacher(task: Any, teacher: Any) -> bool:
  """Whether the task's loss has an argument for one or several teachers."""
  # With several teachers, a task has `weights` or a list of what to distill.
  several = isinstance(teacher, dict)
  expected = {"distill", "weights"} if several else {"teacher"}
  return bool(expected & inspect.signature(task.loss_fn).parameters.keys())


def _check_teacher(config: Config, task: Any, teacher: Any) -> None:
  """Raises ConfigError if a teacher is missing, or not used."""
  parameters = inspect.signature(task.loss_fn).parameters
  required = (
    "teacher" in parameters
    and parameters["teacher"].default is inspect.Parameter.empty
  )
  name = task.__name__.rpartition(".")[2]
  if required and teacher is None:
    raise ConfigError(
      f"config.teacher: missing: config.task={name!r} needs "
      "dict(model_name=..., model=..., model_init=...)."
    )
  if teacher is not None and not uses_teacher(task, teacher):
    raise ConfigError(
      f"config.teacher: config.task={name!r} does not use a teacher, or "
      "several; 'distillation' and 'language_modeling' do, and 'contrastive' "
      "with config.select."
    )


def predict_fns(
  config: Config, task: Any, model: Any, teacher: Any = None
) -> Mapping[str, PredictFn]:
  """The task's functions; with config.flexi also such as "logits_seqhw=8"."""
  parameters = inspect.signature(task.predict_fns).parameters
  options = {"teacher": teacher} if "teacher" in parameters else {}
  fns = dict(task.predict_fns(model, **options))
  if config.get("flexi"):
    for variant in model_variants.from_config(config, model):
      for name, fn in task.predict_fns(variant.model, **options).items():
        fns[f"{name}_{variant.name}"] = fn
  return fns
