"""A short convolution between two gates: a layer in place of attention.

As in LFM2 (arXiv 2511.23404): the gated input passes through a depthwise causal
convolution over the last few positions, whose output is multiplied by a second
gate. Both gates are linear in the layer's input. Documents of a packed example
do not see each other.

Axes: B batch, L length, D model width, W positions of the convolution.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bigtrain import sharding
from bigtrain.models.layers import (
  causal_conv,
  kernels,
  masks,
  options,
  recurrent_cache,
  remat,
)


class Options(NamedTuple):
  """config.model.short_conv."""

  width: int = 3  # W.
  bias: bool = False  # Of the projections and of the convolution.

  def cache(self, width: int) -> recurrent_cache.Kind:
    """The cache for a model of this width: W inputs, and no state."""
    return recurrent_cache.Kind(1, self.width, (1, 0, width))


def read(given: Options | Mapping[str, Any] | None, key: str) -> Options | None:
  """Checks config.model.short_conv."""
  return options.read_tuple(
    Options, given, key, width=dict(least=2, whole=True)
  )


class ShortConv(nn.Module):
  """The layer, without the norm before it.

  Parameters: input_gate, output_gate and value (D, D), conv (W, D) and out
  (D, D), each a kernel, and biases if any.
  """

  options: Options
  init_std: float  # Of the initial kernels but `conv` and `out`.
  out_init_std: float
  dtype: str

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    *,
    segments_BL: jax.Array | None = None,
    real_BL: jax.Array | None = None,
    cache: recurrent_cache.States | None = None,
    layer: jax.Array | int = 0,
    start: jax.Array | int | None = 0,
  ) -> tuple[jax.Array, recurrent_cache.States | None]:
    """Returns (output (B, L, D), new cache or None).

    Args:
      segments_BL: int, number of each position's document; not with a cache.
      real_BL: bool, False for padding, which later tokens do not see.
      start: number of the first position, with a cache; None for 0.
    """
    B, _, D = x_BLD.shape
    W = self.options.width
    columns = rows = None
    if D % sharding.tensor_ways(B) == 0:
      columns, rows = sharding.columns(x_BLD), sharding.rows(B)

    def dense(name: str, std: float, product: Any) -> nn.Dense:
      return nn.Dense(
        D,
        use_bias=self.options.bias,
        dtype=self.dtype,
        kernel_init=kernels.initializer(std),
        dot_general=product,
        name=name,
      )

    names = ("input_gate", "output_gate", "value")
    gate_BLD, out_gate_BLD, value_BLD = (
      dense(name, self.init_std, columns)(x_BLD) for name in names
    )
    gate_BLD, out_gate_BLD, value_BLD = checkpoint_name(
      (gate_BLD, out_gate_BLD, value_BLD), remat.INNER
    )
    inputs_BLD = gate_BLD * value_BLD
    if real_BL is not None:
      inputs_BLD = jnp.where(real_BL[..., None], inputs_BLD, 0)
    weights = kernels.Kernel(
      (W, D), (D,) if self.options.bias else None, _uniform, name="conv"
    )()
    kernel_WD = weights["kernel"]
    if cache is not None:
      y_BLD, cache = _with_cache(
        inputs_BLD, kernel_WD, real_BL, cache, layer, start
      )
    else:
      places_BL = None
      if segments_BL is not None:
        places_BL = masks.places_in_documents(segments_BL)
      before = jnp.zeros((B, W - 1, D), inputs_BLD.dtype)
      joined = jnp.concatenate([before, inputs_BLD], axis=1)
      y_BLD = causal_conv.convolved(joined, kernel_WD, places_BL)
    if self.options.bias:
      y_BLD += weights["bias"]
    y_BLD = checkpoint_name(y_BLD.astype(self.dtype), remat.ATTENTION)
    y_BLD *= out_gate_BLD
    return dense("out", self.out_init_std, rows)(y_BLD), cache


def _uniform(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  bound = shape[0] ** -0.5
  return jax.random.uniform(key, shape, dtype, -bound, bound)


def _with_cache(
  inputs_BLD: jax.Array,
  kernel_WD: jax.Array,
  real_BL: jax.Array | None,
  cache: recurrent_cache.States,
  layer: Any,
  start: Any,
) -> tuple[jax.Array, recurrent_cache.States]:
  """Continues from the last inputs in a cache."""
  last_BW1D, state = cache.layer(layer)
  joined, last_BW1D, _ = causal_conv.with_last_inputs(
    inputs_BLD[:, :, None],
    last_BW1D,
    real_BL,
    cache.read_B,
    0 if start is None else start,
  )
  y_BL1D = causal_conv.convolved(joined, kernel_WD[:, None], None)
  return y_BL1D[:, :, 0], cache.with_layer(layer, last_BW1D, state)
