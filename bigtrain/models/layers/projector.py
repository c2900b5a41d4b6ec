"""The projector of models that read pictures.

It turns the features of an image tower, one vector for each patch, into
embeddings of the decoder. On the way, squares of neighbouring patches may
become a single embedding: their features are averaged (`pool`) or joined
(`merge`). A norm and one or two linear layers follow.

Axes: P patches, T image tokens of a picture, D width of the decoder.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.models.layers import mlp, options, rms_norm

ACTIVATIONS = ("gelu", "gelu_erf", "gelu_quick", "relu", "silu", "swiglu")
NORMS = ("offset_rmsnorm", "rmsnorm", "plain_rmsnorm", "layernorm")


class Options(NamedTuple):
  """config.model.projector. Without options, it is one linear layer."""

  # Side of the squares of patches that are averaged, as in Gemma 3.
  pool: int = 1
  # Side of the squares of patches whose features are joined, as in Idefics 3.
  merge: int = 1
  # Whether a linear layer brings these back to the width of one patch, as in
  # Mistral 3; its inputs are channel by channel.
  merge_layer: bool = False
  norm_eps: float | None = None  # Of a norm; None without one.
  # "rmsnorm", "layernorm", "offset_rmsnorm" with Gemma's offset, or
  # "plain_rmsnorm" without a scale.
  norm: str = "offset_rmsnorm"
  # Whether the norm is of each patch, before their features are joined.
  norm_patches: bool = False
  # Activation between two linear layers, as in LLaVA; None for one layer. With
  # "swiglu", the second half of the first layer's features gates the first.
  mlp: str | None = None
  hidden: int | None = None  # Width of the first layer; the decoder's if None.
  use_bias: bool = True

  @property
  def side(self) -> int:
    """Side of the squares of patches that become one embedding."""
    return self.pool * self.merge


def read(given: Any, key: str) -> Options:
  """Checks config.model.projector."""
  result: Options = options.read_tuple(
    Options,
    given or {},
    key,
    pool=dict(least=1, whole=True),
    merge=dict(least=1, whole=True),
    norm_eps=dict(above=0),
    hidden=dict(least=1, whole=True),
  )
  if result.mlp is not None:
    check_choice(f"{key}.mlp", result.mlp, ACTIVATIONS)
  check_choice(f"{key}.norm", result.norm, NORMS)
  return result


class Projector(nn.Module):
  """Projects the features of a tower's output."""

  options: Options
  width: int  # D.
  dtype: str

  @nn.compact
  def __call__(
    self, x: jax.Array, size: tuple[int, ...] | None = None
  ) -> jax.Array:
    """Returns (pictures, T, D).

    Args:
      x: (pictures, P, width of the tower), row by row.
      size: height and width of the pictures in pixels; None if the patches of
        each square that is joined or averaged follow each other.
    """
    given = self.options
    if given.norm_patches:
      x = self._normed(x)
    if size is None and given.pool > 1:
      squares = x.reshape(len(x), -1, given.pool**2, x.shape[-1])
      x = jnp.mean(squares, axis=2)
    elif size is None:
      x = x.reshape(len(x), x.shape[1] // given.merge**2, -1)
    elif given.side > 1:
      x = _by_squares(x, size, given)
    if given.merge_layer:
      x = self._merged(x)
    if not given.norm_patches:
      x = self._normed(x)
    dense = functools.partial(
      nn.Dense, use_bias=given.use_bias, dtype=self.dtype
    )
    if given.mlp is None:
      return dense(self.width, name="linear_0")(x)
    x = dense(given.hidden or self.width, name="linear_0")(x)
    kind = mlp.KINDS[given.mlp]
    if kind.gated:
      x, gate = jnp.split(x, 2, axis=-1)
      x = x * kind.activation(gate)
    else:
      x = kind.activation(x)
    return dense(self.width, name="linear_1")(x)

  @nn.nowrap
  def _merged(self, x: jax.Array) -> jax.Array:
    """Brings joined features back to the width of one patch."""
    patches = self.options.merge**2
    width = x.shape[-1] // patches
    # Joined features are patch by patch; those of the published layer are
    # channel by channel.
    x = x.reshape(*x.shape[:-1], patches, width).swapaxes(-1, -2)
    x = x.reshape(*x.shape[:-2], -1)
    dense = nn.Dense(
      width, use_bias=False, dtype=self.dtype, name="merge_layer"
    )
    return dense(x)

  @nn.nowrap
  def _normed(self, x: jax.Array) -> jax.Array:
    eps, kind = self.options.norm_eps, self.options.norm
    if eps is None:
      return x
    if kind == "layernorm":
      return nn.LayerNorm(eps, self.dtype, name="norm")(x)
    offset = 1.0 if kind == "offset_rmsnorm" else 0.0
    return rms_norm.RMSNorm(
      x.shape[-1:],
      eps,
      offset=offset,
      scaled=kind != "plain_rmsnorm",
      dtype=self.dtype,
      name="norm",
    )(x)


class Projectors(nn.Module):
  """A projector for each of several inner layers of the tower."""

  options: Options
  width: int  # D.
  dtype: str

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """(pictures, layers, P, width of the tower) to (pictures, layers, T, D)."""
    # Left to itself, XLA splits the features by width and gathers them for the
    # norms.
    x = sharding.over_batch(x)
    layers = []
    for i in range(x.shape[1]):
      projector = Projector(
        self.options, self.width, self.dtype, name=f"blocks_{i}"
      )
      layers.append(projector(x[:, i]))
    return jnp.stack(layers, axis=1)


def _by_squares(
  x: jax.Array, size: tuple[int, ...], given: Options
) -> jax.Array:
  """Averages the patches of squares, then joins the features of squares."""
  n, P = x.shape[:2]
  # Patches are square in pixels, so the grid has the proportions of a picture.
  rows = round((P * size[0] / size[1]) ** 0.5)
  columns = P // rows
  for name, side in (("pool", given.pool), ("merge", given.merge)):
    if rows * columns != P or rows % side or columns % side:
      raise ConfigError(
        f"config.model.projector.{name}={side}: expected a divisor of the rows "
        f"and columns of patches, got {rows} x {columns}."
      )
    rows, columns = rows // side, columns // side
    x = x.reshape(n, rows, side, columns, side, -1)
    if name == "pool":
      x = jnp.mean(x, axis=(2, 4))
    else:
      x = x.transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, rows * columns, -1)
    P = rows * columns
  return x
