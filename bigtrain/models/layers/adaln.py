"""Blocks that are modulated by one vector per example: adaLN-Zero.

https://arxiv.org/abs/2212.09748, section 3.2. A vector c, made from a time and
a class, shifts and scales the output of each norm, and multiplies the output of
each branch before it is added to the stream. The shifts, scales and factors are
a linear function of silu(c) that starts at zero, so each block starts as the
identity.

Axes: B batch, L length, D model width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import attention, mlp, positions, rms_norm

NORMS = ("rms", "layer")


class Options(NamedTuple):
  """Options of a block."""

  num_heads: int
  mlp_dim: int  # Hidden width F.
  mlp: str = "swiglu"  # A name in mlp.KINDS.
  # "rms", with a learned scale as in JiT, or "layer", without one as in DiT.
  norm: str = "rms"
  qk_norm: bool = True  # RMS norms of queries and keys, by head.
  norm_eps: float = 1e-6
  dropout: float = 0.0  # Of the attention's output and the MLP's hidden units.
  attention: str = "auto"
  dtype: str = "float32"


class Norm(nn.Module):
  """A norm with a shift and a scale, and further vectors made from c."""

  options: Options
  num_vectors: int  # Made from c; shift and scale are the first two.

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, c_BD: jax.Array
  ) -> tuple[jax.Array, list[jax.Array]]:
    """Returns (the modulated norm of x, the vectors that are left, (B, 1, D)).

    The order is that of DiT's code: shift, scale, gate, and so on.
    """
    options, D = self.options, x_BLD.shape[-1]
    zeros = nn.initializers.zeros
    made_BN = nn.Dense(
      self.num_vectors * D,
      dtype=options.dtype,
      kernel_init=zeros,
      name="modulation",
    )(nn.silu(c_BD).astype(options.dtype))
    shift, scale, *others = jnp.split(made_BN[:, None], self.num_vectors, -1)
    return modulated(options, "norm", x_BLD, shift, scale), others


def modulated(
  options: Options,
  name: str,
  x_BLD: jax.Array,
  shift_B1D: jax.Array,
  scale_B1D: jax.Array,
) -> jax.Array:
  """A norm of x, scaled by (1 + scale) and shifted. Called in a module."""
  dtype: Any = options.dtype
  if options.norm == "rms":
    shape = x_BLD.shape[-1:]
    norm: Any = rms_norm.RMSNorm(
      shape, options.norm_eps, dtype=dtype, name=name
    )
  else:
    norm = nn.LayerNorm(
      options.norm_eps, dtype, use_bias=False, use_scale=False, name=name
    )
  return norm(x_BLD) * (1 + scale_B1D) + shift_B1D


class Block(nn.Module):
  """Attention and an MLP, both modulated."""

  options: Options

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    layer: Any,
    rope: positions.Rotation | None,
    c_BD: jax.Array,
    train: bool,
  ) -> tuple[jax.Array, None]:
    del layer  # All blocks of a kind are alike.
    options = self.options
    y_BLD, vectors = Norm(options, 6, name="attention_norm")(x_BLD, c_BD)
    attention_gate, mlp_shift, mlp_scale, mlp_gate = vectors
    y_BLD, _ = attention.Attention(
      attention.Options(
        options.num_heads,
        qk_norm="head" if options.qk_norm else None,
        norm_eps=options.norm_eps,
        backend=options.attention,
        dtype=options.dtype,
      ),
      name="attention",
    )(y_BLD, y_BLD, rope=rope)
    y_BLD = nn.Dropout(options.dropout)(y_BLD, deterministic=not train)
    x_BLD = x_BLD + attention_gate * y_BLD
    y_BLD = modulated(options, "mlp_norm", x_BLD, mlp_shift, mlp_scale)
    y_BLD = mlp.Mlp(
      mlp.Options(
        options.mlp_dim,
        options.mlp,
        use_bias=True,
        dropout=options.dropout,
        dtype=options.dtype,
      ),
      name="mlp",
    )(y_BLD, train)
    return sharding.stream(x_BLD + mlp_gate * y_BLD), None


DIMS: dict[str, str] = {
  r"(.*/)?modulation/kernel": "D -> vectors",
  r"(.*/)?modulation/bias": "vectors",
  r"(.*/)?(query|key)_norm/scale": "K",
}
