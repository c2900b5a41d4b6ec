"""Gradients of a config's objective in float64, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config import settings
from support import any_mesh


def make_mesh(**sizes):
  number = int(np.prod([*sizes.values()]))
  return sharding.make_mesh(**sizes, devices=jax.devices()[:number])


def build(config, mesh):
  """Returns the objective of a config; call it in the mesh's context."""
  return any_mesh.objective_of(settings.Config(config), mesh)[0]


def draw(specs):
  """The same numbers for the same names, whatever else is in the tree."""

  def of_leaf(name, x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return np.zeros(x.shape, x.dtype)
    rng = np.random.default_rng([*name.encode()])
    return 0.3 * rng.normal(size=x.shape)

  return trees.map_with_names(of_leaf, specs)


def gradients(config, step=0, **sizes):
  """(gradients by name, metrics) of a step with random parameters.

  The model's dtype has to be float64.
  """
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    mesh = make_mesh(**(sizes or dict(fsdp=1)))
    with jax.set_mesh(mesh):
      one = build(config, mesh)
      params = draw(one.params_spec)
      compute = one.gradients_fn(jax.tree.map(lambda _: True, params))
      batches = one.train_input.start(step, step + 1)
      batch = next(batches)
      batches.close()
      state = {
        "params": jax.device_put(params, sharding.replicated(mesh)),
        "step": jnp.int32(step),
        **one.hparams(step),
        **one.init_task_state(params),
        **draw(one.frozen_spec),
      }
      grads, sums, _ = jax.jit(compute)(state, batch)
      return jax.device_get((dict(trees.flatten_with_names(grads)), sums))
