"""ConvNeXt: an image model of stages, each with half the rows.

Version 1 is https://arxiv.org/abs/2201.03545; version 2,
https://arxiv.org/abs/2301.00808, has global response norms in its MLPs.

XLA's depthwise convolution is slow on CPUs, and its gradient on meshes. The
functions between Model and Block compute it in other ways.

Axes: B batch, H rows, W columns, D channels, F hidden, C classes, T taps of a
kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.models import vit
from bigtrain.models.layers import encoder, kernels, mlp, options, patches
from bigtrain.models.published import stage_families
from bigtrain.sharding import batches

VARIANTS: dict[str, dict[str, Any]] = {
  "tiny": dict(depths=(3, 3, 9, 3), widths=(96, 192, 384, 768)),
  "small": dict(depths=(3, 3, 27, 3), widths=(96, 192, 384, 768)),
  "base": dict(depths=(3, 3, 27, 3), widths=(128, 256, 512, 1024)),
  "large": dict(depths=(3, 3, 27, 3), widths=(192, 384, 768, 1536)),
  "xlarge": dict(depths=(3, 3, 27, 3), widths=(256, 512, 1024, 2048)),
  "huge": dict(depths=(3, 3, 27, 3), widths=(352, 704, 1408, 2816)),
}


class Model(nn.Module):
  """The model. After construction no DERIVED field is None."""

  num_classes: int | None = None  # C; None for a model without a head.
  variant: str | None = None  # A name in VARIANTS, such as "tiny".
  version: int = 1  # 1, or 2 for global response normalization.
  depths: Sequence[int] = options.DERIVED  # Number of blocks of each stage.
  widths: Sequence[int] = options.DERIVED  # D of each stage.
  patch_size: int = 4  # Pixels on the side of a patch of the first stage.
  mlp: str = "gelu_erf"  # Activation; or another one without a gate.
  norm_eps: float = 1e-6  # Added to the variance in the last norm.
  layer_scale: float | None = None  # See encoder.Encoder.
  drop_path: float = 0.0  # Of the last block; grows linearly from 0.
  dtype: str = "float32"  # Of activations; parameters and features are float32.

  def __post_init__(self) -> None:
    options.take_variant(self, VARIANTS)
    if len(self.depths or ()) != len(self.widths or (0,)):
      raise ConfigError(
        f"config.model.depths={self.depths}: expected as many as widths, "
        f"{self.widths}, or a variant such as 'tiny'."
      )
    options.check_fields(self, "drop_path", version=(1, 2), mlp=vit.MLPS[:3])
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Classifies images as models.vit does; "encoded" is (B, H, W, D)."""
    norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
    conv = functools.partial(patches.conv, dtype=self.dtype)
    rates = np.linspace(0.0, self.drop_path, sum(self.depths)).tolist()
    x_BHWD = conv(self.widths[0], self.patch_size, name="conv_patch")(image)
    x_BHWD = norm(name="patch_norm")(x_BHWD)
    for stage, D in enumerate(self.widths, 1):
      if stage > 1:
        x_BHWD = norm(name=f"down{stage}_norm")(x_BHWD)
        x_BHWD = conv(D, 2, name=f"conv_down{stage}")(x_BHWD)
      for i in range(1, self.depths[stage - 1] + 1):
        block = Block(
          self.version,
          self.mlp,
          self.layer_scale,
          self.dtype,
          name=f"stage{stage}_block{i}",
        )
        y_BHWD = block(x_BHWD)
        rate = rates.pop(0)
        if rate and train:
          y_BHWD = encoder.drop_path(y_BHWD, rate, self.make_rng("dropout"))
        x_BHWD += y_BHWD
    x = jnp.mean(x_BHWD, axis=(1, 2), dtype=jnp.float32)
    x = nn.LayerNorm(self.norm_eps, name="norm")(x)
    out = {"encoded": x_BHWD, "pre_logits": x}
    if self.num_classes:
      init = nn.initializers.normal(0.02)
      x = nn.Dense(self.num_classes, kernel_init=init, name="head")(x)
    return x, out


