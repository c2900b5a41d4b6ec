"""Rollouts: batches that are made with the weights of the step.

A task may have `rollout(variables, batch, rng, *, model, eos_ids, **options)`,
which makes the batch of an update from the input's, on all devices; its options
are those of config.loss. For reinforcement learning it writes several answers
to each prompt. Then the sources judge the answers, on the host that has read
their prompts: `judge(indices, batch)` returns float32 [B, G] for the names
JUDGED.

Random numbers depend on the seed and the step alone, so a resumed run makes the
same batches.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays.types import Batch, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.inputs.named_features import Features
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.objective import logical_axes

JUDGED = ("reward", "failed_rewards")


class Rollout:
  """Makes the batches of updates; without a task's rollout, the input's.

  Attributes:
    exists: whether the task has a rollout.
    drawn: (spec, share of the steps) of each batch size that steps draw.
    spec: the largest of these specs.
  """

  def __init__(
    self,
    config: Config,
    task: Any,
    model: Any,
    train_input: TrainInput,
    variables_spec: Variables,
    mesh: Mesh,
  ):
    self.exists = hasattr(task, "rollout")
    self.spec = sharding.batch_spec(train_input.spec, mesh)
    self.drawn = [
      (sharding.batch_spec(spec, mesh), share)
      for spec, share in train_input.drawn
    ]
    if not self.exists:
      return
    if len(self.drawn) > 1:
      raise ConfigError(
        f"config.input.flexi: not with config.task={config.task!r}, whose "
        "batches have one size."
      )
    self._input = train_input
    self._mesh = mesh
    self._replicated = sharding.replicated(mesh)
    self._make = _bind(config, task, model, train_input)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
    self._specs = variables_spec, self.spec, step
    # What the update gets: the task's batch, and what the sources judge.
    made = jax.eval_shape(self._make, *self._specs)
    judged = jax.ShapeDtypeStruct(made["tokens"].shape[:2], jnp.float32)
    made |= dict.fromkeys(JUDGED, judged)
    self.spec = sharding.batch_spec(made, mesh)
    self.drawn = [(self.spec, 1.0)]

  def compile(self, programs: Any) -> None:
    if self.exists:
      self._make = programs.compile(
        "rollout",
        self._make,
        *self._specs,
        out_shardings=sharding.batch(self._mesh),
      )

  def __call__(self, variables: Variables, batch: Batch, step: int) -> Batch:
    """Makes the batch of a step from the input's batch; needs `compile`."""
    if not self.exists:
      return batch
    number = jax.device_put(np.int32(step), self._replicated)
    made = self._make(variables, batch, number)
    return {**made, **self._judge(made, step)}

  def _judge(self, made: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Lets the source of each example judge its answers; global arrays."""
    engine, placement = self._input.engine, self._input.placement
    local = {name: placement.get(x) for name, x in made.items()}
    shape = local["targets"].shape[:2]
    judged = {name: np.zeros(shape, np.float32) for name in JUDGED}
    order = engine.row_order(step, 0, engine.num_rows)
    for i, part in enumerate(engine.parts):
      places = np.flatnonzero(order.source == i)
      own = {name: x[places] for name, x in local.items()}
      for name, x in part.source.judge(order.index[places], own).items():
        judged[name][places] = x
    return placement.put(judged)


def _bind(
  config: Config, task: Any, model: Any, train_input: TrainInput
) -> Any:
  """The task's rollout as a function of (variables, batch, step)."""
  seed = np.uint32(config.get("seed", 0) % 2**32)
  parameters = inspect.signature(task.rollout).parameters
  options: dict[str, Any] = {
    name: value
    for name, value in config.kwargs("loss").items()
    if name in parameters
  }
  eos_ids = tuple(train_input.saved["data"].get("end_ids", ()))

  def make(variables: Any, batch: Batch, step: jax.Array) -> dict[str, Any]:
    # The first two of the three keys are for initialisation and losses.
    _, _, key = jax.random.split(jax.random.key(seed), 3)
    with logical_axes.no_logical_axes():
      return task.rollout(
        variables,
        Features(batch, "config.input"),
        jax.random.fold_in(key, step),
        model=model,
        eos_ids=eos_ids,
        **options,
      )

  return make
