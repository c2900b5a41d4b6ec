"""Inputs of layers besides the stream: per-layer embeddings, as in Gemma 4.

Every layer has a small embedding of each token, to which a projection of the
token's embedding in the stream is added. The last branch of a block gates these
inputs and adds them to the stream (causal_block.py).

Axes: B batch, L length, D model width, N layers, I features of a layer's input,
V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import kernels, options, rms_norm


class Options(NamedTuple):
  """config.model.layer_inputs."""

  dim: int  # I.
  vocab_size: int | None = None  # V of their table; the model's if None.
  image_id: int = 0  # Id that stands for tokens whose embeddings are given.


def read(given: Options | Mapping[str, Any] | None, key: str) -> Options | None:
  """Checks config.model.layer_inputs."""
  count = dict(least=1, whole=True)
  return options.read_tuple(
    Options,
    given,
    key,
    dim=count,
    vocab_size=count,
    image_id=dict(least=0, whole=True),
  )


class LayerInputs(nn.Module):
  """The inputs of all layers.

  Parameters: embedding (V, N I), projection/kernel (D, N I), norm/scale (I).
  """

  dim: int  # I.
  vocab_size: int  # V.
  depth: int  # N.
  norm_eps: float
  init_std: float
  dtype: str

  @nn.compact
  def __call__(
    self,
    tokens_BL: jax.Array,
    x_BLD: jax.Array,
    fixed_BL: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, L, N, I].

    Args:
      x_BLD: the tokens' embeddings.
      fixed_BL: bool, True for tokens whose entries of the table are not
        trained.
    """
    N, I = self.depth, self.dim
    D = x_BLD.shape[-1]
    init = nn.initializers.normal(self.init_std)
    table = self.param("embedding", init, (self.vocab_size, N * I))
    embedded = sharding.lookup(table, tokens_BL, self.dtype) * I**0.5
    if fixed_BL is not None:
      fixed = jax.lax.stop_gradient(embedded)
      embedded = jnp.where(fixed_BL[..., None], fixed, embedded)
    projected = nn.Dense(
      N * I,
      use_bias=False,
      dtype=self.dtype,
      kernel_init=kernels.initializer(self.init_std),
      name="projection",
    )(x_BLD)
    shape = (*tokens_BL.shape, N, I)
    norm = rms_norm.RMSNorm((I,), self.norm_eps, dtype=self.dtype, name="norm")
    projected_BLNI = norm(projected.reshape(shape) * D**-0.5)
    # Both have a mean square of about 1; so does their sum.
    return (projected_BLNI + embedded.reshape(shape)) * 2**-0.5
