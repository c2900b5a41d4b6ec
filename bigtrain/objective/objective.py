"""The objective of a run: everything that the program knows about learning.

A config names one or several tasks, a model, and perhaps a teacher, adapters of
a frozen base, or fields of the model that each step draws. Here they become one
object, which gives main the initial variables, the gradients, and the predict
functions:

  objective = from_config(config, train_input, mesh, seed, units)
  variables = objective.init(seed)
  gradients_fn = objective.gradients_fn(trainable)

The other modules of this package build the parts; each can be read on its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import (
  Batch,
  GradientsFn,
  LossFn,
  Metrics,
  PredictFn,
  TrainState,
  Variables,
)
from bigtrain.config import lengths
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.models.layers.attention_logits import STEP_LARGEST
from bigtrain.objective import (
  activations,
  building,
  frozen_base,
  gradients,
  initial,
  microbatching,
  model_variants,
  new_rows,
  qk_clip,
  rollouts,
  selection,
  task_functions,
  task_gradients,
  task_schedule,
  task_state,
  task_sum,
  teacher,
)
from bigtrain.objective.frozen_base import Base
from bigtrain.objective.initial import InitialVariables
from bigtrain.objective.model_variants import Variant
from bigtrain.objective.new_rows import TrainedRows
from bigtrain.objective.qk_clip import QkClip
from bigtrain.objective.selection import Selection
from bigtrain.objective.task_gradients import TASKS
from bigtrain.objective.task_state import StateFns
from bigtrain.objective.task_sum import Entry, TaskSum
from bigtrain.objective.teacher import Teacher
from bigtrain.optim import ema, several, views
from bigtrain.optim.views import View
from bigtrain.reports import flops
from bigtrain.runtime import debugging
from bigtrain.step import frozen


class TaskLoss(NamedTuple):
  """The loss of one task."""

  entry: Entry
  loss_fns: Sequence[LossFn]  # By variant of the model.
  stats_fns: Sequence[LossFn]  # With activation statistics, by variant, if any.
  is_taught: bool  # Whether it gets the teacher.
  state_fns: StateFns | None  # None if the task has no state.
  selection: Selection | None  # Chooses the examples; None to use all.


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """What a run learns. Specs are trees of ShapeDtypeStructs with shardings."""

  config: Config
  train_input: TrainInput
  mesh: Mesh
  task: Any  # The module of config.task, or a TaskSum of several.
  model_module: Any  # The module of config.model_name.
  model: Any  # Its Model, with config.model.
  vocab_sizes: Mapping[str, int]  # Number of ids that the model takes.
  variants: Sequence[Variant]  # The models that steps draw from: one or more.
  losses: Sequence[TaskLoss]  # Of each task.
  schedule: task_schedule.Schedule  # Which tasks a step has.
  teacher: Teacher
  base: Base  # The frozen base of adapters.
  qk_clip: QkClip | None  # Clips queries and keys after the optimizer.
  init: InitialVariables
  sharding_rules: sharding.Rules  # Of the train state, as the model wants it.
  variables_spec: TrainState  # The parts of the train state that losses use.

  @functools.cached_property
  def params_spec(self) -> Any:
    """Shapes of the parameters, without shardings."""
    return self.init.spec()["params"]

  @functools.cached_property
  def param_views(self) -> dict[str, View]:
    """The meaning of each parameter's dimensions, for optimizers."""
    return views.of_model(self.model_module, self.model, self.params_spec)

  @functools.cached_property
  def param_dims(self) -> dims.Table:
    return dims.of_model(self.model_module, self.model)

  @functools.cached_property
  def trained_rows(self) -> TrainedRows:
    """Rows of embedding and head that train, if only some do."""
    return new_rows.trained_rows(self.config, self.params_spec)

  @functools.cached_property
  def predict_fns(self) -> Mapping[str, PredictFn]:
    """The task's predict functions by name, for evaluators and hooks."""
    return task_functions.predict_fns(
      self.config, self.task, self.model, self.teacher.model
    )

  # Steps read these variables and never change them. They are loaded at every
  # start, and checkpoints leave them out.

  @property
  def frozen_spec(self) -> dict[str, Any]:
    return {**self.teacher.spec, **self.base.spec}

  def load_frozen(self) -> dict[str, Variables]:
    """Loads the teacher's variables and the base, as "teacher" and "base"."""
    return {**self.teacher.load(), **self.base.load()}

  # A task may replace the input's batches by its own, such as answers that the
  # model has just written.

  @functools.cached_property
  def rollout(self) -> rollouts.Rollout:
    """Makes the batch of an update from the input's batch."""
    variables_spec = frozen.model_variables(
      {**self.variables_spec, **self.frozen_spec}
    )
    return rollouts.Rollout(
      self.config,
      self.task,
      self.model,
      self.train_input,
      variables_spec,
      self.mesh,
    )

  @property
  def batch_spec(self) -> Any:
    """The batch of an update; the largest one, if steps draw its size."""
    return self.rollout.spec

  def step_specs(
    self, hparams_of: Callable[[int], Mapping[str, Any]]
  ) -> list[tuple[Any, Any]]:
    """Specs of (batch, hparams) of all steps that differ in them.

    Steps differ in their tasks, and in the size of the batch if they draw it.
    The largest come last.

    Args:
      hparams_of: step -> all scalars of the update.
    """
    layout = sharding.replicated(self.mesh)
    result = []
    for step in self.schedule.kinds:
      hparams = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        dict(hparams_of(step)),
      )
      batches = [
        self.train_input.spec_at(step, spec) for spec, _ in self.rollout.drawn
      ]
      batches.sort(key=lambda spec: trees.num_bytes(spec.values()))
      result += [(batch, hparams) for batch in batches]
    return result

  def hparams(self, step: int) -> dict[str, Any]:
    """Weights of a step's tasks, and options that follow a schedule."""
    return self.schedule.hparams(step)

  # The loss and its gradients.

  def gradients_fn(self, trainable: Any) -> GradientsFn:
    """Returns the function (state, batch) -> (gradients, metrics, mutable).

    Its `state` is the train state with the frozen variables and the hparams of
    the step, see objective/gradients.py.

    Args:
      trainable: tree of bools with the structure of the parameters.
    """
    if self.qk_clip is not None:
      trained, _ = trees.partition(self.params_spec, trainable)
      for loss in self.losses:
        logits = self._logits_spec(loss)
        jax.eval_shape(self.qk_clip.clipped, trained, trained, logits)
    computes = []
    for i in range(len(self.variants)):
      summands = [self._summand(loss, i, trainable) for loss in self.losses]
      if self._is_sum:
        computes.append(task_gradients.add_up(summands, trainable))
      else:
        computes.append(summands[0].compute)
    return gradients.of_step(
      self.config,
      self.variants,
      computes,
      trainable,
      self.trained_rows.masked,
    )

  def _summand(
    self, loss: TaskLoss, variant: int, trainable: Any
  ) -> task_gradients.Summand:
    entry = loss.entry
    batch_size = self.config.input.batch_size
    if entry.has_input:
      batch_size = entry.part.input.batch_size
    if loss.selection is not None:
      batch_size = loss.selection.number
    if entry.optimizer is not None:
      own = several.members(self.config, self.params_spec)[entry.optimizer]
      trainable = jax.tree.map(lambda a, b: a and b, trainable, own)
    compute = gradients.of_task(
      entry.module,
      self.variants[variant].model,
      loss.loss_fns[variant],
      task_functions.fixed_options(entry.part),
      stats_fn=loss.stats_fns[variant] if loss.stats_fns else None,
      trainable=trainable,
      mesh=self.mesh,
      microbatches=microbatching.read(self.config, batch_size, self.mesh),
    )

    def compute_own(state: Any, batch: Batch) -> Any:
      task_state = self._task_state(loss, state)
      own_state = task_gradients.of_task(
        entry, state, loss.is_taught, task_state
      )
      selected: Metrics = {}
      if loss.selection is not None:
        batch, selected = loss.selection(state, batch, variant)
      grads, sums, mutable = compute(own_state, batch)
      sums = {**sums, **selected}
      if task_state is None:
        return grads, sums, mutable
      mutable = dict(mutable)
      task_sums = mutable.pop(gradients.TASK_SUMS, {})
      result = task_gradients.TaskResult(task_state, task_sums)
      return grads, sums, {**mutable, TASKS: {entry.name: result}}

    return task_gradients.Summand(
      entry,
      compute_own,
      lambda: self._metrics_spec(loss),
      self.schedule.is_occasional(entry.name),
    )

  # The state of tasks, such as teachers that follow the student.

  def init_task_state(self, params: Any) -> dict[str, Any]:
    """Returns {"tasks": ...}, or {} if no task has a state."""
    states = {}
    for loss in self.losses:
      if loss.state_fns:
        name = loss.entry.name
        options = self.schedule.options(name)
        states[name] = loss.state_fns.init(params, options)
    if not states:
      return {}
    return {TASKS: states if self._is_sum else states[""]}

  @functools.cached_property
  def _task_specs(self) -> dict[str, Any]:
    """Specs of the tasks' states by name, with shardings."""
    shapes = jax.eval_shape(self.init_task_state, self.params_spec)
    specs = sharding.state_spec(shapes, self.mesh, self.sharding_rules)
    by_name = specs.get(TASKS, {}) if self._is_sum else {"": specs.get(TASKS)}
    for loss in self.losses:
      state = by_name.get(loss.entry.name)
      task_state.check_teacher(loss.entry, state, self.params_spec)
    return by_name

  def _task_state(self, loss: TaskLoss, state: Any) -> Any:
    """A task's state in a step; in the task's first step it is new."""
    if loss.state_fns is None:
      return None
    name = loss.entry.name
    init = loss.state_fns.init
    old = state[TASKS][name] if self._is_sum else state[TASKS]
    if not self.schedule.first_step(name):
      return old
    options = state.get(task_schedule.OPTIONS, {}).get(name, {})
    return jax.lax.cond(
      state["step"] == self.schedule.first_step(name),
      lambda: init(state["params"], options),
      lambda: old,
    )

  def next_variables(
    self, state: TrainState, mutable: Any, params: Any, hparams: Any
  ) -> dict[str, Any]:
    """The entries "mutable" and "tasks" of the next state, where it has them.

    Args:
      state: the state before the step.
      mutable: the collections that the gradients returned.
      params: the parameters after the update.
      hparams: the hyperparameters of the step.
    """
    mutable = dict(mutable)
    mutable.pop(STEP_LARGEST, None)
    results = mutable.pop(TASKS, {})
    new = {"mutable": mutable} if "mutable" in state else {}
    if TASKS not in state:
      return new
    states = dict(state[TASKS]) if self._is_sum else {"": state[TASKS]}
    for loss in self.losses:
      name = loss.entry.name
      if loss.state_fns and name in results:
        options = hparams.get(task_schedule.OPTIONS, {}).get(name, {})
        states[name] = loss.state_fns.update(
          results[name].state, params, results[name].sums, options
        )
    return {**new, TASKS: states if self._is_sum else states[""]}

  @functools.cached_property
  def checks(self) -> dict[str, Callable[[Mapping[str, float]], str | None]]:
    """Functions that look at a log entry and say why to stop, by task."""
    result: dict[str, Callable[[Mapping[str, float]], str | None]] = {}
    for loss in self.losses:
      check = getattr(loss.entry.module, "problem", None)
      if check is not None:
        options = task_state.options_of(loss.entry, check, self.model)
        result[loss.entry.name] = functools.partial(check, **options)
    return result

  @property
  def _is_sum(self) -> bool:
    return isinstance(self.task, TaskSum)

  def metrics_spec(self) -> Metrics:
    """Traces the losses, to know which metrics a step has."""
    specs = [self._metrics_spec(loss) for loss in self.losses]
    result: Metrics = {}
    for loss in self.losses:
      result |= jax.eval_shape(qk_clip.logit_metrics, self._logits_spec(loss))
    if not self._is_sum:
      return {**specs[0], **result}
    for loss, spec in zip(self.losses, specs):
      is_occasional = self.schedule.is_occasional(loss.entry.name)
      result |= task_gradients.named(loss.entry, spec, is_occasional)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return {**result, "loss": (scalar, scalar)}

  def _metrics_spec(self, loss: TaskLoss) -> Metrics:
    # The loss with activation statistics, if there is one, has all metrics.
    loss_fn = loss.stats_fns[0] if loss.stats_fns else loss.loss_fns[0]
    spec, _ = self._loss_spec(loss_fn, loss)
    if loss.selection is None:
      return spec
    batch_spec = loss.entry.view(self.batch_spec)
    return {**spec, **loss.selection.metrics_spec(self._spec, batch_spec)}

  @property
  def _spec(self) -> TrainState:
    """What losses use of the state, and the frozen variables."""
    return {**self.variables_spec, **self.frozen_spec}

  def _logits_spec(self, loss: TaskLoss) -> Any:
    """The largest logits of attention that a loss returns; None if none."""
    _, mutable = self._loss_spec(loss.loss_fns[0], loss)
    logits = mutable.get(STEP_LARGEST)
    if self.qk_clip and logits is None:
      name = loss.entry.module.__name__.rpartition(".")[2]
      raise ConfigError(
        f"config.qk_clip: the task {name!r} returns no logits of attention; "
        "expected one such as 'language_modeling'."
      )
    return logits

  def _loss_spec(self, loss_fn: LossFn, loss: TaskLoss) -> Any:
    args = self._loss_args(self.batch_spec, loss)
    return jax.eval_shape(loss_fn, *args)

  @functools.cached_property
  def flops_per_step(self) -> int:
    """Model FLOPs of a step over all devices: the mean over what steps draw.

    For tasks that begin later, it is still the mean over all steps. Forward
    passes that choose examples count once.
    """
    total = 0.0
    for loss in self.losses:
      of_steps = self.schedule.share(loss.entry.name)
      for batch_spec, share in self.rollout.drawn:
        args = self._loss_args(batch_spec, loss)
        seen = loss.entry.view(batch_spec)
        for i, variant in enumerate(self.variants):
          one = flops.step_flops(loss.loss_fns[i], *args)
          if loss.selection is not None:
            one += loss.selection.flops(self._spec, seen, i)
          total += of_steps * variant.share * share * one
    return round(total)

  def _loss_args(self, batch_spec: Any, loss: TaskLoss) -> tuple[Any, Any, Any]:
    name = loss.entry.name
    options = {task_schedule.OPTIONS: {name: self.schedule.options(name)}}
    state = {**self.variables_spec, **options}
    args = task_gradients.loss_args(
      loss.entry,
      loss.is_taught,
      state,
      batch_spec,
      self.mesh,
      self.frozen_spec,
      self._task_specs.get(name),
    )
    if loss.selection is None:
      return args
    seen = loss.entry.view(batch_spec)
    return loss.selection.loss_args(args, self._spec, seen)


