"""Kernels: their initial values, and a module that only holds one."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

xavier = nn.initializers.xavier_uniform()


def initializer(std: float | None) -> Any:
  return xavier if std is None else nn.initializers.normal(std)


class Kernel(nn.Module):
  """A parameter called "kernel", which the caller multiplies with."""

  shape: tuple[int, ...]
  init_std: float | None

  @nn.compact
  def __call__(self) -> jax.Array:
    return self.param("kernel", initializer(self.init_std), self.shape)


def logits(x_BLD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
  return jnp.einsum(
    "bld,dv->blv", x_BLD, kernel_DV, preferred_element_type=jnp.float32
  )
