"""Float16 on CPUs: XLA compiles it only for processors that convert to it.

All x86 processors since 2013 do, but SSE4_2 as --xla_cpu_max_isa leaves the
instructions out. XLA then fails to compile, for float8 too.
"""

import functools

import jax
import jax.numpy as jnp
import pytest


def require():
  """Skips a test if XLA has no float16 on this instruction set."""
  if not _is_compiled():
    pytest.skip("XLA cannot compile float16 for a processor without F16C")


@functools.cache
def _is_compiled():
  try:
    jax.jit(lambda x: x.astype(jnp.float16))(jnp.ones(1))
  except jax.errors.JaxRuntimeError as e:
    if "Failed to materialize symbols" not in str(e):
      raise
    return False
  return True
