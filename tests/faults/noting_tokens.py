"""A user's task: language modeling, with a number for each window in the rows.

Axes: B batch, L length.
"""

import jax.numpy as jnp

from bigtrain.tasks import language_modeling
from bigtrain.tasks.language_modeling import inputs, predict_fns, vocab_sizes

__all__ = ["inputs", "loss_fn", "predict_fns", "vocab_sizes"]


def loss_fn(variables, batch, rng, **options):
  """language_modeling's loss_fn, plus a number for each window."""
  pairs, mutable = language_modeling.loss_fn(variables, batch, rng, **options)
  tokens_BL = batch["tokens"]
  weight_L = jnp.arange(1, tokens_BL.shape[1] + 1)
  number_B = jnp.sum(tokens_BL * weight_L, axis=1).astype(jnp.float32)
  for i in range(number_B.shape[0]):
    pairs[f"id_{i}"] = number_B[i], 1.0
  return pairs, mutable
