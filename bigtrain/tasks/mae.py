"""Masked autoencoding: predicts the pixels of patches that are hidden.

Legend: B batch, P patches, K patches that are seen, V values of a patch, D
width.

A batch has "image" [B, H, W, channels]. Optionally, "noise" [B, P] decides
which patches are seen: those with the smallest numbers. The model is
models/mae.py. The loss is from https://arxiv.org/abs/2111.06377: the mean
squared error of the hidden patches, whose pixels are normalised per patch.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import check_number
from bigtrain.losses import forward

_EPS = 1e-6  # Added to the variance of a patch's pixels.


def inputs(batch: Batch) -> Batch:
  return {"image": batch["image"]}


def mask(
  batch: Batch, num_patches: int, mask_ratio: float
) -> tuple[jax.Array, jax.Array]:
  """Draws the patches that are seen: (int [B, K], bool [B, P]: hidden)."""
  key = "config.loss.mask_ratio"
  check_number(key, mask_ratio, least=0, below=1)
  num_seen = int(num_patches * (1 - mask_ratio))
  check_number(
    f"{key}: number of patches that are seen",
    num_seen,
    least=1,
    most=num_patches - 1,
  )
  if "noise" in batch:
    noise_BP = batch["noise"]
  else:
    draw = functools.partial(jax.random.uniform, shape=(num_patches,))
    noise_BP = jax.vmap(draw)(batch["_keys"])
  order_BP = jnp.argsort(noise_BP, axis=1)
  rank_BP = jnp.argsort(order_BP, axis=1)
  return order_BP[:, :num_seen], rank_BP >= num_seen


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  mask_ratio: float = 0.75,
  norm_pixels: bool = True,
) -> tuple[Metrics, Variables]:
  """Computes the squared error of the hidden patches.

  Args:
    mask_ratio: share of the patches that is hidden.
    norm_pixels: whether the pixels of a patch are normalised.
  """
  target_BPV = model.patches(batch["image"].astype(jnp.float32))
  kept_BK, hidden_BP = mask(batch, target_BPV.shape[1], mask_ratio)
  (_, out), mutable = forward.apply(
    model, variables, rng, train, batch["image"], kept_BK=kept_BK
  )
  if norm_pixels:
    mean_BP1 = jnp.mean(target_BPV, -1, keepdims=True)
    variance_BP1 = jnp.var(target_BPV, -1, keepdims=True, ddof=1)
    target_BPV = (target_BPV - mean_BP1) / jnp.sqrt(variance_BP1 + _EPS)
  error_BP = jnp.mean(jnp.square(out["pixels"] - target_BPV), -1)
  weight_B = metrics.example_weights(batch, error_BP)
  weight_BP = hidden_BP * weight_B[:, None]
  return {
    "loss": metrics.pair(error_BP, weight_BP),
    # Features that do not depend on the image are a sign of a collapse.
    "feature_std": metrics.pair(_std_over_batch(out["head_input"], weight_B)),
  }, mutable


def _std_over_batch(x_BD: jax.Array, weight_B: jax.Array) -> jax.Array:
  """Standard deviation of each feature over the examples, [D]."""
  share_B1 = (weight_B / jnp.maximum(jnp.sum(weight_B), 1.0))[:, None]
  x_BD = x_BD.astype(jnp.float32)
  mean_D = jnp.sum(share_B1 * x_BD, 0)
  return jnp.sqrt(jnp.sum(share_B1 * jnp.square(x_BD - mean_D), 0))


def problem(
  values: Mapping[str, float], *, stop_on_collapse: bool = True
) -> str | None:
  """Describes a collapse of features that a log entry shows."""
  if stop_on_collapse and values.get("feature_std", 1.0) < 1e-3:
    return "the class token's features of all images are equal"
  return None


def predict_fns(model: Any) -> dict[str, PredictFn]:
  """ "pre_logits", features of whole images, and "reconstruction".

  "pixels" returns the image itself, for comparison.
  """

  def reconstruction(
    variables: Variables, batch: Batch, *, mask_ratio: float = 0.75
  ) -> jax.Array:
    """Images whose hidden patches are predicted; for norm_pixels=False."""
    image = batch["image"]
    own = model.patches(image.astype(jnp.float32))
    keys = jax.vmap(jax.random.key)(jnp.arange(len(image)))
    batch = {**batch, "_keys": keys}
    kept_BK, hidden_BP = mask(batch, own.shape[1], mask_ratio)
    _, out = model.apply(variables, image, kept_BK=kept_BK, train=False)
    shown = jnp.where(hidden_BP[..., None], out["pixels"], own)
    return model.image(shown, image.shape[1:])

  return {
    "pre_logits": forward.layers_fn(model, inputs),
    "pixels": forward.pixels,
    "reconstruction": reconstruction,
  }