def from_config(
  config: Config,
  train_input: TrainInput,
  mesh: Mesh,
  seed: int,
  units: lengths.Units,
) -> Objective:
  """Builds what config.task, config.model_name and their like describe.

  From here on the input refuses ids that the model does not accept.

  Raises:
    ConfigError: for an unknown module, a wrong option, or a teacher that no
      task uses. Nothing is compiled yet.
  """
  task = building.task(config)
  entries = task_sum.entries(task, config)
  task_sum.check(entries, config, train_input.spec)
  model_module, model = building.model(config)
  clip, model = qk_clip.from_config(config, model)
  ids: dict[str, int] = {}
  for entry in entries:
    sizes = task_functions.vocab_sizes(entry.module, model)
    task_sum.add_sizes(ids, entry.named_as_in_batch(sizes))
  train_input.limit_ids(ids)
  if hasattr(model, "check_data"):
    model.check_data(train_input.saved["data"], train_input.spec)
  batch_spec = sharding.batch_spec(train_input.spec, mesh)
  teaching, taught = teacher.of_tasks(config, entries, batch_spec, mesh, seed)
  variants = model_variants.from_config(config, model)
  losses = []
  for entry in entries:
    chosen = selection.from_config(
      config, entry, [v.model for v in variants], teaching, batch_spec, mesh
    )
    # A teacher that chooses examples is not used by the loss.
    is_taught = entry in taught and chosen is None
    losses.append(
      _loss(config, entry, variants, teaching.model, is_taught, chosen)
    )
  init = initial.variables_fn(task, model, batch_spec, seed)
  rules = initial.sharding_rules(config, init, model_module, model)
  variables_spec = _variables_spec(config, init, rules, mesh)
  base = frozen_base.from_config(
    config, model_module, model, init, variables_spec, rules, mesh
  )
  return Objective(
    config=config,
    train_input=train_input,
    mesh=mesh,
    task=task,
    model_module=model_module,
    model=model,
    vocab_sizes=task_functions.vocab_sizes(task, model),
    variants=variants,
    losses=losses,
    schedule=task_schedule.from_config(entries, units, several.turns(config)),
    teacher=teaching,
    base=base,
    qk_clip=clip,
    init=init,
    sharding_rules=rules,
    variables_spec=variables_spec,
  )


