"""Optimizers and schedules of a user, which tests name by dotted paths."""

import jax.numpy as jnp
import optax


def descent(momentum=0.0):
  """Updates that are added; a learning rate is not among the arguments."""
  return optax.chain(optax.trace(momentum), optax.scale(-1.0))


def rated(learning_rate, momentum=0.0):
  return optax.sgd(learning_rate, momentum=momentum or None)


def scale_by_signs():
  return optax.scale_by_sign()


def no_transformation():
  return 3


def waves(p, number):
  return 1 + jnp.sin(2 * jnp.pi * number * p) / 2


def steep(p):
  return (1 - p) ** 4


NUMBER = 3
