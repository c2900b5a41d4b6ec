"""Optimizer moments that are stored in bfloat16 and updated in float32.

Moments are running averages of gradients or of their squares, one number for
each element of a parameter. Other state stays in float32.

With a decay of 0.999 a second moment shrinks by at most 0.1% a step, which is
less than half of bfloat16's last bit. If rounded to nearest, it would never
shrink. Stochastic rounding chooses the upper or the lower neighbour at random,
so that the expected value is exact (Gupta et al. 2015,
arxiv.org/abs/1502.02551, section 3).
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

# Keeps these random numbers apart from the other uses of the seed.
_STREAM = zlib.crc32(b"moments")


class Moments(NamedTuple):
  """Storage of an optimizer's moments: their dtype and rounding."""

  dtype: Any  # None: as the optimizer's own arguments say.
  stochastic: bool
  sizes: Mapping[str, int]  # Number of elements by name of the parameters.
  key: str  # Key of the optimizer in the config, for messages.

  def initial(self, state: Any) -> Any:
    """Converts the moments of a new state to the stored dtype."""
    if self.dtype is None:
      return state
    named = trees.flatten_with_names(state)
    if not any(self._is_moment(name, x) for name, x in named):
      raise ConfigError(
        f"{self.key}.moment_dtype: this optimizer stores no moments of each "
        "element of a parameter."
      )

    def convert(name: str, x: jax.Array) -> jax.Array:
      return x.astype(self.dtype) if self._is_moment(name, x) else x

    return trees.map_with_names(convert, state)

  def stored(self, new: Any, old: Any, step: Any, seed: Any) -> Any:
    """Converts a new state, which is float32, to the dtypes of the old one."""
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

  def _is_moment(self, name: str, x: Any) -> bool:
    """Whether a name such as "0/mu/Dense_0/kernel" is a parameter's moment."""
    parts = name.split("/")
    for i, field in enumerate(parts):
      parameter = "/".join(parts[i + 1 :])
      if field in _FIELDS and self.sizes.get(parameter) == x.size:
        return True
    return False


def read(
  spec: Mapping[str, Any], shapes: Any, arithmetic: str, key: str
) -> Moments:
  """Reads KEYS of config.optimizer.

  Args:
    spec: config.optimizer.
    shapes: specs of the trainable parameters.
    arithmetic: "float32" or "stored", config.optimizer.moment_arithmetic.
    key: name of `spec` in messages.
  """
  dtype = spec.get("moment_dtype")
  rounding = spec.get("moment_rounding")
  if dtype is not None:
    check_choice(f"{key}.moment_dtype", dtype, _DTYPES)
  if rounding is not None:
    check_choice(f"{key}.moment_rounding", rounding, _ROUNDINGS)
  if rounding == "stochastic" and dtype != "bfloat16":
    raise ConfigError(
      f"{key}.moment_rounding='stochastic': expected "
      f"{key}.moment_dtype='bfloat16' with it, got {dtype!r}."
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
  """Sets an optimizer's own dtype arguments to float32.

  Args:
    kwargs: arguments of the optimizer in the config.
    parameters: names of all its arguments.
    key: key of the optimizer in the config, for messages.
  """
  names = [name for name in parameters if "dtype" in name]
  for name in names:
    if kwargs.get(name) is not None:
      raise ConfigError(
        f"{key}.{name}={str(kwargs[name])!r}: expected none with "
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