def _by_device(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
  """A depthwise convolution, on each device by itself.

  On a mesh, XLA would add up the gradient of the kernel over devices that have
  the same examples, and return a multiple of it.
  """

  def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, *args, **kwargs)

  depthwise = functools.partial(_depthwise, conv)
  mesh = batches.ambient(x.shape[0])
  if mesh is None or mesh.size == 1:
    return depthwise(x, kernel)
  by_example = jax.P(batches.batch_axes())
  return jax.shard_map(
    depthwise,
    mesh=mesh,
    in_specs=(by_example, jax.P()),
    out_specs=by_example,
    check_vma=False,
  )(x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _depthwise(conv: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
  """A convolution of each channel; on CPUs a sum over T taps.

  XLA's own convolution takes 6 to 40 times as long there, forward and backward.
  """
  return jax.lax.platform_dependent(x, kernel, cpu=_shifted, default=conv)


def _depthwise_forward(
  conv: Any, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _depthwise(conv, x, kernel), (x, kernel)


def _depthwise_backward(
  conv: Any, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  def gradients_of_conv(x: Any, kernel: Any, dy: Any) -> Any:
    return jax.vjp(conv, x, kernel)[1](dy)

  return jax.lax.platform_dependent(
    *kept, dy, cpu=_shifted_gradients, default=gradients_of_conv
  )


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _shifted(x_BHWD: jax.Array, kernel: jax.Array) -> jax.Array:
  """The convolution as a sum of T shifted images."""
  seen = _shifts(x_BHWD, kernel)
  kernel_TD = kernel.reshape(-1, kernel.shape[-1])
  terms = [seen(tap) * weight_D for tap, weight_D in enumerate(kernel_TD)]
  return functools.reduce(jnp.add, terms).astype(x_BHWD.dtype)


def _shifted_gradients(
  x: jax.Array, kernel: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  seen = _shifts(x, kernel)

  def gradient_of_tap(tap: jax.Array) -> jax.Array:
    return jnp.sum(seen(tap) * dy, axis=(0, 1, 2))

  # In a loop: XLA would fuse the sums of all taps to slower code.
  num_taps = kernel.size // x.shape[-1]
  dkernel_TD = jax.lax.map(gradient_of_tap, jnp.arange(num_taps))
  dkernel = dkernel_TD.reshape(kernel.shape).astype(kernel.dtype)
  return _shifted(dy, kernel[::-1, ::-1]), dkernel


def _shifts(x: jax.Array, kernel: jax.Array) -> Callable[[Any], jax.Array]:
  """A function that maps the number of a tap to the image that the tap sees."""
  h, w = kernel.shape[:2]
  rows, columns = (h // 2, h // 2), (w // 2, w // 2)
  x_float32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  padded = jnp.pad(x_float32, [(0, 0), rows, columns, (0, 0)])

  def seen(tap: Any) -> jax.Array:
    return jax.lax.dynamic_slice(padded, (0, tap // w, tap % w, 0), x.shape)

  return seen


class Block(nn.Module):
  """A residual branch: a depthwise convolution, a norm and an MLP."""

  version: int
  mlp: str
  layer_scale: float | None
  dtype: str

  @nn.compact
  def __call__(self, x_BHWD: jax.Array) -> jax.Array:
    D = x_BHWD.shape[-1]
    dense = functools.partial(
      nn.Dense, dtype=self.dtype, dot_general=kernels.product
    )
    y = nn.Conv(
      D,
      (7, 7),
      padding=[(3, 3)] * 2,
      feature_group_count=D,
      conv_general_dilated=_by_device,
      dtype=self.dtype,
      name="conv_depthwise",
    )(x_BHWD)
    y = nn.LayerNorm(1e-6, dtype=self.dtype, name="LayerNorm_0")(y)
    y = dense(4 * D, name="Dense_0")(y)
    y = mlp.KINDS[self.mlp].activation(y)
    if self.version == 2:  # Global response normalization.
      zeros, shape = nn.initializers.zeros, y.shape[-1:]
      scale_F = self.param("response_scale", zeros, shape)
      bias_F = self.param("response_bias", zeros, shape)
      size = jnp.sum(jnp.square(y.astype(jnp.float32)), (1, 2), keepdims=True)
      # The root has no gradient at 0.
      size = jnp.sqrt(jnp.maximum(size, 1e-30))
      size /= jnp.mean(size, axis=-1, keepdims=True) + 1e-6
      y = (y + scale_F * (y * size) + bias_F).astype(y.dtype)
    y = dense(D, name="Dense_1")(y)
    if self.layer_scale is not None:
      init = nn.initializers.constant(self.layer_scale)
      y *= self.param("layer_scale_0", init, (D,)).astype(y.dtype)
    return y


from_published = functools.partial(
  stage_families.read, stage_families.CONVNEXT, stage_families.DIMS
)
to_published = functools.partial(
  stage_families.CONVNEXT.export, stage_families.DIMS
)
published_fields = stage_families.CONVNEXT.fields
