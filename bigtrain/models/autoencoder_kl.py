"""The autoencoder of latent diffusion (arXiv 2112.10752), as in diffusers.

An encoder turns an image into the mean and the standard deviation of latents,
on a grid with fewer rows and columns; a decoder turns latents into an image. It
is the first stage of Stable Diffusion, DiT and SiT. Modules are named as in
diffusers' AutoencoderKL.

Axes: B batch, H rows, W columns, C channels, P positions of the grid.
"""

import functools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import options
from bigtrain.models.published import layouts
from bigtrain.models.published.families import FILE, Field

_CLASS = "AutoencoderKL"
_NORM_EPS = 1e-6
_LOG_VARIANCES = (-30.0, 20.0)  # Bounds of the latents' log variance.
# {key of config.json: field}.
_KEYS = {
  "in_channels": "channels",
  "latent_channels": "latent_channels",
  "block_out_channels": "widths",
  "layers_per_block": "layers_per_block",
  "norm_num_groups": "norm_groups",
  "mid_block_add_attention": "middle_attention",
  "use_quant_conv": "quant_conv",
  "use_post_quant_conv": "post_quant_conv",
  "scaling_factor": "scale",
  "shift_factor": "shift",
}
# Keys with the only value that this model computes.
_REQUIRED = {
  "act_fn": "silu",
  "latents_mean": None,
  "latents_std": None,
  "down_block_types": "DownEncoderBlock2D",
  "up_block_types": "UpDecoderBlock2D",
}
_HARMLESS = ("force_upcast", "out_channels", "sample_size")


