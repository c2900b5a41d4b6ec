"""Checkpoints of tiny models with fresh parameters."""

import jax
import jax.numpy as jnp

from bigtrain.checkpoints import checkpointer
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config import settings
from bigtrain.objective import building

# Sizes of a transformer.
TOWER = dict(width=8, mlp_dim=8, num_heads=2, depth=1)


def saved(folder, config, **features):
  """Saves fresh parameters of a config's model.

  Args:
    folder: workdir.
    config: config of the run.
    **features: (shape, dtype) of an example's features.

  Returns:
    Function (name, batch, **options) that calls a predict function.
  """
  parsed = settings.Config(config)
  task = building.task(parsed)
  _, model = building.model(parsed)
  batch = {n: jnp.zeros((1, *s), d) for n, (s, d) in features.items()}
  variables = jax.jit(
    lambda: model.init(jax.random.key(0), **task.inputs(batch))
  )()
  data = {"features": {n: [d, list(s)] for n, (s, d) in features.items()}}
  saver = checkpointer.Checkpointer(str(folder))
  saver.save(1, dict(variables), HostState(config=config, data=data))
  saver.close()
  jitted = lambda name, batch, **options: jax.jit(
    lambda v, b: task.predict_fns(model)[name](v, b, **options)
  )(variables, batch)
  return jitted
