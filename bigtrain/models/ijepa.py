"""I-JEPA, https://arxiv.org/abs/2301.08243: a ViT and a predictor of features.

The ViT sees some of the patches of an image. From their features, a narrow
transformer predicts the features of other blocks of patches. The ViT's
parameters have the names of models/vit.py, so that a `vit` can start from them;
the predictor's begin with "predictor/".

Axes: B batch, P patches, K patches that the ViT sees, N blocks, T patches of a
block, D width, E width of the predictor.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.models import vit
from bigtrain.models.layers import encoder, masks, options, positions


class Model(vit.Model):
  """I-JEPA. If it is called without `target_BNT`, it is a ViT."""

  posemb: str = "sincos2d"  # No other: blocks have positions of any image.
  predictor_width: int = 384  # E; only training uses the predictor.
  predictor_depth: int = 12  # Its number of blocks.
  predictor_num_heads: int = options.DERIVED  # By default the ViT's.
  predictor_mlp_dim: int = options.DERIVED  # By default 4 E.

  def __post_init__(self) -> None:
    super().__post_init__()
    defaults = dict(num_heads=self.num_heads, mlp_dim=4 * self.predictor_width)
    for name, value in defaults.items():
      if getattr(self, f"predictor_{name}") is None:
        options.set_fields(self, {f"predictor_{name}": value})
    for name in ("width", "depth", "num_heads", "mlp_dim"):
      value = getattr(self, f"predictor_{name}")
      check_number(f"config.model.predictor_{name}", value, least=1, whole=True)
    if self.predictor_width % self.predictor_num_heads:
      raise ConfigError(
        f"config.model.predictor_num_heads={self.predictor_num_heads}: does "
        f"not divide predictor_width={self.predictor_width}."
      )
    if self.posemb != "sincos2d":
      raise ConfigError(
        f"config.model.posemb={self.posemb!r}: expected 'sincos2d', "
        "which gives the predictor the positions of patches."
      )

  @nn.compact
  def __call__(
    self,
    image: jax.Array,
    *,
    kept_BK: jax.Array | None = None,
    real_BK: jax.Array | None = None,
    target_BNT: jax.Array | None = None,
    real_BNT: jax.Array | None = None,
    train: bool = False,
    **others: Any,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Like a ViT's; with `target_BNT` also "predicted", float32 (B, N, T, D).

    Args:
      target_BNT: int, the patches of each block. Needs `kept_BK`.
      real_BNT: bool, False for patches that are padding.
    """
    p, q = self.patch_size  # type: ignore[misc]
    grid = image.shape[1] // p, image.shape[2] // q
    if self.is_initializing():  # Only then the predictor's parameters are made.
      kept_BK = jnp.zeros((len(image), 1), jnp.int32)
      target_BNT = kept_BK[:, None]
    x, out = super().__call__(
      image, kept_BK=kept_BK, real_BK=real_BK, train=train, **others
    )
    if target_BNT is None:
      return x, out
    if kept_BK is None:
      raise ValueError("target_BNT without kept_BK")
    if real_BK is None:
      real_BK = jnp.ones(kept_BK.shape, bool)
    if real_BNT is None:
      real_BNT = jnp.ones(target_BNT.shape, bool)
    predictor = Predictor(
      encoder.Options(
        mlp_dim=self.predictor_mlp_dim,
        num_heads=self.predictor_num_heads,
        attention=self.attention,
        norm_eps=self.norm_eps,
        mlp=self.mlp,
        dtype=self.dtype,
      ),
      width=self.predictor_width,
      depth=self.predictor_depth,
      scan=self.scan,
      remat_policy=self.remat_policy,
      out_dim=self.width,
      name="predictor",
    )
    predicted = predictor(
      out["encoded"], kept_BK, real_BK, target_BNT, real_BNT, grid, train
    )
    return x, {**out, "predicted": predicted}


class Predictor(nn.Module):
  """Predicts the features of blocks of patches from those of other patches.

  Each block is predicted independently: it sees the context and its own mask
  tokens, whose positions say which patches the block has.
  """

  options: encoder.Options
  width: int
  depth: int
  scan: bool
  remat_policy: str
  out_dim: int  # D.

  @nn.compact
  def __call__(
    self,
    context_BKD: jax.Array,
    kept_BK: jax.Array,
    real_BK: jax.Array,
    target_BNT: jax.Array,
    real_BNT: jax.Array,
    grid: tuple[int, int],
    train: bool,
  ) -> jax.Array:
    """Returns float32 (B, N, T, D)."""
    B, N, T = target_BNT.shape
    K, E, dtype = kept_BK.shape[1], self.width, self.options.dtype
    posemb_PE = jnp.asarray(positions.sincos_2d(grid, E))[0]
    context_BKE = nn.Dense(E, dtype=dtype, name="embed")(context_BKD)
    context_BKE += posemb_PE[kept_BK].astype(context_BKE.dtype)
    init = nn.initializers.truncated_normal(0.02)
    mask_11E = self.param("mask_token", init, (1, 1, E))
    target_BNTE = (mask_11E[None] + posemb_PE[target_BNT]).astype(
      context_BKE.dtype
    )

    def for_each_block(x_BK: jax.Array) -> jax.Array:
      return jnp.repeat(x_BK, N, axis=0)

    def as_batch(x_BNT: jax.Array) -> jax.Array:
      return x_BNT.reshape(B * N, *x_BNT.shape[2:])

    x_MLE = jnp.concatenate(
      [for_each_block(context_BKE), as_batch(target_BNTE)], axis=1
    )
    real_ML = jnp.concatenate(
      [for_each_block(real_BK), as_batch(real_BNT)], axis=1
    )
    x_MLE = encoder.Encoder(
      self.options,
      depth=self.depth,
      scan=self.scan,
      remat_policy=self.remat_policy,
      name="Transformer",
    )(x_MLE, mask=masks.Mask(real_BS=real_ML), train=train)
    y_MTD = nn.Dense(self.out_dim, dtype=dtype, name="out_proj")(x_MLE[:, K:])
    return y_MTD.astype(jnp.float32).reshape(B, N, T, self.out_dim)


DIMS: dict[str, str] = {
  r"predictor/embed/kernel": "D -> D",
  r"predictor/mask_token": "1 1 D",
  r"predictor/out_proj/kernel": "D -> D",
  **vit.DIMS,
}
param_dims = dims.of_all(DIMS)
