"""The hidden layer of transformers, plain or gated.

Axes: B batch, L length, D model width, F hidden width.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax


class Kind(NamedTuple):
  """What happens between the two products.

  Attributes:
    activation: a function of each number.
    gated: whether a third matrix, `gate`, makes what it is applied to, which
      is then multiplied with what `up` made (https://arxiv.org/abs/2002.05202).
  """

  activation: Callable[[jax.Array], jax.Array]
  gated: bool


KINDS = {
  "relu": Kind(jax.nn.relu, gated=False),
  "gelu": Kind(jax.nn.gelu, gated=False),  # Its tanh form.
  "geglu": Kind(jax.nn.gelu, gated=True),
  "swiglu": Kind(jax.nn.silu, gated=True),
}


class Options(NamedTuple):
  """What an MLP has to know.

  Attributes:
    dim: F.
    kind: a name in KINDS.
    init_std: of the initial kernels that read the residual stream.
    out_init_std: of that which writes to it.
    use_bias: whether there are biases.
    dropout: rate in the hidden layer.
    dtype: of the computation.
  """

  dim: int
  kind: str
  init_std: float
  out_init_std: float
  use_bias: bool = False
  dropout: float = 0.0
  dtype: str = "float32"


class Mlp(nn.Module):
  """The layer. Parameters: up and, if gated, gate (D, F), down (F, D)."""

  options: Options

  @nn.compact
  def __call__(self, x_BLD: jax.Array, train: bool) -> jax.Array:
    """(B, L, D) to the same; `train` says whether dropout acts."""
    options = self.options
    activation, gated = KINDS[options.kind]

    def dense(name: str, size: int, std: float) -> nn.Module:
      return nn.Dense(
        size,
        use_bias=options.use_bias,
        dtype=options.dtype,
        kernel_init=nn.initializers.normal(std),
        name=name,
      )

    h_BLF = dense("up", options.dim, options.init_std)(x_BLD)
    if gated:
      gate = dense("gate", options.dim, options.init_std)
      h_BLF *= activation(gate(x_BLD))
    else:
      h_BLF = activation(h_BLF)
    h_BLF = nn.Dropout(options.dropout)(h_BLF, deterministic=not train)
    return dense("down", x_BLD.shape[-1], options.out_init_std)(h_BLF)


class Kernel(nn.Module):
  """A parameter called "kernel", multiplied elsewhere.

  Attributes:
    shape: of it.
    init_std: of its initial values.
  """

  shape: tuple[int, ...]
  init_std: float

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns it."""
    init = nn.initializers.normal(self.init_std)
    return self.param("kernel", init, self.shape)