class Model(nn.Module, kw_only=True):
  """The autoencoder, by default with the sizes of Stable Diffusion 1 and 2."""

  channels: int = 3  # Of images.
  latent_channels: int = 4  # Of latents.
  # Numbers of channels of the stages. Each stage but the last of the encoder
  # halves the rows and columns.
  widths: Sequence[int] = (128, 256, 512, 512)
  layers_per_block: int = 2  # In a stage; the decoder has one more.
  norm_groups: int = 32  # Number of groups of the norms.
  middle_attention: bool = True  # Whether the middle has attention.
  quant_conv: bool = True  # Whether a convolution follows the encoder.
  post_quant_conv: bool = True  # Whether one precedes the decoder.
  scale: float = 0.18215  # Latents minus `shift`, times this, have variance 1.
  shift: float | None = None  # Subtracted from latents; None for 0.
  dtype: str = "float32"  # Of activations; parameters and results are float32.

  def __post_init__(self) -> None:
    names = ("channels", "latent_channels", "layers_per_block", "norm_groups")
    options.check_sizes(self, names)
    options.check_fields(self)
    for width in self.widths:
      if width % self.norm_groups:
        raise ConfigError(
          f"config.model.norm_groups: {self.norm_groups} does not divide the "
          f"width {width}."
        )
    super().__post_init__()

  def setup(self) -> None:
    sizes = options.pick(Options, self, widths=tuple(self.widths))
    self.encoder = Encoder(sizes)
    self.decoder = Decoder(sizes)
    conv = functools.partial(nn.Conv, kernel_size=(1, 1), dtype=self.dtype)
    if self.quant_conv:
      self.after_encoder = conv(2 * self.latent_channels, name="quant_conv")
    if self.post_quant_conv:
      self.before_decoder = conv(self.latent_channels, name="post_quant_conv")

  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (the image of the latents' mean, {"encoded": the mean})."""
    del train
    mean, _ = self.encode(image)
    return self.decode(mean), {"encoded": mean}

  def encode(self, image: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Images -> (mean, standard deviation) of latents (B, h, w, C)."""
    x = self.encoder(jnp.asarray(image, self.dtype))
    if self.quant_conv:
      x = self.after_encoder(x)
    mean, log_variance = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return mean, jnp.exp(jnp.clip(log_variance, *_LOG_VARIANCES) / 2)

  def decode(self, latents: jax.Array) -> jax.Array:
    x = jnp.asarray(latents, self.dtype)
    if self.post_quant_conv:
      x = self.before_decoder(x)
    return self.decoder(x).astype(jnp.float32)

  @nn.nowrap
  def scaled(self, latents: jax.Array) -> jax.Array:
    """Latents as a diffusion model sees them, with a variance of about 1."""
    return (latents - (self.shift or 0.0)) * self.scale

  @nn.nowrap
  def unscaled(self, latents: jax.Array) -> jax.Array:
    return latents / self.scale + (self.shift or 0.0)


class Options(NamedTuple):
  """The fields of the model that its parts need."""

  channels: int
  latent_channels: int
  widths: tuple[int, ...]
  layers_per_block: int
  norm_groups: int
  middle_attention: bool
  dtype: str


def _conv(sizes: Options, width: int, name: str, side: int = 3) -> nn.Conv:
  return nn.Conv(width, (side, side), dtype=sizes.dtype, name=name)


def _norm(sizes: Options, name: str) -> nn.GroupNorm:
  return nn.GroupNorm(
    sizes.norm_groups,
    epsilon=_NORM_EPS,
    dtype=sizes.dtype,
    use_fast_variance=False,
    name=name,
  )


class Encoder(nn.Module):
  """Maps images to means and log-variances of latents, concatenated."""

  sizes: Options

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    sizes = self.sizes
    x = _conv(sizes, sizes.widths[0], "conv_in")(x_BHWC)
    for i, width in enumerate(sizes.widths):
      for j in range(sizes.layers_per_block):
        x = Resnet(sizes, width, name=f"down_blocks_{i}_resnets_{j}")(x)
      if i < len(sizes.widths) - 1:
        x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
        name = f"down_blocks_{i}_downsamplers_0"
        x = nn.Conv(
          width,
          (3, 3),
          strides=2,
          padding="VALID",
          dtype=sizes.dtype,
          name=name,
        )(x)
    x = middle(sizes, sizes.widths[-1], x)
    x = nn.silu(_norm(sizes, "conv_norm_out")(x))
    return _conv(sizes, 2 * sizes.latent_channels, "conv_out")(x)


class Decoder(nn.Module):
  """Maps latents to images."""

  sizes: Options

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    sizes = self.sizes
    widths = tuple(reversed(sizes.widths))
    x = _conv(sizes, widths[0], "conv_in")(x_BHWC)
    x = middle(sizes, widths[0], x)
    for i, width in enumerate(widths):
      for j in range(sizes.layers_per_block + 1):
        x = Resnet(sizes, width, name=f"up_blocks_{i}_resnets_{j}")(x)
      if i < len(widths) - 1:
        x = x.repeat(2, axis=1).repeat(2, axis=2)
        x = _conv(sizes, width, f"up_blocks_{i}_upsamplers_0")(x)
    x = nn.silu(_norm(sizes, "conv_norm_out")(x))
    return _conv(sizes, sizes.channels, "conv_out")(x)


def middle(sizes: Options, width: int, x: jax.Array) -> jax.Array:
  """The blocks at the lowest resolution, in the encoder and the decoder."""
  x = Resnet(sizes, width, name="mid_block_resnets_0")(x)
  if sizes.middle_attention:
    x = Attention(sizes, name="mid_block_attentions_0")(x)
  return Resnet(sizes, width, name="mid_block_resnets_1")(x)


class Resnet(nn.Module):
  """A residual block: two convolutions with norms."""

  sizes: Options
  width: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = nn.silu(_norm(self.sizes, "norm1")(x))
    y = _conv(self.sizes, self.width, "conv1")(y)
    y = nn.silu(_norm(self.sizes, "norm2")(y))
    y = _conv(self.sizes, self.width, "conv2")(y)
    if x.shape[-1] != self.width:
      x = _conv(self.sizes, self.width, "conv_shortcut", side=1)(x)
    return x + y


class Attention(nn.Module):
  """Attention with one head over all positions."""

  sizes: Options

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    shape, C = x_BHWC.shape, x_BHWC.shape[-1]
    y_BPC = _norm(self.sizes, "group_norm")(x_BHWC)
    y_BPC = y_BPC.reshape(shape[0], -1, C)
    dense = functools.partial(nn.Dense, C, dtype=self.sizes.dtype)
    q, k, v = (dense(name=name)(y_BPC) for name in ("to_q", "to_k", "to_v"))
    scores_BPP = jnp.einsum("bpc,bsc->bps", q, k).astype(jnp.float32)
    weights_BPP = jax.nn.softmax(scores_BPP / np.sqrt(C), axis=-1)
    y_BPC = jnp.einsum("bps,bsc->bpc", weights_BPP.astype(v.dtype), v)
    return x_BHWC + dense(name="to_out_0")(y_BPC).reshape(shape)


# Published folders.


def published_fields(
  path: str, unread: Collection[str] = ()
) -> layouts.Fields | None:
  """The fields of a folder of diffusers; None without its config.json."""
  folder = path if os.path.isdir(path) else os.path.dirname(path)
  file = os.path.join(folder, FILE)
  if not os.path.isfile(file):
    return None
  try:
    with open(file) as f:
      values = json.load(f)
  except (OSError, ValueError) as e:
    raise ConfigError(f"{file}: cannot be read: {e}") from e
  if values.get("_class_name") != _CLASS:
    raise ConfigError(
      f"{file}: expected _class_name={_CLASS!r}, got "
      f"{values.get('_class_name')!r}."
    )
  fields = {}
  for key, value in values.items():
    if key.startswith("_") or key in _HARMLESS:
      continue
    if key in _KEYS:
      value = tuple(value) if isinstance(value, list) else value
      fields[_KEYS[key]] = Field(value, key)
    elif key in _REQUIRED:
      found = {*value} if isinstance(value, list) else {value}
      if found != {_REQUIRED[key]}:
        raise ConfigError(
          f"{file}: {key}: expected {_REQUIRED[key]!r}, got {value!r}."
        )
    elif key not in unread:
      raise ConfigError(
        f"{file}: {key}={value!r}: unknown key; allow_unread=[{key!r}] leaves "
        "it out."
      )
  return layouts.Fields(file, _CLASS, fields, dict)


# Names of the attention in older files.
_OLD = {
  "query": "to_q",
  "key": "to_k",
  "value": "to_v",
  "proj_attn": "to_out.0",
}


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  """Converts the arrays of diffusers; ours stay as they are."""
  result: dict[str, Any] = {}
  for name, x in flat.items():
    if name in like:
      result[name] = x
      continue
    *path, kind = name.split(".")
    if len(path) > 1 and "attentions" in path and path[-1] in _OLD:
      path[-1:] = _OLD[path[-1]].split(".")
    # Numbers belong to the name before them.
    ours = re.sub(r"/(\d+)", r"_\1", "/".join(path))
    ours = re.sub(r"(blocks_\d+|mid_block)/", r"\1_", ours)
    ours = re.sub(r"(samplers_\d+)/conv", r"\1", ours)
    is_norm = "norm" in path[-1]
    if kind == "bias":
      ours += "/bias"
    else:
      ours += "/scale" if is_norm else "/kernel"
    if kind == "weight" and not is_norm:
      if x.ndim == 4 and ours in like and len(like[ours].shape) == 2:
        x = x[..., 0, 0]  # A convolution of one pixel is a dense layer.
      x = x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T
    result[ours] = x
  return result
