"""Swin: an image model of stages, with attention in shifted windows.

Version 1 is https://arxiv.org/abs/2103.14030; version 2,
https://arxiv.org/abs/2111.09883, compares queries and keys by their cosines,
computes position biases with an MLP, and has norms after the branches.

Axes: B batch, R rows, C columns, N windows, L positions in a window, S those
attended to, D channels, H heads, K head width, T offsets in a window.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError
from bigtrain.models import vit
from bigtrain.models.layers import encoder, layer_dims, mlp, options, patches
from bigtrain.models.published import stage_families

# Table 7 of the first paper.
VARIANTS: dict[str, dict[str, Any]] = {
  "tiny": dict(depths=(2, 2, 6, 2), width=96, num_heads=(3, 6, 12, 24)),
  "small": dict(depths=(2, 2, 18, 2), width=96, num_heads=(3, 6, 12, 24)),
  "base": dict(depths=(2, 2, 18, 2), width=128, num_heads=(4, 8, 16, 32)),
  "large": dict(depths=(2, 2, 18, 2), width=192, num_heads=(6, 12, 24, 48)),
}
_INIT = nn.initializers.truncated_normal(0.02)
_dense: Any = functools.partial(nn.DenseGeneral, kernel_init=_INIT)


class Model(nn.Module):
  """The model. After construction no DERIVED field is None."""

  num_classes: int | None = None  # None for a model without a head.
  variant: str | None = None  # A name in VARIANTS, such as "tiny".
  version: int = 1  # 1 or 2.
  depths: Sequence[int] = options.DERIVED  # Number of blocks of each stage.
  width: int = options.DERIVED  # D of the first stage; each doubles it.
  num_heads: Sequence[int] = options.DERIVED  # H of each stage.
  patch_size: int = 4  # Pixels on the side of a patch of the first stage.
  window: int = 7  # Patches on the side of a window, at most the stage's grid.
  image_size: int | None = None  # Pixels; version 2 computes its grids from it.
  # Of each stage, the window in which version 2's biases were trained; 0 for
  # `window`.
  pretrained_windows: Sequence[int] | None = (0, 0, 0, 0)
  mlp_ratio: float = 4.0  # Hidden width of the MLPs, divided by D.
  mlp: str = "gelu_erf"  # Activation; or another one without a gate.
  qkv_bias: bool = True  # Of queries, keys (of version 1) and values.
  norm_eps: float = 1e-5  # Added to the variance in norms from the blocks on.
  drop_path: float = 0.0  # Of the last block; grows linearly from 0.
  dtype: str = "float32"  # Of activations; parameters and features are float32.

  def __post_init__(self) -> None:
    options.take_variant(self, VARIANTS)
    heads, width = self.num_heads or (0,), self.width or 0
    divides = all(
      width and n and width * 2**stage % n == 0 for stage, n in enumerate(heads)
    )
    if len(self.depths or ()) != len(heads) or not divides:
      raise ConfigError(
        f"config.model.num_heads={self.num_heads}: expected as many as depths, "
        f"{self.depths}, that divide the width, {self.width}, twice the width, "
        "and so on; or a variant such as 'tiny'."
      )
    options.check_fields(self, "drop_path", version=(1, 2), mlp=vit.MLPS[:3])
    sizes_of_2 = ("image_size",) if self.version == 2 else ()
    options.check_sizes(self, ("width", "patch_size", "window", *sizes_of_2))
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Classifies images as models.vit does; "encoded" is (B, R, C, D)."""
    norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
    rates = np.linspace(0.0, self.drop_path, sum(self.depths)).tolist()
    p = self.patch_size
    pad = [(0, -n % p) for n in image.shape[1:3]]
    image = jnp.pad(image, [(0, 0), *pad, (0, 0)])
    conv = patches.conv(self.width, p, dtype=self.dtype, name="conv_patch")
    x_BRCD = norm(1e-5, name="patch_norm")(conv(image))
    trained_windows = tuple(self.pretrained_windows or ())
    for stage, depth in enumerate(self.depths, 1):
      if stage > 1:
        x_BRCD = self._merge(x_BRCD, stage - 1)
      side = min(x_BRCD.shape[1:3])
      if self.version == 2:
        side = max((self.image_size or 0) // p // 2 ** (stage - 1), 1)
      trained_side = 0
      if stage <= len(trained_windows):
        trained_side = trained_windows[stage - 1]
      for i in range(depth):
        # The windows of every second block are shifted by half of one.
        shift = self.window // 2 if i % 2 and side > self.window else 0
        block = Block(
          shift,
          num_heads=self.num_heads[stage - 1],
          side=min(side, self.window),
          trained_side=trained_side,
          version=self.version,
          window=self.window,
          mlp_ratio=self.mlp_ratio,
          mlp=self.mlp,
          qkv_bias=self.qkv_bias,
          norm_eps=self.norm_eps,
          dtype=self.dtype,
          name=f"stage{stage}_block{i + 1}",
        )
        x_BRCD = block(x_BRCD, rates.pop(0) if train else 0.0)
    x_BRCD = norm(self.norm_eps, name="norm")(x_BRCD)
    x = jnp.mean(x_BRCD, axis=(1, 2), dtype=jnp.float32)
    out = {"encoded": x_BRCD, "pre_logits": x}
    if self.num_classes:
      x = _dense(self.num_classes, name="head")(x)
    return x, out

  def _merge(self, x_BRCD: jax.Array, stage: int) -> jax.Array:
    """Joins 2 x 2 patches, column by column, and halves the 4 D channels."""
    pad = [(0, size % 2) for size in x_BRCD.shape[1:3]]
    x = jnp.pad(x_BRCD, [(0, 0), *pad, (0, 0)])
    D = x.shape[-1]
    parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
    x = jnp.concatenate(parts, -1)
    name = f"merge{stage}"
    dense = _dense(2 * D, use_bias=False, dtype=self.dtype, name=name)
    norm = nn.LayerNorm(1e-5, dtype=self.dtype, name=f"{name}_norm")
    return dense(norm(x)) if self.version == 1 else norm(dense(x))


def _in_windows(x: Any, w: int) -> Any:
  """Cuts (B, R, C, D) into windows with a side of w: (B, N, L, D)."""
  B, R, C, D = x.shape
  x = x.reshape(B, R // w, w, C // w, w, D).swapaxes(2, 3)
  return x.reshape(B, -1, w * w, D)


class Block(nn.Module):
  """Attention in windows and an MLP, added to the stream."""

  shift: int  # Of the windows, in patches.
  num_heads: int
  side: int  # Of a window here: `window`, or less in a small grid.
  trained_side: int  # The same in an earlier training; 0 if as now.
  # As in Model.
  version: int
  window: int
  mlp_ratio: float
  mlp: str
  qkv_bias: bool
  norm_eps: float
  dtype: str

  @nn.compact
  def __call__(self, x_BRCD: jax.Array, drop_path_rate: float) -> jax.Array:
    D = x_BRCD.shape[-1]
    pre_norm = self.version == 1

    def feed_forward(y: jax.Array) -> jax.Array:
      y = _dense(int(self.mlp_ratio * D), dtype=self.dtype, name="Dense_0")(y)
      y = mlp.KINDS[self.mlp].activation(y)
      return _dense(D, dtype=self.dtype, name="Dense_1")(y)

    for i, branch in enumerate((self._attention, feed_forward)):
      # Blocks of version 2 begin as identities.
      norm = nn.LayerNorm(
        self.norm_eps,
        scale_init=nn.initializers.ones if pre_norm else nn.initializers.zeros,
        dtype=self.dtype,
        name=f"LayerNorm_{i}",
      )
      y = branch(norm(x_BRCD)) if pre_norm else norm(branch(x_BRCD))
      if drop_path_rate:
        y = encoder.drop_path(y, drop_path_rate, self.make_rng("dropout"))
      x_BRCD += y
    return x_BRCD

  def _attention(self, x_BRCD: jax.Array) -> jax.Array:
    B, R, C, D = x_BRCD.shape
    w, shift = self.side, self.shift
    x = jnp.pad(x_BRCD, [(0, 0), (0, -R % w), (0, -C % w), (0, 0)])
    grid = x.shape[1:3]
    x = jnp.roll(x, (-shift, -shift), (1, 2))

    # After the shift, the last windows have parts of both ends of the image.
    # Positions of different parts do not attend to each other.
    row_part, column_part = (
      np.digitize(np.arange(n), (n - w, n - shift)) for n in grid
    )
    part_1RC1 = (3 * row_part[:, None] + column_part)[None, ..., None]
    (part_NL1,) = _in_windows(part_1RC1, w)
    far_NLS = part_NL1 != part_NL1.swapaxes(1, 2) if shift else None

    x = self._attend(_in_windows(x, w), far_NLS)
    x = x.reshape(B, grid[0] // w, grid[1] // w, w, w, D)
    x = x.swapaxes(2, 3).reshape(B, *grid, D)
    return jnp.roll(x, (shift, shift), (1, 2))[:, :R, :C]

  def _attend(self, x_BNLD: jax.Array, far_NLS: Any) -> jax.Array:
    D, H = x_BNLD.shape[-1], self.num_heads
    heads = functools.partial(_dense, (H, D // H), dtype=self.dtype)
    key_bias = self.qkv_bias and self.version == 1
    q_BNLHK = heads(use_bias=self.qkv_bias, name="query")(x_BNLD)
    k_BNSHK = heads(use_bias=key_bias, name="key")(x_BNLD)
    v_BNSHK = heads(use_bias=self.qkv_bias, name="value")(x_BNLD)
    scale: Any = (D // H) ** -0.5
    if self.version == 2:
      q_BNLHK, k_BNSHK = _direction(q_BNLHK), _direction(k_BNSHK)
      init = nn.initializers.constant(math.log(10))
      scale = self.param("logit_scale", init, (H, 1, 1))
      scale = jnp.exp(jnp.minimum(scale, math.log(100)))
    scores = jnp.einsum(
      "bnlhk,bnshk->bnhls", q_BNLHK, k_BNSHK, preferred_element_type=jnp.float32
    )
    scores = scores * scale + self._bias_HLS()
    if far_NLS is not None:  # transformers adds -100, in version 2 twice.
      scores = jnp.where(far_NLS[:, None], scores - 100 * self.version, scores)
    weights = nn.softmax(scores).astype(v_BNSHK.dtype)
    x = jnp.einsum("bnhls,bnshk->bnlhk", weights, v_BNSHK)
    return _dense(D, axis=(-2, -1), dtype=self.dtype, name="out")(x)

  def _bias_HLS(self) -> jax.Array:
    """Float32 biases that depend on the offset of two positions in a window."""
    H, w = self.num_heads, self.side
    # Offsets along one axis: from -(window - 1) to window - 1.
    num = 2 * (self.window if self.version == 1 else w) - 1
    if self.version == 1:
      table_TH = self.param("relative_bias", _INIT, (num**2, H))
    else:
      # Coordinates grow with the logarithm of an offset: 1 for the largest of
      # the training, where the scaled offset is 8 and log2(8 + 1) about 3.
      reach = max((self.trained_side or w) - 1, 1)
      at = np.arange(-(num // 2), num // 2 + 1) * 8 / reach
      at = (np.sign(at) * np.log2(np.abs(at) + 1) / 3).astype(np.float32)
      offset_T2 = at[np.indices((num, num)).reshape(2, -1).T]
      hidden = nn.relu(_dense(512, name="bias_mlp_0")(offset_T2))
      table_TH = _dense(H, use_bias=False, name="bias_mlp_1")(hidden)
      table_TH = 16 * nn.sigmoid(table_TH)
    place_L = np.add(*np.ogrid[: num * w : num, :w]).reshape(-1)
    index_LS = place_L[:, None] - place_L + num**2 // 2
    return jnp.moveaxis(table_TH[index_LS], -1, 0)


def _direction(x: jax.Array) -> jax.Array:
  """Vectors scaled to length 1; zero vectors stay zero."""
  x = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(x), -1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


DIMS: dict[str, str] = {
  r"conv_patch/kernel": "height width channels -> D",
  r"merge\d/kernel": "D -> D",
  r".*/relative_bias": "positions -> H",
  r".*/logit_scale": "H 1; 1",
  r".*/bias_mlp_0/kernel": "coordinates -> hidden",
  r".*/bias_mlp_1/kernel": "hidden -> H",
  r"head/kernel": "D -> V",
  r"head/bias": "V",
  **layer_dims.LAYERS,
}
param_dims = dims.of_all(DIMS)
from_published = functools.partial(
  stage_families.read, stage_families.SWIN, DIMS
)
to_published = functools.partial(stage_families.SWIN.export, DIMS)
published_fields = stage_families.SWIN.fields
