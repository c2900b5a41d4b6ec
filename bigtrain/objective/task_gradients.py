"""Gradients of a weighted sum of tasks.

The loss of a step is the sum of each task's mean loss times its weight. Its
gradient is the sum of the tasks' gradients, which are computed one after the
other, each in its own microbatches. So only one task's activations are in
memory at a time, and each loss is divided by its own total weight. If two tasks
call the model with the same inputs, XLA recognises equal operations and runs
them once, except in loops over layers or microbatches.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import (
  TASK,
  Batch,
  GradientsFn,
  Metrics,
  Params,
  Variables,
)
from bigtrain.objective import gradients, task_schedule
from bigtrain.objective.task_sum import Entry

# Entry of the train state with the tasks' states, and of the collections that
# gradients return: {task: TaskResult}.
TASKS = "tasks"


class TaskResult(NamedTuple):
  """Inputs of a task's `update_state`, besides the parameters."""

  state: Any  # The state in this step.
  sums: Any  # The totals of its `task_sums` over the step.


class Summand(NamedTuple):
  """A task and the gradients of its own loss, for one variant of the model.

  `compute` takes the state of a step and the task's batch.
  """

  entry: Entry
  compute: GradientsFn
  # Returns the shapes of its metrics, for steps without the task.
  metrics_spec: Callable[[], Metrics]
  is_occasional: bool  # Whether there are such steps.


def add_up(summands: Sequence[Summand], trainable: Any) -> GradientsFn:
  """The gradients of a step: its tasks' gradients, times their weights.

  A step has the tasks for which its hparams contain a weight. A parameter that
  no task trains has a gradient of zero.
  """

  def compute(state: Any, batch: Batch) -> tuple[Params, Metrics, Variables]:
    weights = state[task_schedule.WEIGHTS]
    mutable = state.get("mutable", {})
    total: dict[str, jax.Array] = {}  # The gradient by the parameters' names.
    loss: Any = 0.0
    all_metrics: Metrics = {}
    summed: Variables = {}  # The model's `step_sums` and the like.
    results: dict[str, Any] = {}  # Of tasks with state.
    for part in summands:
      name = part.entry.name
      if name not in weights:
        sums = jax.tree.map(
          lambda x: jnp.zeros(x.shape, x.dtype), part.metrics_spec()
        )
        all_metrics |= named(
          part.entry, sums, part.is_occasional, present=False
        )
        continue
      weight = weights[name]
      grads, sums, mutable = part.compute(
        {**state, "mutable": mutable}, part.entry.view(batch)
      )
      results |= mutable.pop(TASKS, {})
      mutable, new_summed = gradients.split_sums(mutable)
      summed = gradients.add_sums(summed, new_summed)
      for key, g in trees.flatten_with_names(grads):
        g = weight * g
        total[key] = total[key] + g if key in total else g
      loss += weight * (sums["loss"][0] / sums["loss"][1])
      all_metrics |= named(part.entry, sums, part.is_occasional)
    all_metrics["loss"] = loss, jnp.ones((), jnp.float32)
    trained, _ = trees.partition(state["params"], trainable)
    for key, x in trees.flatten_with_names(trained):
      total.setdefault(key, jnp.zeros(x.shape, jnp.float32))
    mutable = {**mutable, **summed}
    if results:
      mutable[TASKS] = results
    return trees.from_flat(total), all_metrics, mutable

  return compute


def named(
  entry: Entry, sums: Metrics, is_occasional: bool, present: bool = True
) -> Metrics:
  """Metrics under the task's name.

  Metrics of a task that not every step has are omitted from entries without it.
  """
  result = {entry.metric(name): x for name, x in sums.items()}
  if not is_occasional:
    return result
  # No array on a device: tools.plan compiles for devices that are not there.
  count = np.asarray(present, np.float32)
  return {name: metrics.Occasional(x, count) for name, x in result.items()}


def of_task(
  entry: Entry, state: Any, is_taught: bool, task_state: Any = None
) -> Any:
  """The state of a step, in the form that one task's loss expects.

  Args:
    is_taught: whether the loss uses the teacher.
    task_state: the task's own state, if it has one.
  """
  state = dict(state)
  if not is_taught:
    state.pop("teacher", None)
  changing = dict(state.get(task_schedule.OPTIONS, {}).get(entry.name, {}))
  if task_state is not None:
    changing["state"] = task_state
  if "log_step" in inspect.signature(entry.module.loss_fn).parameters:
    changing["log_step"] = state.get("log_step", np.bool_(True))
  if changing:
    state[TASK] = changing
  return state


def loss_args(
  entry: Entry,
  is_taught: bool,
  state: Any,
  batch_spec: Any,
  mesh: Mesh,
  frozen_spec: Variables,
  task_state: Any = None,
) -> tuple[Any, Any, Any]:
  """Specs of the arguments of a task's loss, see gradients.loss_args.

  Args:
    state: specs of the train state, and the hparams of a step with the task.
    batch_spec: of the batch of a step.
    task_state: spec of the task's own state, if it has one.
  """
  layout = sharding.replicated(mesh)
  state = {**state, **frozen_spec}
  state = of_task(entry, state, is_taught, task_state)
  if TASK in state:
    state[TASK] = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=getattr(x, "sharding", layout)
      ),
      state[TASK],
    )
  return gradients.loss_args(state, entry.view(batch_spec), mesh)
