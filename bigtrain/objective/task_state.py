"""State of a task: teachers that follow the student, centres, queues.

A task that needs state besides the parameters defines a tree of arrays and how
a step changes it:

  def init_state(params, *, model, **options): ...
  def update_state(state, *, params, sums, model, **options): ...

Each function gets the keyword arguments that it names. `options` are options of
the loss, which may follow a schedule. `params` are all parameters: the initial
ones, or those after the update. The loss gets the tree as its argument `state`.
Among its mutable collections, the loss may return "task_sums", a tree that is
added up over the microbatches of a step, such as the sum of a teacher's
outputs; `update_state` gets it as `sums`.

The train state has the trees in "tasks", by name if there are several tasks.
They are sharded, saved and restored like parameters. If a task begins later,
its state is initialised again at its first step, from the parameters of that
step.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays import trees
from bigtrain.arrays.types import Params
from bigtrain.config import piecewise
from bigtrain.config.errors import ConfigError, check_kwargs
from bigtrain.objective.task_sum import Entry

_GIVEN = ("state", "params", "sums", "model", "values")
# Functions of a task, beside its loss, that take options of it.
_FUNCTIONS = ("init_state", "update_state", "problem")


class StateFns(NamedTuple):
  """The functions of a task's state, with the options of its loss."""

  # (parameters, options that follow a schedule) -> state.
  init: Callable[[Params, Mapping[str, Any]], Any]
  # (state, parameters, sums of the step, such options) -> state.
  update: Callable[[Any, Params, Any, Mapping[str, Any]], Any]


def option_names(task: Any) -> set[str]:
  """Options of the loss that the task's other functions have as arguments."""
  names: set[str] = set()
  for function in _FUNCTIONS:
    if hasattr(task, function):
      names |= inspect.signature(getattr(task, function)).parameters.keys()
  return names - set(_GIVEN)


def of_task(entry: Entry, model: Any) -> StateFns | None:
  """The functions of a task's state; None if it has none."""
  task = entry.module
  if not hasattr(task, "init_state"):
    return None
  if not hasattr(task, "update_state"):
    raise ConfigError(f"{task.__name__}: has init_state and no update_state.")
  options = entry.part.kwargs("loss")
  fixed = {k: x for k, x in options.items() if not piecewise.is_schedule(x)}
  for fn in (task.init_state, task.update_state):
    check_kwargs(fn, _named(fn, options), entry.loss_key, given=_GIVEN)

  def init(params: Params, changing: Mapping[str, Any]) -> Any:
    given = {**fixed, **changing, "model": model}
    made = task.init_state(params, **_named(task.init_state, given))
    # Copies, because the update overwrites the parameters in place.
    return jax.tree.map(lambda x: jnp.array(x, copy=True), made)

  def update(
    state: Any, params: Params, sums: Any, changing: Mapping[str, Any]
  ) -> Any:
    given = {**fixed, **changing, "params": params, "sums": sums}
    given["model"] = model
    new = task.update_state(state, **_named(task.update_state, given))
    _check_same(entry, state, new)
    return jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

  return StateFns(init, update)


def options_of(
  entry: Entry, fn: Callable[..., Any], model: Any
) -> dict[str, Any]:
  """The constant options of the loss that a function names, and the model."""
  options = entry.part.kwargs("loss")
  check_kwargs(fn, _named(fn, options), entry.loss_key, given=_GIVEN)
  fixed = {k: x for k, x in options.items() if not piecewise.is_schedule(x)}
  return _named(fn, {**fixed, "model": model})


def _named(
  fn: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
  parameters = inspect.signature(fn).parameters
  return {name: x for name, x in options.items() if name in parameters}


def check_teacher(entry: Entry, state: Any, params: Params) -> None:
  """Raises ConfigError unless a state's "teacher" has parameters' shapes.

  Evaluations may use it in place of the parameters: `weights="teacher"`.
  """
  if not isinstance(state, Mapping) or "teacher" not in state:
    return
  shapes = {name: x.shape for name, x in trees.flatten_with_names(params)}
  if not jax.tree.leaves(state["teacher"]):
    raise ConfigError(
      f"{entry.loss_key}: the teacher has no parameters: none of the model's "
      f"{len(shapes)} was chosen, such as {next(iter(shapes))}."
    )
  for name, x in trees.flatten_with_names(state["teacher"]):
    if name not in shapes:
      raise ConfigError(
        f"{entry.loss_key}: the teacher has {name}, but the student has no "
        f"such parameter; expected a name such as {next(iter(shapes))}."
      )
    if x.shape != shapes[name]:
      raise ConfigError(
        f"{entry.loss_key}: the teacher's {name} has the shape {x.shape}, the "
        f"student's {shapes[name]}."
      )


def _check_same(entry: Entry, old: Any, new: Any) -> None:
  name = f"{entry.module.__name__}.update_state"
  before = {k: jnp.shape(x) for k, x in trees.flatten_with_names(old)}
  after = {k: jnp.shape(x) for k, x in trees.flatten_with_names(new)}
  if before != after:
    differ = sorted(
      k for k in before.keys() | after.keys() if before.get(k) != after.get(k)
    )
    raise ConfigError(
      f"{name}: expected the arrays of init_state, but {differ[0]} is "
      f"{after.get(differ[0], 'missing')}, not "
      f"{before.get(differ[0], 'there')}."
    )
