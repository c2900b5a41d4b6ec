"""Random keys of a run and of its steps, which are never stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays.types import Batch


def seed_word(seed: int) -> np.int32:
  """The last 32 bits of a seed, as an argument of a program."""
  return np.uint32(seed % 2**32).view(np.int32)


def step_key(seed: jax.Array | int, step: jax.Array | int) -> jax.Array:
  _, key = jax.random.split(jax.random.key(seed))
  return jax.random.fold_in(key, step)


def init_key(seed: jax.Array | int) -> jax.Array:
  key, _ = jax.random.split(jax.random.key(seed))
  return key


def with_keys(batch: Batch, rng: jax.Array) -> dict[str, Any]:
  """Adds "_keys" [B], so that no random number depends on the microbatch."""
  number = jnp.arange(jax.tree.leaves(batch)[0].shape[0])
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, number)
  return {**batch, "_keys": keys}
