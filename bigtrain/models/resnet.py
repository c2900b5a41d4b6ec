"""ResNets with bottleneck blocks and batch normalisation.

Version 1 is https://arxiv.org/abs/1512.03385 in the variant v1.5, with strides
in the 3x3 convolutions; version 2 normalises before each convolution,
https://arxiv.org/abs/1603.05027. Running means and variances, of the whole
global batch, are in the mutable collection "batch_stats".

Axes: B batch, H rows, W columns, D channels, C classes.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import settings
from bigtrain.models.layers import options

# Blocks in each of the four stages.
DEPTHS = {
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
}
VERSIONS = (1, 2)

_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class Model(nn.Module):
  """ResNet.

  Attributes:
    num_classes: C; None for a model without a head.
    depth: number of layers, one of DEPTHS.
    version: 1 (v1.5) or 2 (pre-activation).
    width: factor of all numbers of channels.
    dtype: dtype of the computation; parameters, statistics, the pooled features
      and the head are float32.
  """

  num_classes: int | None = None
  depth: int = 50
  version: int = 1
  width: float = 1.0
  dtype: str = "float32"

  def __post_init__(self) -> None:
    options.check_fields(self, depth=DEPTHS, version=VERSIONS)
    if not int(64 * self.width):
      raise settings.ConfigError(
        "config.model.width: expected a factor for 64, 128, 256 and 512 "
        f"channels, got {self.width!r}."
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Classifies images (B, height, width, channels).

    Returns:
      (float32 logits (B, C), or the pooled features without a head; a dict of
      "encoded" (B, H, W, D), and "pre_logits" (B, D), its average).
    """
    channels = int(64 * self.width)
    x_BHWD = jnp.asarray(image, self.dtype)
    x_BHWD = _conv(channels, 7, 2, self.dtype, "conv_root")(x_BHWD)
    if self.version == 1:
      x_BHWD = nn.relu(_norm(train, self.dtype, "bn_root")(x_BHWD))
    x_BHWD = nn.max_pool(x_BHWD, (3, 3), (2, 2), [(1, 1), (1, 1)])

    block = BlockV1 if self.version == 1 else BlockV2
    for stage, num_blocks in enumerate(DEPTHS[self.depth], 1):
      for i in range(1, num_blocks + 1):
        stride = 2 if i == 1 and stage > 1 else 1
        name = f"stage{stage}_block{i}"
        x_BHWD = block(channels, stride, self.dtype, name=name)(x_BHWD, train)
      channels *= 2
    if self.version == 2:
      x_BHWD = nn.relu(_norm(train, self.dtype, "bn_final")(x_BHWD))

    x = jnp.mean(x_BHWD, axis=(1, 2), dtype=jnp.float32)
    out = {"encoded": x_BHWD, "pre_logits": x}
    if self.num_classes:
      init = nn.initializers.normal(0.01)
      x = nn.Dense(self.num_classes, kernel_init=init, name="head")(x)
    return x, out


class BlockV1(nn.Module):
  """Convolutions 1x1, 3x3, 1x1, normalised after each.

  The last scale starts at zero, so that the block starts as its shortcut:
  https://arxiv.org/abs/1706.02677.
  """

  channels: int
  stride: int
  dtype: str

  @nn.compact
  def __call__(self, x_BHWD: jax.Array, train: bool) -> jax.Array:
    conv = functools.partial(_conv, dtype=self.dtype)
    norm = functools.partial(_norm, train, self.dtype)
    C = self.channels
    y_BHWD = nn.relu(norm("bn1")(conv(C, 1, 1, name="conv1")(x_BHWD)))
    y_BHWD = conv(C, 3, self.stride, name="conv2")(y_BHWD)
    y_BHWD = conv(4 * C, 1, 1, name="conv3")(nn.relu(norm("bn2")(y_BHWD)))
    y_BHWD = norm("bn3", scale_init=nn.initializers.zeros)(y_BHWD)
    if self.stride != 1 or x_BHWD.shape[-1] != 4 * C:
      x_BHWD = conv(4 * C, 1, self.stride, name="conv_proj")(x_BHWD)
      x_BHWD = norm("bn_proj")(x_BHWD)
    return nn.relu(x_BHWD + y_BHWD)


class BlockV2(nn.Module):
  """Convolutions 1x1, 3x3, 1x1, normalised before each.

  The last convolution starts at zero. A zero scale would stay zero: the ReLU
  that follows has no gradient there.
  """

  channels: int
  stride: int
  dtype: str

  @nn.compact
  def __call__(self, x_BHWD: jax.Array, train: bool) -> jax.Array:
    conv = functools.partial(_conv, dtype=self.dtype)
    norm = functools.partial(_norm, train, self.dtype)
    C = self.channels
    y_BHWD = nn.relu(norm("bn1")(x_BHWD))
    if self.stride != 1 or x_BHWD.shape[-1] != 4 * C:
      x_BHWD = conv(4 * C, 1, self.stride, name="conv_proj")(y_BHWD)
    y_BHWD = nn.relu(norm("bn2")(conv(C, 1, 1, name="conv1")(y_BHWD)))
    y_BHWD = conv(C, 3, self.stride, name="conv2")(y_BHWD)
    y_BHWD = nn.relu(norm("bn3")(y_BHWD))
    zeros = nn.initializers.zeros
    return x_BHWD + conv(4 * C, 1, 1, name="conv3", kernel_init=zeros)(y_BHWD)


def _conv(
  channels: int,
  size: int,
  stride: int,
  dtype: str,
  name: str,
  kernel_init: Callable[..., jax.Array] = _he_normal,
) -> nn.Conv:
  return nn.Conv(
    channels,
    (size, size),
    (stride, stride),
    # Symmetric; "SAME" would pad strided convolutions on one side only.
    padding=[(size // 2, size // 2)] * 2,
    use_bias=False,
    dtype=dtype,
    kernel_init=kernel_init,
    name=name,
  )


def _norm(
  train: bool,
  dtype: str,
  name: str,
  scale_init: Callable[..., jax.Array] = nn.initializers.ones,
) -> nn.BatchNorm:
  return nn.BatchNorm(
    use_running_average=not train,
    momentum=0.9,
    epsilon=1e-5,
    dtype=dtype,
    scale_init=scale_init,
    # The mean of squares minus the square of the mean loses digits, and every
    # layer of the backward pass divides by the difference.
    use_fast_variance=False,
    name=name,
  )
