"""ResNets with bottleneck blocks, and BiT.

Version 1 is https://arxiv.org/abs/1512.03385 in the variant v1.5, with strides
in the 3x3 convolutions; version 2 normalises before each convolution,
https://arxiv.org/abs/1603.05027. BiT, https://arxiv.org/abs/1912.11370, has
group norms and standardised kernels. The running means and variances, computed
over the global batch, are in the mutable collection "batch_stats".

Axes: B batch, H rows, W columns, D channels, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import encoder, options
from bigtrain.models.published import conversions, stage_families, tables

# Blocks in each of the four stages.
DEPTHS = {
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),
}
VERSIONS = (1, 2)


class Norm(NamedTuple):
  """What a value of config.model.norm stands for."""

  epsilon: float  # Added to the variance in norms.
  # For standardised kernels: added to the standard deviation, and to the
  # variance, of each output's weights. None for kernels as they are.
  in_kernels: tuple[float, float] | None = None
  same: bool = False  # Whether to pad like TensorFlow's "SAME".
  zeros: bool = False  # Whether zeros, not -inf, pad the first max-pooling.


NORMS = {
  "batch": Norm(1e-5),
  "bit": Norm(1e-6, (1e-5, 0.0), same=True),
  "bit_paper": Norm(1e-5, (0.0, 1e-10)),
  "bit_torch": Norm(1e-5, (0.0, 1e-8), zeros=True),
}
_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class Model(nn.Module):
  """ResNet."""

  num_classes: int | None = None  # C; None for a model without a head.
  # Number of layers, one of DEPTHS, or the numbers of blocks of all stages.
  depth: int | Sequence[int] = 50
  version: int = 1  # 1 (v1.5) or 2 (pre-activation).
  width: float = 1.0  # Factor of all numbers of channels.
  # "batch"; or group norms and standardised kernels as in big_vision, with
  # version 1 "bit" and with version 2 "bit_paper", or as in transformers and
  # timm, with version 2 "bit_torch".
  norm: str = "batch"
  groups: int = 32  # Number of groups of a group norm.
  drop_path: float = 0.0  # Of the last block; grows linearly from 0.
  dtype: str = "float32"  # Of activations; parameters and features are float32.

  def __post_init__(self) -> None:
    options.check_fields(self, "drop_path", version=VERSIONS, norm=NORMS)
    if isinstance(self.depth, int):
      options.check_fields(self, depth=DEPTHS)
    if not int(64 * self.width):
      raise ConfigError(
        "config.model.width: expected a factor for 64, 128, 256 and 512 "
        f"channels, got {self.width!r}."
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Classifies images as models.vit does; "encoded" is (B, H, W, D)."""
    channels = int(64 * self.width)
    norm = NORMS[self.norm]
    layers = Layers(self.norm, self.groups, train, self.dtype)
    x_BHWD = jnp.asarray(image, self.dtype)
    x_BHWD = layers.conv(channels, 7, 2, "conv_root")(x_BHWD)
    if self.version == 1:
      x_BHWD = nn.relu(layers.norm("_root")(x_BHWD))
    padding: Any = "SAME" if norm.same else [(1, 1), (1, 1)]
    if norm.zeros:
      x_BHWD = jnp.pad(x_BHWD, ((0, 0), (1, 1), (1, 1), (0, 0)))
      padding = "VALID"
    x_BHWD = nn.max_pool(x_BHWD, (3, 3), (2, 2), padding)

    block = BlockV1 if self.version == 1 else BlockV2
    num_all = sum(stage_depths(self))
    rates = iter(np.linspace(0.0, self.drop_path, num_all).tolist())
    for stage, num_blocks in enumerate(stage_depths(self), 1):
      for i in range(1, num_blocks + 1):
        stride = 2 if i == 1 and stage > 1 else 1
        name = f"stage{stage}_block{i}"
        layers = layers._replace(drop_path=next(rates))
        x_BHWD = block(channels, stride, layers, name=name)(x_BHWD)
      channels *= 2
    if self.version == 2:
      x_BHWD = nn.relu(layers.norm("_final")(x_BHWD))

    x = jnp.mean(x_BHWD, axis=(1, 2), dtype=jnp.float32)
    out = {"encoded": x_BHWD, "pre_logits": x}
    if self.num_classes:
      init = nn.initializers.normal(0.01)
      x = nn.Dense(self.num_classes, kernel_init=init, name="head")(x)
    return x, out


def stage_depths(model: Model) -> tuple[int, ...]:
  """Number of blocks of each stage."""
  depth = model.depth
  return DEPTHS[depth] if isinstance(depth, int) else tuple(depth)


