"""Multi-token prediction, as in DeepSeek V3 (arXiv 2412.19437, section 2.2).

After the stack, module d predicts the token d further than the model does. It
reads the hidden states of the module before it (the first one, those of the
model) and the embeddings of the tokens d ahead, and applies one block.
Embedding and head are the model's. In training, each module adds a loss
(losses/token_losses.py). In generation, modules draft tokens that the model
then checks (text/speculation.py).

Axes: B batch, L length, D model width.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import (
  causal_block,
  kernels,
  kv_cache,
  masks,
  remat,
)

# Index of `train` in the arguments of causal_block.Block, from self on.
_TRAIN = 7


class Modules(nn.Module):
  """All modules. Their parameters are blocks_0, blocks_1, ..."""

  options: causal_block.Options  # Of their blocks.
  remat_policy: str = "none"

  @nn.compact
  def __call__(
    self,
    number: int,
    hidden_BLD: jax.Array,
    embedded_BLD: jax.Array,
    tables: causal_block.Tables,
    mask: masks.Mask,
    real_BL: jax.Array | None,
    cache: kv_cache.Caches | None = None,
    start: Any = 0,
    train: bool = False,
  ) -> tuple[jax.Array, kv_cache.Caches | None, Any]:
    """Returns (hidden states, new cache, the experts' statistics or None).

    Args:
      hidden_BLD: normed outputs of the model, or of the module before.
      embedded_BLD: embeddings of the tokens `number + 1` ahead.
    """
    module = _Module(self.options, self.remat_policy, name=f"blocks_{number}")
    if cache is not None:
      cache = cache.reading(start, hidden_BLD.shape[1], real_BL)
    args = tables, mask, real_BL, start, train
    x_BLD, cache, stats = module(number, hidden_BLD, embedded_BLD, cache, *args)
    return x_BLD, None if cache is None else cache.after_call(), stats

  @nn.nowrap
  def init_cache(
    self, batch_size: int, max_len: int, kind: kv_cache.Kind, number: int
  ) -> kv_cache.Caches:
    """An empty cache of `number` modules."""
    kinds = [0] * number
    dtype = self.options.dtype
    return kv_cache.of_layers(batch_size, max_len, [kind], kinds, dtype)


class _Module(nn.Module):
  """One module."""

  options: causal_block.Options
  remat_policy: str

  @nn.compact
  def __call__(
    self,
    number: int,
    hidden_BLD: jax.Array,
    embedded_BLD: jax.Array,
    cache: kv_cache.Caches | None,
    *args: Any,
  ) -> tuple[jax.Array, kv_cache.Caches | None, Any]:
    options = self.options
    D = hidden_BLD.shape[-1]
    both_BLD = [
      causal_block.norm(options, D, "embedding_norm")(embedded_BLD),
      causal_block.norm(options, D, "hidden_norm")(hidden_BLD),
    ]
    x_BLD = nn.Dense(
      D,
      use_bias=False,
      dtype=options.dtype,
      kernel_init=kernels.initializer(options.init_std),
      name="projection",
    )(jnp.concatenate(both_BLD, axis=-1))
    # In training, the number of the last layer, which drop_path depends on.
    layer = options.depth - 1
    if cache is not None:
      options, layer = options._replace(cache=0), number
    policy, _ = remat.read(self.remat_policy)
    block = remat.block_class(causal_block.Block, False, policy, train=_TRAIN)
    (x_BLD, cache, _), stats = block(options, name="block")(
      (sharding.stream(x_BLD), cache, {}), layer, *args
    )
    return causal_block.norm(options, D, "norm")(x_BLD), cache, stats
