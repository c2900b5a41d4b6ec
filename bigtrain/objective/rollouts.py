"""Batches that are made with the weights of the step.

A task may have `rollout(variables, batch, rng, *, model, eos_ids, **options)`,
which makes the batch of an update from the input's, on all devices; its options
are those of config.loss. Then `judge(indices, batch)` of the sources returns
float32 [B, G] for the names JUDGED, on the host that reads these examples.
Random numbers depend on the seed and the step alone, so a resumed run makes the
same batches.
"""

import inspect
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
  """Makes batches, of the spec `spec`; the input's without a task's rollout.

  `drawn` has (spec, share of the steps), of which `spec` is the largest.
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
    self.spec = sharding.batch_spec(train_input.spec, mesh)
    of = lambda spec: sharding.batch_spec(spec, mesh)
    self.drawn = [(of(spec), share) for spec, share in train_input.drawn]
    self.exists = hasattr(task, "rollout")
    if not self.exists:
      return
    if len(self.drawn) > 1:
      raise ConfigError(
        f"config.input.flexi: not with config.task={config.task!r}, whose "
        "batches have one size."
      )
    seed = np.uint32(config.get("seed", 0) % 2**32)
    takes = inspect.signature(task.rollout).parameters
    given = config.kwargs("loss").items()
    options: dict[str, Any] = {name: x for name, x in given if name in takes}
    ends = tuple(train_input.saved["data"].get("end_ids", ()))

    def make(variables: Any, batch: Batch, step: jax.Array) -> dict[str, Any]:
      # Initialisation and losses use the first two keys.
      key = jax.random.split(jax.random.key(seed), 3)[2]
      args = (
        Features(batch, "config.input"),
        jax.random.fold_in(key, step),
      )
      with logical_axes.no_logical_axes():
        return task.rollout(
          variables, *args, model=model, eos_ids=ends, **options
        )

    self._input, self._mesh = train_input, mesh
    self._layout = sharding.replicated(mesh)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=self._layout)
    self._program = make, variables_spec, self.spec, step
    made = jax.eval_shape(*self._program)
    reward = jax.ShapeDtypeStruct(made["tokens"].shape[:2], jnp.float32)
    made |= dict.fromkeys(JUDGED, reward)
    self.spec = sharding.batch_spec(made, mesh)
    self.drawn = [(self.spec, 1.0)]

  def compile(self, programs: Any) -> None:
    if self.exists:
      out = sharding.batch(self._mesh)
      compiled = programs.compile("rollout", *self._program, out_shardings=out)
      self._make = compiled

  def __call__(self, variables: Variables, batch: Batch, step: int) -> Batch:
    """Makes the batch of a step from the input's."""
    if not self.exists:
      return batch
    number = jax.device_put(np.int32(step), self._layout)
    made = self._make(variables, batch, number)
    engine, placement = self._input.engine, self._input.placement
    local = {name: placement.get(x) for name, x in made.items()}
    shape = local["targets"].shape[:2]
    judged = {name: np.zeros(shape, np.float32) for name in JUDGED}
    rows = engine.row_order(step, 0, engine.num_rows)
    for k, part in enumerate(engine.parts):
      at = np.flatnonzero(rows.source == k)
      of_part = {name: x[at] for name, x in local.items()}
      for name, x in part.source.judge(rows.index[at], of_part).items():
        judged[name][at] = x
    return {**made, **placement.put(judged)}
