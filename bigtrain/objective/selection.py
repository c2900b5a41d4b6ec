"""Choosing what to learn from, inside the step: config.select.

A task may learn from a part of its batch (JEST, arXiv 2406.17711; ACID,
2411.18674). The model that learns and a frozen reference, config.teacher, embed
the whole batch without gradients, the task chooses examples by both results,
and the gradients are those of the chosen examples alone.

Such a task has the predict function "embed", and a function `select(learner,
reference, batch, key, *, number, ...)`: see tasks/contrastive.py.

The choice is over the global batch, and its random numbers depend only on the
seed and the step. So every mesh, and a resumed run, choose the same examples,
unless rounding decides between two that are almost equal.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bigtrain import metrics, sharding
from bigtrain.arrays.types import TASK, Batch, Metrics, Params, Variables
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
)
from bigtrain.config.settings import Config
from bigtrain.inputs.named_features import Features
from bigtrain.objective import logical_axes, microbatching, task_functions
from bigtrain.objective.task_sum import Entry
from bigtrain.objective.teacher import Teacher
from bigtrain.reports import flops
from bigtrain.step import frozen, keys

KEY = "select"
# The image that the reference sees, if it is not that of the learner.
_TEACHER_IMAGE = "teacher_image"
# Folded into the key of a step. Examples and microbatches fold in their
# numbers, which are smaller.
_STREAM = 0x5E1EC7ED
# Arguments of a task's `select` that are not in config.select: those that the
# program passes, and options of the loss.
_GIVEN = (
  "learner",
  "reference",
  "batch",
  "key",
  "number",
  "kind",
  "distill_weight",
)

_SelectFn = Callable[..., tuple[Batch, Metrics]]


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
  """The selection of one task.

  Its methods take the state of a step with the frozen variables, and the task's
  batch; or the specs of both.
  """

  number: int  # Of chosen examples.
  # By variant of the model: (variables, reference's variables, batch, key) ->
  # (chosen batch, metrics).
  select_fns: Sequence[_SelectFn]

  def __call__(
    self, state: Any, batch: Batch, variant: int
  ) -> tuple[Batch, Metrics]:
    """The chosen part of a batch, and metrics of the choice."""
    key = keys.step_key(state.get("seed", 0), state["step"])
    key = jax.random.fold_in(key, _STREAM)
    return self.select_fns[variant](*_variables(state), batch, key)

  def metrics_spec(self, state: Any, batch: Batch) -> Metrics:
    args = _spec_args(state, batch)
    return jax.eval_shape(self.select_fns[0], *args)[1]

  def flops(self, state: Any, batch: Batch, variant: int) -> int:
    """Model FLOPs of forward passes of both models, and of scores."""
    return flops.forward_flops(
      self.select_fns[variant], *_spec_args(state, batch)
    )

  def loss_args(
    self, args: tuple[Any, Any, Any], state: Any, batch: Batch
  ) -> tuple[Any, Any, Any]:
    """Specs of the loss's arguments, with the chosen part of the batch."""
    variables, whole_spec, rng = args
    chosen, _ = jax.eval_shape(self.select_fns[0], *_spec_args(state, batch))
    keys_spec = whole_spec["_keys"]
    shapes = {name: (x.shape, x.dtype) for name, x in chosen.items()}
    shapes["_keys"] = (self.number,), keys_spec.dtype
    chosen_spec = {
      name: jax.ShapeDtypeStruct(shape, dtype, sharding=keys_spec.sharding)
      for name, (shape, dtype) in shapes.items()
    }
    return variables, chosen_spec, rng


def is_used(entry: Entry) -> bool:
  return bool(entry.part.get(KEY))


def from_config(
  config: Config,
  entry: Entry,
  models: Sequence[Any],
  teacher: Teacher,
  batch_spec: Mapping[str, Any],
  mesh: Mesh,
) -> Selection | None:
  """Reads config.select, or that of a task; None if it is not set.

  Args:
    models: the variants of the model that learns.
    batch_spec: specs of the batch of a step.
  """
  if not is_used(entry):
    return None
  path = f"{entry.part.path}.{KEY}"
  options = entry.part.kwargs(KEY)
  keep = check_number(
    f"{path}.keep", options.pop("keep", None), above=0, below=1
  )
  report = options.pop("report", ())
  _check_task(config, entry, options, path)
  _check_teacher(entry, teacher)
  batch_spec = entry.view(batch_spec)
  _check_report(report, batch_spec, path)
  batch_size = len(next(iter(batch_spec.values())))
  number = _number(keep, batch_size, path, mesh)
  microbatches = microbatching.read(config, number, mesh)
  microbatching.check(batch_size, microbatches, mesh)
  embed = functools.partial(_embed, entry, microbatches, mesh)
  _check_reference(entry, embed, models[0], teacher, batch_spec)
  names = inspect.signature(entry.module.select).parameters
  of_loss = {k: x for k, x in entry.part.kwargs("loss").items() if k in names}
  choose = functools.partial(
    entry.module.select, number=number, **options, **of_loss
  )
  select_fns = [
    _select_fn(
      functools.partial(embed, model),
      functools.partial(embed, teacher.model),
      choose,
      report,
    )
    for model in models
  ]
  return Selection(number, select_fns)


# Mistakes in a config.


def _check_task(
  config: Config, entry: Entry, options: Mapping[str, Any], path: str
) -> None:
  task = entry.module.__name__.rpartition(".")[2]
  if not hasattr(entry.module, "select"):
    raise ConfigError(
      f"{path}: the task {task!r} cannot choose examples; expected "
      "'contrastive'."
    )
  check_kwargs(
    entry.module.select, options, path, given=_GIVEN, others=("keep", "report")
  )
  if config.get("gsam"):
    raise ConfigError(
      f"{path}: not with config.gsam, whose second gradient would choose "
      "other examples."
    )


