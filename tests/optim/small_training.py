"""Training of a few small parameters with the optimizer of a config."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bigtrain.arrays import trees
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.optim import chain

LOSS = 0.75  # In all steps, for optimizers that use the loss.
UNITS = Units(batch_size=8, examples_per_epoch=80, total_steps=20)
SHAPES = {
  "body/dense/kernel": (8, 16),
  "body/dense/bias": (16,),
  "body/stack/kernel": (2, 8, 8),
  "embedding": (3, 8),
  "head/kernel": (16, 8),
}
ADAM = dict(name="adam")
MUON = dict(
  name="muon",
  muon_weight_dimension_numbers=[
    ("body/dense/kernel", 0, 1),
    ("body/stack/kernel", [1], [2]),
  ],
)


def tree(seed):
  """Random parameters or gradients."""
  rng = np.random.default_rng(seed)
  return trees.from_flat(
    {
      name: jnp.asarray(rng.normal(size=shape), jnp.float32)
      for name, shape in SHAPES.items()
    }
  )


def make(shapes=None, units=UNITS, param_views=None, **config):
  """Builds the optimizer; every key of the config must be read."""
  config = Config({"lr": 0.1, "optimizer": ADAM, **config})
  shapes = tree(0) if shapes is None else shapes
  optimizer = chain.make(config, shapes, units, param_views)
  assert not config.unread()
  return optimizer


def train(optimizer, params, num_steps, grads=tree, jit=False):
  """Trains as the docstring of chain.Optimizer describes."""
  trained, frozen = trees.partition(params, optimizer.trainable)
  state = optimizer.tx.init(trained)
  update = jax.jit(optimizer.tx.update) if jit else optimizer.tx.update
  for step in range(num_steps):
    g, _ = trees.partition(grads(step + 1), optimizer.trainable)
    loss = (jnp.float32(2 * LOSS), jnp.float32(2))
    hparams = optimizer.hparams(step)
    updates, state = update(
      g, state, trained, step=step, hparams=hparams, loss=loss
    )
    trained = optax.apply_updates(trained, updates)
  return trees.merge(trained, frozen), state


def assert_close(actual, expected, **tolerances):
  assert trees.names(actual) == trees.names(expected)
  pairs = zip(trees.flatten_with_names(actual), jax.tree.leaves(expected))
  for (name, a), e in pairs:
    np.testing.assert_allclose(a, e, err_msg=name, **tolerances)
