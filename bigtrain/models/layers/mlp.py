"""The MLP of transformers, plain or gated.

Axes: B batch, L length, D model width, F hidden width.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import clipping, kernels, options, remat


class Kind(NamedTuple):
  """The function between the two matrix products of an MLP."""

  activation: Callable[[jax.Array], jax.Array]
  # Whether the activation of another product multiplies the hidden units,
  # https://arxiv.org/abs/2002.05202.
  gated: bool


def _relu2(x: jax.Array) -> jax.Array:
  return jnp.square(jax.nn.relu(x))


def _gelu_erf(x: jax.Array) -> jax.Array:
  return jax.nn.gelu(x, approximate=False)


def _gelu_quick(x: jax.Array) -> jax.Array:
  return x * jax.nn.sigmoid(1.702 * x)


KINDS = {
  "relu": Kind(jax.nn.relu, gated=False),
  "relu2": Kind(_relu2, gated=False),
  "silu": Kind(jax.nn.silu, gated=False),
  "gelu": Kind(jax.nn.gelu, gated=False),  # Its tanh form.
  "gelu_erf": Kind(_gelu_erf, gated=False),
  "gelu_quick": Kind(_gelu_quick, gated=False),  # CLIP's approximation.
  "geglu": Kind(jax.nn.gelu, gated=True),
  "geglu_erf": Kind(_gelu_erf, gated=True),
  "geglu_quick": Kind(_gelu_quick, gated=True),
  "reglu": Kind(jax.nn.relu, gated=True),
  "reglu2": Kind(_relu2, gated=True),
  "swiglu": Kind(jax.nn.silu, gated=True),
}


# The kinds of KINDS, and those whose activation has parameters.
NAMES = (*KINDS, "xielu")


def is_gated(kind: str) -> bool:
  return kind in KINDS and KINDS[kind].gated


class Clip(NamedTuple):
  """The gate of gpt-oss: (clip(up) + up_offset) * g * sigmoid(alpha * g)."""

  limit: float
  alpha: float = 1.0
  up_offset: float = 0.0


def read_clip(given: Any, kind: str, key: str) -> Clip | None:
  clip = options.read_tuple(
    Clip, given, key, limit=dict(above=0), alpha={}, up_offset={}
  )
  if clip is not None and kind != "swiglu":
    raise ConfigError(f"{key}: expected an MLP of kind 'swiglu', got {kind!r}.")
  return clip


# Names of a ViT's products, as in big_vision's checkpoints.
VIT_NAMES = ("Dense_0", "Dense_1")


class Options(NamedTuple):
  """Options of an MLP."""

  dim: int  # F.
  kind: str  # A name in NAMES.
  # Of the initial `up` and `gate`, and of `down`; None for Xavier's uniform.
  init_std: float | None = None
  out_init_std: float | None = None
  use_bias: bool = False
  dropout: float = 0.0
  dtype: str = "float32"
  names: tuple[str, str] = ("up", "down")  # Of the first and last product.
  clip: Clip | None = None  # Bounds of a gated MLP's first products.
  clipped: bool = False  # Whether all layers have bounds, see clipping.py.


def hidden_units(
  kind: str, clip: Clip | None, up: jax.Array, gate: jax.Array | None
) -> jax.Array:
  """The input of `down`; `gate` is None for kinds that are not gated."""
  activation, _ = KINDS[kind]
  if gate is None:
    return activation(up)
  if clip is None:
    return up * activation(gate)
  gate = jnp.minimum(gate, clip.limit)
  up = jnp.clip(up, -clip.limit, clip.limit) + clip.up_offset
  return up * gate * jax.nn.sigmoid(clip.alpha * gate)


class Xielu(nn.Module):
  """The activation of Apertus, https://arxiv.org/abs/2411.13010.

  A parabola for positive inputs, and an exponential function for others. The
  curvatures, the softplus of two parameters, are learned; `beta`, the slope at
  0, and `eps`, which bounds the exponent, are not. All are (1,).
  """

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    def number(name: str, value: float) -> jax.Array:
      return self.param(name, nn.initializers.constant(value), (1,))

    # The softplus of the initial numbers is 0.8, and 0.8 - beta.
    positive = jax.nn.softplus(number("alpha_p", math.log(math.expm1(0.8))))
    negative = jax.nn.softplus(number("alpha_n", math.log(math.expm1(0.3))))
    beta, eps = jax.lax.stop_gradient(
      (number("beta", 0.5), number("eps", -1e-6))
    )
    negative, positive, beta, eps = (
      y.astype(x.dtype) for y in (beta + negative, positive, beta, eps)
    )
    curved = jnp.where(
      x > 0,
      positive * jnp.square(x),
      negative * (jnp.expm1(jnp.minimum(x, eps)) - x),
    )
    return curved + beta * x


class Mlp(nn.Module):
  """An MLP. Parameters: up and, if gated, gate (D, F), down (F, D).

  The kind "xielu" also has parameters in the module `activation`.
  """

  options: Options

  @nn.compact
  def __call__(self, x_BLD: jax.Array, train: bool = False) -> jax.Array:
    options = self.options
    up, down = options.names
    # The mesh axis `tensor`, if any, splits the hidden units: the columns of
    # the first kernels and the rows of the last one.
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
    h_BLF = clipping.apply(hidden(name=up), x_BLD, options.clipped)
    h_BLF = checkpoint_name(h_BLF, remat.INNER)
    gate_BLF = None
    if is_gated(options.kind):
      gate_BLF = clipping.apply(hidden(name="gate"), x_BLD, options.clipped)
      gate_BLF = checkpoint_name(gate_BLF, remat.INNER)
    if options.kind == "xielu":
      h_BLF = Xielu(name="activation")(h_BLF)
    else:
      h_BLF = hidden_units(options.kind, options.clip, h_BLF, gate_BLF)
    h_BLF = nn.Dropout(options.dropout)(h_BLF, deterministic=not train)
    last = dense(
      x_BLD.shape[-1],
      kernel_init=kernels.initializer(options.out_init_std),
      dot_general=rows,
      name=down,
    )
    return clipping.apply(last, h_BLF, options.clipped)