def _loss(
  config: Config,
  entry: Entry,
  variants: Sequence[Variant],
  teacher_model: Any,
  is_taught: bool,
  chosen: Selection | None,
) -> TaskLoss:
  if not is_taught:
    teacher_model = None
  loss_fns = []
  for variant in variants:
    loss_fn = task_functions.loss_fn(
      entry.part, entry.module, variant.model, teacher_model, entry.input_key
    )
    # Jitted, so that metrics, FLOPs and gradients share one trace.
    loss_fns.append(jax.jit(debugging.instrument(config, loss_fn)))
  stats_fns = activations.loss_fns(config, entry, variants, teacher_model)
  state_fns = task_state.of_task(entry, variants[0].model)
  return TaskLoss(entry, loss_fns, stats_fns, is_taught, state_fns, chosen)


def _variables_spec(
  config: Config, init: InitialVariables, rules: sharding.Rules, mesh: Mesh
) -> TrainState:
  """The entries "params", "mutable" and "ema" of a train state."""
  mutable = init.spec()
  params = mutable.pop("params")
  shapes = {"params": params}
  if mutable:
    shapes["mutable"] = mutable
  if ema.is_used(config):  # The average may be the teacher.
    shapes["ema"] = jax.eval_shape(ema.init, params)
  # The notes of this function are logged when the whole state is placed.
  shardings, _ = sharding.state_shardings(shapes, mesh, rules)
  return sharding.with_shardings(shapes, shardings)
