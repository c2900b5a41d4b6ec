"""Inputs of each layer beside the stream: per-layer embeddings, as in Gemma 4.

Every layer has a small embedding of each token. A projection of the token's
embedding in the stream is added to it. The last branch of a block gates these
inputs and adds them to the stream (causal_block.py).

Axes: B batch, L length, D model width, N layers, I features of a layer's input,
V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from bigtrain import sharding
from bigtrain.models.layers import kernels, options, rms_norm


class Options(NamedTuple):
  """config.model.layer_inputs."""

  dim: int  # I.
  vocab_size: int | None = None  # V of their table; the model's if None.


def read(given: Options | Mapping[str, Any] | None, key: str) -> Options | None:
  """Checks config.model.layer_inputs."""
  count = dict(least=1, whole=True)
  return options.read_tuple(Options, given, key, dim=count, vocab_size=count)


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
  def __call__(self, tokens_BL: jax.Array, x_BLD: jax.Array) -> jax.Array:
    """Returns [B, L, N, I]; `x_BLD` has the tokens' embeddings."""
    N, I = self.depth, self.dim
    D = x_BLD.shape[-1]
    init = nn.initializers.normal(self.init_std)
    table = self.param("embedding", init, (self.vocab_size, N * I))
    embedded = sharding.lookup(table, tokens_BL, self.dtype) * I**0.5
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
