"""The MLP of transformers, plain or gated.

Axes: B batch, L length, D model width, F hidden width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from bigtrain import sharding
from bigtrain.models.layers import kernels, remat


class Kind(NamedTuple):
  """What happens between the products; gated as in arXiv 2002.05202."""

  activation: Callable[[jax.Array], jax.Array]
  gated: bool


KINDS = {
  "relu": Kind(jax.nn.relu, gated=False),
  "gelu": Kind(jax.nn.gelu, gated=False),  # Its tanh form.
  "geglu": Kind(jax.nn.gelu, gated=True),
  "swiglu": Kind(jax.nn.silu, gated=True),
}


class Options(NamedTuple):
  """Options of an MLP.

  Attributes:
    init_std: standard deviation of the initial `up` and `gate` kernels; None
      for Xavier's uniform distribution. `out_init_std` is that of `down`.
    names: names of the submodules `up` and `down`.
  """

  dim: int
  kind: str
  init_std: float | None
  out_init_std: float | None
  use_bias: bool = False
  dropout: float = 0.0
  dtype: str = "float32"
  names: tuple[str, str] = ("up", "down")


def vit_options(
  dim: int, dropout: float = 0.0, dtype: str = "float32", use_bias: bool = True
) -> Options:
  return Options(
    dim,
    "gelu",
    init_std=None,
    out_init_std=None,
    use_bias=use_bias,
    dropout=dropout,
    dtype=dtype,
    names=("Dense_0", "Dense_1"),
  )


class Mlp(nn.Module):
  """An MLP. Parameters: up and, if gated, gate (D, F), down (F, D)."""

  options: Options

  @nn.compact
  def __call__(self, x_BLD: jax.Array, train: bool = False) -> jax.Array:
    options = self.options
    activation, gated = KINDS[options.kind]
    up, down = options.names

    # Hidden units over the mesh axis `tensor`, if any.
    columns = rows = None
    if options.dim % sharding.tensor_ways(x_BLD.shape[0]) == 0:
      columns, rows = sharding.columns(x_BLD), sharding.rows(x_BLD.shape[0])
    dense = functools.partial(
      nn.Dense, use_bias=options.use_bias, dtype=options.dtype
    )
    hidden = functools.partial(
      dense,
      options.dim,
      kernel_init=kernels.initializer(options.init_std),
      dot_general=columns,
    )
    h_BLF = checkpoint_name(hidden(name=up)(x_BLD), remat.INNER)
    if gated:
      gate = hidden(name="gate")
      h_BLF *= activation(checkpoint_name(gate(x_BLD), remat.INNER))
    else:
      h_BLF = activation(h_BLF)
    h_BLF = nn.Dropout(options.dropout)(h_BLF, deterministic=not train)
    init = kernels.initializer(options.out_init_std)
    D = x_BLD.shape[-1]
    return dense(D, kernel_init=init, dot_general=rows, name=down)(h_BLF)
