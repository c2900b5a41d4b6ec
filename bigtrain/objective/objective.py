"""The objective of a run: all that the program knows of what is learned.

A config names a task and a model, and perhaps a teacher, adapters of a frozen
base, or fields of the model that each step draws. Here they become one object,
from which main takes initial variables, gradients, and functions that predict:

  objective = from_config(config, train_input, mesh, seed)
  variables = objective.init(seed)
  gradients_fn = objective.gradients_fn(trainable)

The parts are built by the modules beside this one; each can be read alone.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims
from bigtrain.arrays.types import (
  GradientsFn,
  LossFn,
  Metrics,
  PredictFn,
  TrainState,
  Variables,
)
from bigtrain.config.settings import Config
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.objective import (
  activations,
  building,
  frozen_base,
  gradients,
  initial,
  model_variants,
  new_rows,
  rollouts,
  task_functions,
  teacher,
)
from bigtrain.objective.frozen_base import Base
from bigtrain.objective.initial import InitialVariables
from bigtrain.objective.model_variants import Variant
from bigtrain.objective.new_rows import TrainedRows
from bigtrain.objective.teacher import Teacher
from bigtrain.optim import ema, views
from bigtrain.optim.views import View
from bigtrain.reports import flops
from bigtrain.runtime import debugging


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """What a run learns. Specs are trees of ShapeDtypeStructs with shardings."""

  config: Config
  train_input: TrainInput
  mesh: Mesh
  task: Any  # The module of config.task.
  model_module: Any  # The module of config.model_name.
  model: Any  # Its Model, with config.model.
  vocab_sizes: Mapping[str, int]  # Number of ids that the model takes.
  variants: Sequence[Variant]  # The models that steps draw from: one or more.
  loss_fns: Sequence[LossFn]  # By variant.
  stats_fns: Sequence[LossFn]  # With activation statistics, by variant, if any.
  teacher: Teacher
  base: Base  # The frozen base of adapters.
  init: InitialVariables
  sharding_rules: sharding.Rules  # Of the train state, as the model wants it.
  variables_spec: TrainState  # The parts of the train state that losses use.

  @functools.cached_property
  def params_spec(self) -> Any:
    """Shapes of the parameters, without shardings."""
    return self.init.spec()["params"]

  @functools.cached_property
  def param_views(self) -> dict[str, View]:
    """How optimizers see parameters: which dimensions are inputs, and so on."""
    return views.of_model(self.model_module, self.model, self.params_spec)

  @functools.cached_property
  def param_dims(self) -> dims.Table:
    return dims.of_model(self.model_module, self.model)

  @functools.cached_property
  def trained_rows(self) -> TrainedRows:
    """Rows of embedding and head that train, if the others do not."""
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
    variables_spec, _, _ = self._loss_args(
      sharding.batch_spec(self.train_input.spec, self.mesh)
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
    """The batch of an update; the largest, if steps draw its size."""
    return self.rollout.spec

  @property
  def batch_specs(self) -> list[Any]:
    """The batches of all sizes that steps draw."""
    return [spec for spec, _ in self.rollout.drawn]

  # The loss and its gradients.

  def gradients_fn(self, trainable: Any) -> GradientsFn:
    """Returns the function (state, batch) -> (gradients, metrics, mutable).

    Its `state` is the train state with the frozen variables and the hparams of
    the step, see objective/gradients.py.

    Args:
      trainable: tree of bools with the structure of the parameters.
    """
    return gradients.from_config(
      self.config,
      self.task,
      self.variants,
      self.loss_fns,
      stats_fns=self.stats_fns,
      trainable=trainable,
      mask=self.trained_rows.masked,
      mesh=self.mesh,
    )

  def metrics_spec(self) -> Metrics:
    """Traces the loss, to know which metrics a step has."""
    # With activation statistics, all metrics of a log step.
    traced = [*self.stats_fns, *self.loss_fns][0]
    metrics, _ = jax.eval_shape(traced, *self._loss_args(self.batch_spec))
    return metrics

  @functools.cached_property
  def flops_per_step(self) -> int:
    """Model FLOPs of a step over all devices: the mean over what steps draw."""
    total = 0.0
    for batch_spec, share in self.rollout.drawn:
      args = self._loss_args(batch_spec)
      for variant, loss_fn in zip(self.variants, self.loss_fns):
        total += variant.share * share * flops.step_flops(loss_fn, *args)
    return round(total)

  def _loss_args(self, batch_spec: Any) -> tuple[Any, Any, Any]:
    return gradients.loss_args(
      self.variables_spec, batch_spec, self.mesh, self.frozen_spec
    )


def from_config(
  config: Config, train_input: TrainInput, mesh: Mesh, seed: int
) -> Objective:
  """Builds what config.task, config.model_name and their like describe.

  The input learns which ids the model takes, and refuses others.

  Raises:
    ConfigError: an unknown module, a wrong option, or a teacher that the task
      does not use. Nothing is compiled yet.
  """
  task = building.task(config)
  model_module, model = building.model(config)
  vocab_sizes = task_functions.vocab_sizes(task, model)
  train_input.limit_ids(vocab_sizes)
  batch_spec = sharding.batch_spec(train_input.spec, mesh)
  teaching = teacher.from_config(config, task, batch_spec, mesh, seed)
  variants = model_variants.from_config(config, model)
  loss_fns = []
  for variant in variants:
    loss_fn = task_functions.loss_fn(
      config, task, variant.model, teaching.model
    )
    # Jitted, so that metrics, FLOPs and gradients share one trace.
    loss_fns.append(jax.jit(debugging.instrument(config, loss_fn)))
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
    vocab_sizes=vocab_sizes,
    variants=variants,
    loss_fns=loss_fns,
    stats_fns=activations.loss_fns(config, task, variants, teaching.model),
    teacher=teaching,
    base=base,
    init=init,
    sharding_rules=rules,
    variables_spec=variables_spec,
  )


def _variables_spec(
  config: Config, init: InitialVariables, rules: sharding.Rules, mesh: Mesh
) -> TrainState:
  """The entries "params", "mutable" and "ema" of a train state."""
  mutable = init.spec()
  params = mutable.pop("params")
  shapes = {"params": params}
  if mutable:
    shapes["mutable"] = mutable
  if config.get("ema_decay") is not None:  # The average may be the teacher.
    shapes["ema"] = jax.eval_shape(ema.init, params)
  # The notes of this function are logged when the whole state is placed.
  shardings, _ = sharding.state_shardings(shapes, mesh, rules)
  return sharding.with_shardings(shapes, shardings)
