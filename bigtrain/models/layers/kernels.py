"""Kernels: their initial values, and a module that only holds a kernel."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

xavier = nn.initializers.xavier_uniform()


def initializer(std: float | None) -> Any:
  return xavier if std is None else nn.initializers.normal(std)


class Kernel(nn.Module):
  """Parameters "kernel" and "bias", which the caller multiplies itself.

  A parameter whose shape is None is left out.
  """

  kernel: tuple[int, ...] | None
  bias: tuple[int, ...] | None = None
  init: Any = xavier

  @nn.compact
  def __call__(self) -> dict[str, jax.Array]:
    result = {}
    if self.kernel:
      result["kernel"] = self.param("kernel", self.init, self.kernel)
    if self.bias:
      result["bias"] = self.param("bias", nn.initializers.zeros, self.bias)
    return result


def product(x: jax.Array, kernel: jax.Array, _: Any, **options: Any) -> Any:
  """dot_general of a dense layer, as one product of matrices.

  On CPUs, XLA takes up to four times as long for the gradient of a kernel (D,
  F) if x is [B, L, D] as it does if x is [B L, D].
  """
  rows = x.reshape(-1, len(kernel))
  last_with_first = (((1,), (0,)), ((), ()))
  y = jax.lax.dot_general(rows, kernel, last_with_first, **options)
  return y.reshape(*x.shape[:-1], -1)


def logits(x_BLD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
  return jnp.einsum(
    "bld,dv->blv", x_BLD, kernel_DV, preferred_element_type=jnp.float32
  )
