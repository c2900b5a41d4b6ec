"""Padding has no effect on losses and gradients, for tests of tasks."""

import jax
import numpy as np


def assert_without_effect(loss_fn, variables, batch, changes):
  """Asserts that changes of a batch change no bit of losses and gradients.

  Args:
    loss_fn: a task's loss_fn with its model.
    variables: dict with "params".
    batch: arrays by name.
    changes: other values of some of these arrays, which differ in padding only.
  """

  @jax.jit
  def run(batch):
    def loss(params):
      pairs, _ = loss_fn(
        {"params": params}, batch, jax.random.key(0), train=True
      )
      return pairs["loss"][0] / pairs["loss"][1], pairs

    return jax.grad(loss, has_aux=True)(variables["params"])

  for name, value in changes.items():
    assert (np.asarray(value) != np.asarray(batch[name])).any(), name
  grads, pairs = run(batch)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, pairs)))
  jax.tree.map(
    np.testing.assert_array_equal, (grads, pairs), run(batch | changes)
  )
