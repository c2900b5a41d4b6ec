"""Kernels: their initial values, and a module that only holds one."""

from typing import Any

import flax.linen as nn
import jax

xavier = nn.initializers.xavier_uniform()


def initializer(std: float | None) -> Any:
  """A normal distribution with this standard deviation; Xavier's if None."""
  return xavier if std is None else nn.initializers.normal(std)


class Kernel(nn.Module):
  """A parameter called "kernel", which the caller multiplies with.

  Attributes:
    shape: shape of the parameter.
    init_std: standard deviation of its initial values.
  """

  shape: tuple[int, ...]
  init_std: float

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns the parameter, float32."""
    return self.param("kernel", initializer(self.init_std), self.shape)
