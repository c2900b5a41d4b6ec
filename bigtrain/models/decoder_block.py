"""The block that decoders stack.

Axes: B batch, L length, D model width, F hidden width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from bigtrain import sharding
from bigtrain.models import attention, moe


class Layer(NamedTuple):
  """What a block has to know; fields of Model."""

  depth: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  norm: str
  norm_eps: float
  mlp: str
  moe: moe.Options | None
  use_bias: bool
  qk_norm: bool
  window: int | None
  attention_softcap: float | None
  dropout: float
  init_std: float
  dtype: str

  @property
  def out_init_std(self) -> float:
    """Of kernels that write to the residual stream, twice in each layer."""
    return self.init_std / (2 * self.depth) ** 0.5


class Block(nn.Module):
  """Attention and MLP, each after a norm and added to the residual stream."""

  layer: Layer

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, attention.Cache | None],
    index: Any,
    turn: attention.Rotation | None,
    mask_BLL: jax.Array | None,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, attention.Cache | None], Any]:
    """Returns the carry, (stream, cache), and statistics of the experts."""
    layer = self.layer
    x_BLD, cache = carry
    drop = lambda y: nn.Dropout(layer.dropout)(y, deterministic=not train)
    y_BLD, cache = attention.Attention(
      num_heads=layer.num_heads,
      num_kv_heads=layer.num_kv_heads,
      head_dim=layer.head_dim,
      use_bias=layer.use_bias,
      qk_norm=layer.qk_norm,
      window=layer.window,
      softcap=layer.attention_softcap,
      norm_eps=layer.norm_eps,
      init_std=layer.init_std,
      out_init_std=layer.out_init_std,
      dtype=layer.dtype,
      name="attention",
    )(norm(layer, "attention_norm")(x_BLD), turn, mask_BLL, cache, index, start)
    x_BLD += drop(y_BLD)
    y_BLD = norm(layer, "mlp_norm")(x_BLD)
    if layer.moe is None:
      y_BLD, stats = Mlp(layer, name="mlp")(y_BLD), None
    else:
      y_BLD, stats = self._experts(y_BLD, real_BL, train)
    return (sharding.over_batch(x_BLD + drop(y_BLD)), cache), stats

  def _experts(
    self, y_BLD: jax.Array, real_BL: jax.Array | None, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the routed experts say, and those that all tokens pass."""
    layer = self.layer
    out_BLD, stats = moe.Moe(
      options=layer.moe,
      mlp_dim=layer.mlp_dim,
      gated=layer.mlp == "swiglu",
      init_std=layer.init_std,
      out_init_std=layer.out_init_std,
      dtype=layer.dtype,
      name="moe",
    )(y_BLD, real_BL, train)
    if layer.moe.shared_experts:
      size = layer.moe.shared_experts * layer.mlp_dim
      shared = Mlp(layer._replace(mlp_dim=size), name="shared_experts")
      out_BLD += shared(y_BLD)
    return out_BLD, stats


class Mlp(nn.Module):
  """A hidden layer, GELU or gated (SwiGLU, https://arxiv.org/abs/2002.05202).

  Parameters: up and, if gated, gate (D, F), down (F, D).
  """

  layer: Layer

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    layer = self.layer

    def dense(name: str, size: int, std: float) -> nn.Module:
      return nn.Dense(
        size,
        use_bias=layer.use_bias,
        dtype=layer.dtype,
        kernel_init=nn.initializers.normal(std),
        name=name,
      )

    h_BLF = dense("up", layer.mlp_dim, layer.init_std)(x_BLD)
    if layer.mlp == "swiglu":
      gate = dense("gate", layer.mlp_dim, layer.init_std)
      h_BLF = nn.silu(gate(x_BLD)) * h_BLF
    else:
      h_BLF = nn.gelu(h_BLF)
    return dense("down", x_BLD.shape[-1], layer.out_init_std)(h_BLF)


def norm(options: Any, name: str) -> nn.Module:
  """The norm that `options`, a Layer or a Model, describes."""
  if options.norm == "rmsnorm":
    return nn.RMSNorm(epsilon=options.norm_eps, dtype=options.dtype, name=name)
  return nn.LayerNorm(
    epsilon=options.norm_eps,
    use_bias=options.use_bias,
    dtype=options.dtype,
    name=name,
  )