class Layers(NamedTuple):
  """Makes the layers of a block."""

  kind: str
  groups: int
  train: bool
  dtype: str
  drop_path: float = 0.0

  def conv(
    self, channels: int, size: int, stride: int, name: str, **kwargs: Any
  ) -> nn.Module:
    norm = NORMS[self.kind]
    return Conv(
      channels,
      (size, size),
      (stride, stride),
      # Symmetric; "SAME" would pad strided convolutions on one side only.
      padding="SAME" if norm.same else [(size // 2, size // 2)] * 2,
      use_bias=False,
      dtype=self.dtype,
      epsilons=norm.in_kernels,
      name=name,
      **{"kernel_init": _he_normal, **kwargs},
    )

  def norm(self, name: str, **kwargs: Any) -> nn.Module:
    shared: dict[str, Any] = dict(
      epsilon=NORMS[self.kind].epsilon,
      dtype=self.dtype,
      # The mean of squares minus the square of the mean loses digits, and every
      # layer of the backward pass divides by the difference.
      use_fast_variance=False,
      **kwargs,
    )
    if self.kind != "batch":
      return nn.GroupNorm(self.groups, name=f"gn{name}", **shared)
    return nn.BatchNorm(
      not self.train, momentum=0.9, name=f"bn{name}", **shared
    )

  def drop(self, y_BHWD: jax.Array, block: nn.Module) -> jax.Array:
    if not self.train or not self.drop_path:
      return y_BHWD
    return encoder.drop_path(y_BHWD, self.drop_path, block.make_rng("dropout"))


class Conv(nn.Conv):
  """A convolution whose kernel may be standardised before it is used."""

  epsilons: tuple[float, float] | None = None

  def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
    value = super().param(name, *args, **kwargs)
    if self.epsilons is None:
      return value
    value -= jnp.mean(value, (0, 1, 2))
    of_std, of_variance = self.epsilons
    variance_D = jnp.mean(jnp.square(value), (0, 1, 2)) + of_variance
    return value / (jnp.sqrt(variance_D) + of_std)


class _Block(nn.Module):
  channels: int
  stride: int
  layers: Layers


class BlockV1(_Block):
  """Convolutions 1x1, 3x3, 1x1, normalised after each.

  The last scale starts at zero, so that the block starts as its shortcut:
  https://arxiv.org/abs/1706.02677.
  """

  @nn.compact
  def __call__(self, x_BHWD: jax.Array) -> jax.Array:
    conv, norm, C = self.layers.conv, self.layers.norm, self.channels
    y_BHWD = nn.relu(norm("1")(conv(C, 1, 1, name="conv1")(x_BHWD)))
    y_BHWD = conv(C, 3, self.stride, name="conv2")(y_BHWD)
    y_BHWD = conv(4 * C, 1, 1, name="conv3")(nn.relu(norm("2")(y_BHWD)))
    y_BHWD = norm("3", scale_init=nn.initializers.zeros)(y_BHWD)
    if self.stride != 1 or x_BHWD.shape[-1] != 4 * C:
      x_BHWD = conv(4 * C, 1, self.stride, name="conv_proj")(x_BHWD)
      x_BHWD = norm("_proj")(x_BHWD)
    return nn.relu(x_BHWD + self.layers.drop(y_BHWD, self))


class BlockV2(_Block):
  """Convolutions 1x1, 3x3, 1x1, normalised before each.

  The last convolution starts at zero. A zero scale would stay zero: the ReLU
  that follows has no gradient there.
  """

  @nn.compact
  def __call__(self, x_BHWD: jax.Array) -> jax.Array:
    conv, norm, C = self.layers.conv, self.layers.norm, self.channels
    y_BHWD = nn.relu(norm("1")(x_BHWD))
    if self.stride != 1 or x_BHWD.shape[-1] != 4 * C:
      x_BHWD = conv(4 * C, 1, self.stride, name="conv_proj")(y_BHWD)
    y_BHWD = nn.relu(norm("2")(conv(C, 1, 1, name="conv1")(y_BHWD)))
    y_BHWD = conv(C, 3, self.stride, name="conv2")(y_BHWD)
    y_BHWD = nn.relu(norm("3")(y_BHWD))
    zeros = nn.initializers.zeros
    y_BHWD = conv(4 * C, 1, 1, name="conv3", kernel_init=zeros)(y_BHWD)
    return x_BHWD + self.layers.drop(y_BHWD, self)


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  """Reads BiTs of big_vision, of the paper's release, and of transformers."""
  flat = conversions.normalise(flat)
  converted = stage_families.load(stage_families.BIT, flat, like)
  if converted is not None:
    return converted
  result = {}
  for name, value in flat.items():
    name = conversions.renamed("bit", name)
    # Some have more axes, of size 1.
    fits = name in like and np.squeeze(value).shape == like[name].shape
    result[name] = np.squeeze(value) if fits else value
  return result


def to_published(
  model: Model,
  shapes: tables.Shapes,
  layout: str | None = None,
  origin: str | None = None,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  model = model.clone(depth=stage_depths(model))
  return stage_families.BIT.export(
    stage_families.DIMS, model, shapes, layout, origin
  )


published_fields = stage_families.BIT.fields
