"""A ViT with the heads of SimCLR and MoCo v3.

The losses compare images with each other, and the heads' norms are computed
over the global batch. So a call returns features like a `vit`, and the tasks
apply the heads, `model.project` and `model.predict`, to the features of all
images. The ViT's parameters have the names of models/vit.py, so that a `vit`
can start from them.

Axes: N samples, D width, E width of the heads' results.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.arrays.types import Params
from bigtrain.config.errors import check_choice, check_number
from bigtrain.models import vit
from bigtrain.models.layers import heads


class Model(vit.Model):
  """A ViT, a projection head, and perhaps a prediction head."""

  pool_type: str = "tok"  # As of a ViT; the class token by default.
  projector_layers: int = 3  # Layers of the projection head.
  predictor_layers: int = 0  # Layers of the prediction head; 0 for none.
  head_hidden: int = 4096  # Hidden width of both.
  head_out: int = 256  # E.
  head_norm: str = "batch"  # "batch", over the global batch, or "none".

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("projector_layers", "head_hidden", "head_out"):
      value = getattr(self, name)
      check_number(f"config.model.{name}", value, least=1, whole=True)
    check_number(
      "config.model.predictor_layers",
      self.predictor_layers,
      least=0,
      whole=True,
    )
    check_choice("config.model.head_norm", self.head_norm, heads.NORMS)

  @nn.compact
  def __call__(
    self, image: jax.Array, *, train: bool = False, **others: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Like a ViT's."""
    x, out = super().__call__(image, train=train, **others)
    if self.is_initializing():
      z, weight_N = out["head_input"], jnp.ones(len(image))
      z = self.head("projector")(z, weight_N)
      if self.predictor_layers:
        self.head("predictor")(z, weight_N)
    return x, out

  @nn.nowrap
  def head(self, name: str) -> heads.Head:
    """The head "projector" or "predictor"."""
    return heads.Head(
      getattr(self, f"{name}_layers"),
      self.head_hidden,
      self.head_out,
      self.head_norm,
      self.dtype,
      name=name,
    )

  @nn.nowrap
  def unit(self, x: jax.Array) -> jax.Array:
    """Vectors of length 1, float32."""
    return heads.unit(x)

  @nn.nowrap
  def project(
    self, params: Params, z_ND: jax.Array, weight_N: jax.Array
  ) -> jax.Array:
    """Applies the projection head to features of the global batch: (N, E)."""
    return self._apply("projector", params, z_ND, weight_N)

  @nn.nowrap
  def predict(
    self, params: Params, z_NE: jax.Array, weight_N: jax.Array
  ) -> jax.Array:
    """Applies the prediction head to results of the projection head: (N, E)."""
    return self._apply("predictor", params, z_NE, weight_N)

  @nn.nowrap
  def _apply(self, name: str, params: Params, *args: jax.Array) -> jax.Array:
    result: Any = self.head(name).apply({"params": params[name]}, *args)
    return result


DIMS: dict[str, str] = {
  # The first layers read the stream, and others what the first ones made.
  r"(projector|predictor)/Dense_0/kernel": "D -> F",
  r"(projector|predictor)/Dense_\d+/kernel": "F -> F",
  r"(projector|predictor)/(Dense|norm)_\d+/(scale|bias)": "F",
  **vit.DIMS,
}
param_dims = dims.of_all(DIMS)
