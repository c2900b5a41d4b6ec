"""Optimizer moments that are stored in bfloat16, with float32 arithmetic.

Moments are running averages of gradients or of their squares, one number for
each element of a parameter. Other state stays in float32.

With a decay of 0.999 a second moment shrinks by 0.1% a step at most, less than
half of bfloat16's last bit: rounded to nearest, it would never shrink.
Stochastic rounding takes the upper or the lower neighbour such that the
expected value is exact (Gupta et al. 2015, arxiv.org/abs/1502.02551, 3).
"""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError, check_choice

# Keys of config.optimizer that this module reads.
KEYS = ("moment_dtype", "moment_rounding")

_DTYPES = ("bfloat16", "float32")
_ROUNDINGS = ("stochastic", "nearest")

# Names of the moments in the states of optax, optax.contrib and adafactor.py.
_FIELDS = frozenset(
  "mu nu m m1 m2 n v trace ema e_g e_x exp_avg exp_avg_sq".split()
)

# Separates these random numbers from the other uses of the seed.
_STREAM = zlib.crc32(b"moments")


class Moments(NamedTuple):
  """How moments are stored; `sizes` are of trainable parameters, by name."""

  dtype: Any
  stochastic: bool
  sizes: Mapping[str, int]
  key: str

  def initial(self, state: Any) -> Any:
    if self.dtype is None:
      return state
    names = [n for n, x in trees.flatten_with_names(state) if self._has(n, x)]
    if not names:
      raise ConfigError(
        f"{self.key}.moment_dtype: this optimizer stores no moments of each "
        "element of a parameter."
      )
    return trees.map_with_names(
      lambda name, x: x.astype(self.dtype) if self._has(name, x) else x, state
    )

  def stored(self, new: Any, old: Any, step: Any, seed: Any) -> Any:
    """The new state, computed in float32, in the dtypes of the old one."""
    if not self.stochastic:
      return jax.tree.map(_cast_like, new, old)
    key = jax.random.fold_in(jax.random.key(seed), _STREAM)
    key = jax.random.fold_in(key, step)

    def store(name: str, x: jax.Array, before: jax.Array) -> jax.Array:
      if before.dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return _cast_like(x, before)
      own = jax.random.fold_in(key, zlib.crc32(name.encode()))
      return round_stochastically(x, own)

    return trees.map_with_names(store, new, old)

  def _has(self, name: str, x: Any) -> bool:
    parts = name.split("/")
    return any(
      field in _FIELDS and self.sizes.get("/".join(parts[i + 1 :])) == x.size
      for i, field in enumerate(parts)
    )


def read(
  spec: Mapping[str, Any], shapes: Any, arithmetic: str, key: str
) -> Moments:
  dtype, rounding = (spec.get(name) for name in KEYS)
  for name, value, known in zip(KEYS, (dtype, rounding), (_DTYPES, _ROUNDINGS)):
    if value is not None:
      check_choice(f"{key}.{name}", value, known)
  if rounding == "stochastic" and dtype != "bfloat16":
    raise ConfigError(
      f"{key}.moment_rounding='stochastic': expected "
      f"{key}.moment_dtype='bfloat16' beside it, got {dtype!r}."
    )
  if dtype is not None and arithmetic == "stored":
    raise ConfigError(
      f"{key}.moment_dtype={dtype!r}: expected moment_arithmetic='float32'. "
      "With 'stored', an optimizer's own arguments give the dtypes."
    )
  return Moments(
    dtype=None if dtype is None else jnp.dtype(dtype),
    stochastic=dtype == "bfloat16" and rounding != "nearest",
    sizes={name: x.size for name, x in trees.flatten_with_names(shapes)},
    key=key,
  )


def without_own_dtypes(
  kwargs: Mapping[str, Any], parameters: Mapping[str, Any], key: str
) -> dict[str, Any]:
  names = [name for name in parameters if "dtype" in name]
  for name in names:
    if kwargs.get(name) is not None:
      raise ConfigError(
        f"{key}.{name}={str(kwargs[name])!r}: expected none beside "
        f"{key}.moment_dtype, which concerns all moments."
      )
  return {**kwargs, **dict.fromkeys(names, jnp.float32)}


@jax.jit
def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
  """Rounds float32 to bfloat16 without bias, in the same way on any mesh."""
  # A bfloat16 is the upper half of a float32. Adding a uniform number to the
  # lower half carries into the upper half with the right probability.
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  sums = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
  upper = (sums >> 16).astype(jnp.uint16)
  rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _cast_like(new: jax.Array, old: jax.Array) -> jax.Array:
  return new if new.dtype == old.dtype else new.astype(old.dtype)
