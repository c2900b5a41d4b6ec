"""Masked autoencoder, https://arxiv.org/abs/2111.06377.

A ViT sees some of the patches of an image, and a small decoder predicts the
pixels of the others. The ViT's parameters have the names of models/vit.py, so
that a `vit` can start from them; the decoder's begin with "decoder/".

Axes: B batch, P patches, K patches that the ViT sees, D width of the decoder.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_number, nearest_divisors
from bigtrain.models import vit
from bigtrain.models.layers import (
  encoder,
  options,
  patches,
  positions,
)


class Model(vit.Model):
  """MAE. If it is called without `kept_BK`, it is a ViT."""

  pool_type: str = "tok"  # No other: the decoder reads the class token.
  decoder_width: int = 512  # Width of the decoder, which only training uses.
  decoder_depth: int = 8  # Its number of blocks.
  decoder_num_heads: int = 16  # Its number of heads.
  decoder_mlp_dim: int = options.DERIVED  # By default 4 times the width.

  def __post_init__(self) -> None:
    if self.decoder_mlp_dim is None:
      options.set_fields(self, {"decoder_mlp_dim": 4 * self.decoder_width})
    super().__post_init__()
    for name in ("width", "depth", "num_heads", "mlp_dim"):
      value = getattr(self, f"decoder_{name}")
      check_number(f"config.model.decoder_{name}", value, least=1, whole=True)
    width, heads = self.decoder_width, self.decoder_num_heads
    if width % heads:
      raise ConfigError(
        f"config.model.decoder_num_heads={heads}: does not divide "
        f"decoder_width={width}; the nearest that do: "
        f"{nearest_divisors(heads, width)}."
      )
    if self.pool_type != "tok":
      raise ConfigError(
        f"config.model.pool_type={self.pool_type!r}: expected 'tok'; the "
        "decoder reads the class token. Evaluators can average the patches: "
        "pred_kw=dict(layer='encoded', pool=True)."
      )

  @nn.compact
  def __call__(
    self,
    image: jax.Array,
    *,
    kept_BK: jax.Array | None = None,
    train: bool = False,
    **others: Any,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Like a ViT's; with `kept_BK` also "pixels", float32 (B, P, patch)."""
    num_patches = len(self.patches(image[:1])[0])
    if self.is_initializing():  # Only then the decoder's parameters are made.
      shape = (len(image), num_patches)
      kept_BK = jnp.broadcast_to(jnp.arange(num_patches), shape)
    x, out = super().__call__(image, kept_BK=kept_BK, train=train, **others)
    if kept_BK is None:
      return x, out
    p, q = self._patch()
    decoder = Decoder(
      encoder.Options(
        mlp_dim=self.decoder_mlp_dim,
        num_heads=self.decoder_num_heads,
        attention=self.attention,
        norm_eps=self.norm_eps,
        mlp=self.mlp,
        dtype=self.dtype,
      ),
      width=self.decoder_width,
      depth=self.decoder_depth,
      scan=self.scan,
      remat_policy=self.remat_policy,
      posemb=self.posemb,
      out_dim=p * q * image.shape[-1],
      name="decoder",
    )
    rows, columns = image.shape[1] // p, image.shape[2] // q
    class_B1D = out["head_input"][:, None].astype(out["encoded"].dtype)
    seen_BLD = jnp.concatenate([class_B1D, out["encoded"]], axis=1)
    return x, {
      **out,
      "pixels": decoder(seen_BLD, kept_BK, (rows, columns), train),
    }

  def _patch(self) -> tuple[int, int]:
    height, width = self.patch_size  # type: ignore[misc]
    return height, width

  def patches(self, image: jax.Array) -> jax.Array:
    """The pixels of each patch, (B, P, patch)."""
    x = patches.cut(image, self._patch())
    return x.reshape(len(x), -1, x.shape[-1])

  def image(self, pixels: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `patches`, for images of a shape (height, width, C)."""
    p, q = self._patch()
    h, w = shape[0] // p, shape[1] // q
    return patches.join(pixels.reshape(len(pixels), h, w, -1), (p, q))


class Decoder(nn.Module):
  """Predicts the pixels of all patches from the encodings of some."""

  options: encoder.Options
  width: int
  depth: int
  scan: bool
  remat_policy: str
  posemb: str
  out_dim: int  # Number of values of a patch.

  @nn.compact
  def __call__(
    self,
    seen_BLD: jax.Array,
    kept_BK: jax.Array,
    grid: tuple[int, int],
    train: bool,
  ) -> jax.Array:
    """Encodings of the class token and the patches `kept_BK` -> (B, P, C)."""
    D, P = self.width, grid[0] * grid[1]
    dtype = self.options.dtype
    x_BLD = nn.Dense(D, dtype=dtype, name="embed")(seen_BLD)
    init = nn.initializers.normal(0.02)
    mask_11D = self.param("mask_token", init, (1, 1, D)).astype(x_BLD.dtype)
    masked_BPD = jnp.broadcast_to(mask_11D, (len(x_BLD), P, D))
    place = jax.vmap(lambda x_PD, i_K, seen_KD: x_PD.at[i_K].set(seen_KD))
    x_BPD = place(masked_BPD, kept_BK, x_BLD[:, 1:])
    x_BLD = jnp.concatenate([x_BLD[:, :1], x_BPD], axis=1)
    if self.posemb == "learn":
      init = nn.initializers.normal(D**-0.5)
      posemb_1LD = self.param("pos_embedding", init, (1, 1 + P, D))
    else:  # That of the class token is 0.
      posemb_1PD = positions.sincos_2d(grid, D)
      posemb_1LD = jnp.pad(posemb_1PD, ((0, 0), (1, 0), (0, 0)))
    x_BLD += posemb_1LD.astype(x_BLD.dtype)
    x_BLD = encoder.Encoder(
      self.options,
      depth=self.depth,
      scan=self.scan,
      remat_policy=self.remat_policy,
      name="Transformer",
    )(x_BLD, train=train)
    pixels = nn.Dense(self.out_dim, dtype=dtype, name="pixels")(x_BLD[:, 1:])
    return pixels.astype(jnp.float32)


DIMS: dict[str, str] = {
  r"decoder/embed/kernel": "D -> D",
  r"decoder/mask_token": "1 1 D",
  r"decoder/pos_embedding": "1 positions -> D",
  r"decoder/pixels/kernel": "D -> V",
  r"decoder/pixels/bias": "V",
  **vit.DIMS,
}
param_dims = dims.of_all(DIMS)
