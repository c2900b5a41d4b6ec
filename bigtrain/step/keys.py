"""Random keys of a run and of its steps.

They are functions of the seed and the step, so no key is stored, and a resumed
run draws the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays.types import Batch


def seed_word(seed: int) -> np.int32:
  """The lower 32 bits of a seed, as an argument of a compiled program."""
  return np.uint32(seed % 2**32).view(np.int32)


def step_key(seed: jax.Array | int, step: jax.Array | int) -> jax.Array:
  """Key of a step, for dropout and the like."""
  _, key = jax.random.split(jax.random.key(seed))
  return jax.random.fold_in(key, step)


def init_key(seed: jax.Array | int) -> jax.Array:
  """Key of the initial parameters."""
  key, _ = jax.random.split(jax.random.key(seed))
  return key


def with_keys(batch: Batch, rng: jax.Array) -> dict[str, Any]:
  """Adds "_keys" [B], a key for each example.

  This way random numbers do not depend on how the batch is split into
  microbatches.
  """
  batch_size = jax.tree.leaves(batch)[0].shape[0]
  fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  keys = fold_in(rng, jnp.arange(batch_size))
  return {**batch, "_keys": keys}