def _check_teacher(entry: Entry, teacher: Teacher) -> None:
  path = f"{entry.part.path}.{KEY}"
  if teacher.model is None:
    raise ConfigError(
      f"config.teacher: missing: {path} needs a reference model, "
      "dict(model_name=..., model=..., model_init=...)."
    )
  if isinstance(teacher.model, Mapping) or not teacher.spec["teacher"]:
    raise ConfigError(
      f"config.teacher: {path} needs one frozen model, neither several nor "
      "the average of the model that learns."
    )


def _check_report(
  report: Any, batch_spec: Mapping[str, Any], path: str
) -> None:
  if not isinstance(report, list | tuple):
    raise ConfigError(
      f"{path}.report: expected a list of features, got {report!r}."
    )
  for name in report:
    check_choice(f"{path}.report", name, batch_spec, "no feature")
    if len(batch_spec[name].shape) != 1:
      raise ConfigError(
        f"{path}.report: expected features with one number for each example; "
        f"{name!r} has the shape {batch_spec[name].shape[1:]}."
      )


def _number(keep: float, batch_size: int, path: str, mesh: Mesh) -> int:
  """Number of chosen examples; ConfigError unless it divides."""
  number = round(keep * batch_size)
  ways = sharding.batch_ways(mesh)
  if abs(number - keep * batch_size) < 1e-6 and number % ways == 0:
    return number
  # All examples would leave nothing to choose.
  most = max(batch_size - ways, ways)
  nearest = min(max(round(keep * batch_size / ways), 1) * ways, most)
  raise ConfigError(
    f"{path}.keep={keep}: {keep * batch_size:g} of a batch of {batch_size} do "
    f"not divide among {ways} {'device' if ways == 1 else 'devices'}; the "
    f"nearest number that does is {nearest}, keep={nearest}/{batch_size}."
  )


def _check_reference(
  entry: Entry,
  embed: Callable[..., Any],
  model: Any,
  teacher: Teacher,
  batch_spec: Batch,
) -> None:
  """Raises ConfigError for a reference that cannot read the task's batch."""
  path = f"{entry.part.path}.{KEY}"
  vocab_size, expected = (
    task_functions.vocab_sizes(entry.module, x).get("labels")
    for x in (teacher.model, model)
  )
  if vocab_size != expected:
    raise ConfigError(
      f"config.teacher.model: takes {vocab_size} token ids, and config.model "
      f"{expected}; for {path} both need the same tokenizer."
    )
  of_reference = functools.partial(embed, teacher.model)
  seen = _seen_by_reference(batch_spec)
  try:
    _, shapes = jax.eval_shape(of_reference, teacher.spec["teacher"], seen)
  except (TypeError, ValueError) as e:
    raise ConfigError(
      "config.teacher.model: cannot read images of shape "
      f"{seen['image'].shape[1:]}; the feature {_TEACHER_IMAGE!r} may have "
      f"others for it. {e}"
    ) from e
  sizes = {name: x.shape[-1] for name, x in shapes.items()}
  if len({*sizes.values()}) > 1:
    raise ConfigError(
      "config.teacher.model.out_dim: expected embeddings of images and texts "
      f"of one size, got {sizes}."
    )


# The choice.


def _variables(state: Any) -> tuple[Variables, Variables]:
  """Variables of the model that learns, and of the reference."""
  variables = dict(frozen.model_variables(state))
  reference = variables.pop("teacher")
  variables.pop(TASK, None)
  return variables, reference


def _spec_args(state: Any, batch: Batch) -> tuple[Any, ...]:
  return *_variables(state), batch, jax.eval_shape(lambda: jax.random.key(0))


def _seen_by_reference(batch: Batch) -> Batch:
  return {**batch, "image": batch.get(_TEACHER_IMAGE, batch["image"])}


def _embed(
  entry: Entry,
  microbatches: int,
  mesh: Mesh,
  model: Any,
  variables: Variables,
  batch: Batch,
) -> tuple[Params, Any]:
  """A model's parameters, and its embeddings of the whole batch."""
  embed = entry.module.predict_fns(model)["embed"]

  def of_part(part: Batch) -> Any:
    with logical_axes.no_logical_axes():
      return embed(variables, Features(part, entry.input_key))

  params = {**variables.get("base", {}), **variables["params"]}
  if microbatches == 1:
    return params, of_part(batch)
  parts = microbatching.split(batch, microbatches, mesh)
  return params, microbatching.join(jax.lax.map(of_part, parts), mesh)


def _select_fn(
  embed_learner: Callable[..., Any],
  embed_reference: Callable[..., Any],
  choose: Callable[..., tuple[jax.Array, Batch, Metrics]],
  report: Sequence[str],
) -> _SelectFn:
  def select(
    variables: Variables, reference: Variables, batch: Batch, key: jax.Array
  ) -> tuple[Batch, Metrics]:
    seen = _seen_by_reference(batch)
    batch = {name: x for name, x in batch.items() if name != _TEACHER_IMAGE}
    chosen_n, features, result = choose(
      lambda: embed_learner(variables, batch),
      lambda: embed_reference(reference, seen),
      batch,
      key,
    )
    chosen = sharding.take({**batch, **features}, chosen_n)
    for name in report:
      for prefix, part in (("all", batch), ("selected", chosen)):
        weights = metrics.example_weights(part, part[name])
        result[f"{prefix}_{name}"] = metrics.pair(part[name], weights)
    return chosen, result

  # Jitted, so that metrics, FLOPs and gradients share one trace.
  return jax.jit(select)
