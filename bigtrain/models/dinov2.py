"""A ViT with the heads of DINO, https://arxiv.org/abs/2104.14294, and DINOv2.

A head maps tokens to unit vectors, and its prototypes are unit vectors too. One
head is for class tokens; an optional second one is for patches (iBOT, arXiv
2111.07832). The ViT's parameters have the names of models/vit.py, so that a
`vit` can start from them.

Axes: B batch, P patches, M chosen patches, E width of the heads' results, K
prototypes.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.models import vit
from bigtrain.models.layers import heads


class Model(vit.Model):
  """A ViT, which with `heads` also returns the heads' results."""

  pool_type: str = "tok"  # No other: the loss reads the class token.
  mask_token: bool = True  # No other: it replaces the masked patches.
  num_prototypes: int = 65536  # K of class tokens.
  patch_prototypes: int | None = None  # K of patches; None for no such head.
  head_hidden: int = 2048  # Hidden width of the heads' MLPs, of three layers.
  head_out: int = 256  # E.

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("num_prototypes", "head_hidden", "head_out"):
      value = getattr(self, name)
      check_number(f"config.model.{name}", value, least=2, whole=True)
    if self.pool_type != "tok" or not self.mask_token:
      raise ConfigError(
        f"config.model: expected pool_type='tok', got {self.pool_type!r}, and "
        f"mask_token=True, got {self.mask_token!r}."
      )

  @nn.compact
  def __call__(
    self,
    image: jax.Array,
    *,
    heads: bool = False,
    chosen_BM: jax.Array | None = None,
    train: bool = False,
    **others: Any,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Like a ViT's; with `heads` also "class_z" (B, E), "patch_z" (B, M, E).

    Args:
      chosen_BM: int, the patches that go through the head of patches.
    """
    x, out = super().__call__(image, train=train, **others)
    if self.is_initializing():
      heads, chosen_BM = True, jnp.zeros((len(image), 1), jnp.int32)
    if heads:
      out = with_heads(self, out, chosen_BM)
    return x, out

  def views(self, image: jax.Array, **others: Any) -> dict[str, jax.Array]:
    """The results with `heads`; the task calls this of any model with heads."""
    return self(image, heads=True, **others)[1]


def with_heads(
  model: Any, out: Mapping[str, jax.Array], chosen_BM: jax.Array | None
) -> dict[str, jax.Array]:
  """Adds "class_z" and "patch_z" to a ViT's dict; for use in compact methods.

  `model` has the fields num_prototypes, patch_prototypes, head_hidden and
  head_out. Prototypes are created here, but only the task's loss multiplies
  with them.
  """
  out = dict(out)
  if not model.num_prototypes:
    return out
  if model.is_initializing():
    for name, number in (
      ("class_prototypes", model.num_prototypes),
      ("patch_prototypes", model.patch_prototypes),
    ):
      if number:
        Prototypes(number, model.head_out, name=name)()
  sizes = (model.head_hidden, model.head_out, model.dtype)
  out["class_z"] = Head(*sizes, name="class_head")(out["head_input"])
  if model.patch_prototypes and chosen_BM is not None:
    index_BM1 = chosen_BM[..., None]
    patch_BMD = jnp.take_along_axis(out["encoded"], index_BM1, axis=1)
    out["patch_z"] = Head(*sizes, name="patch_head")(patch_BMD)
  return out


class Head(nn.Module):
  """An MLP of three layers whose results are unit vectors."""

  hidden: int
  out: int
  dtype: str

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for i, width in enumerate((self.hidden, self.hidden, self.out)):
      init = nn.initializers.truncated_normal(0.02)
      if i:
        x = nn.gelu(x, approximate=False)
      x = nn.Dense(
        width, dtype=self.dtype, kernel_init=init, name=f"Dense_{i}"
      )(x)
    return heads.unit(x)


class Prototypes(nn.Module):
  """Prototypes (E, K), of which only the directions matter."""

  number: int
  width: int

  @nn.compact
  def __call__(self) -> jax.Array:
    init = nn.initializers.normal(0.02)
    return self.param("kernel", init, (self.width, self.number))


HEAD_DIMS: dict[str, str] = {
  r"(class|patch)_head/Dense_0/kernel": "D -> F",
  r"(class|patch)_head/Dense_1/kernel": "F -> F",
  r"(class|patch)_head/Dense_2/kernel": "F -> D",
  r"(class|patch)_prototypes/kernel": "D -> V",
}
DIMS = {**HEAD_DIMS, **vit.DIMS}
param_dims = dims.of_all(DIMS)
