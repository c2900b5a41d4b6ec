"""Signs of a collapse: all images get the same features, or nearly so.

Legend: B batch, x any axes, D width of features, E width of vectors.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Metrics
from bigtrain.losses import prototypes


def signs(
  features_BD: jax.Array,
  first_BxE: jax.Array,
  second_BxE: jax.Array,
  weight_B: jax.Array,
  log_step: Any,
  others_BxE: jax.Array | None = None,
) -> Metrics:
  """Rank of features, distance of views and of images, without gradients.

  "effective_rank" is the rank of the features over the batch, "view_distance"
  the distance between the vectors of two views of an image, and
  "image_distance" the distance between those of different images. Only log
  steps have the rank, because its singular values take long to compute.

  Args:
    first_BxE, second_BxE: vectors of two views of each image. Any axes between
      the first and the last one are averaged over.
    log_step: whether the step is a log step.
    others_BxE: vectors for the image distance; by default first and second.
  """
  # Not only to save time: norms have no gradient at 0.
  first_BxE, second_BxE, features_BD, others_BxE = jax.lax.stop_gradient(
    (first_BxE, second_BxE, features_BD, others_BxE)
  )

  def distances_B(a_BxE: jax.Array, b_BxE: jax.Array) -> jax.Array:
    distances_Bx = jnp.linalg.norm(a_BxE - b_BxE, axis=-1)
    return jnp.mean(distances_Bx, range(1, distances_Bx.ndim))

  between_views_B = distances_B(first_BxE, second_BxE)
  # Each image is compared with the next one of the batch.
  if others_BxE is not None:
    between_images_B = distances_B(others_BxE, jnp.roll(others_BxE, 1, axis=0))
  else:
    between_images_B = distances_B(first_BxE, jnp.roll(second_BxE, 1, axis=0))

  def rank() -> jax.Array:
    return prototypes.effective_rank(features_BD, weight_B)

  def no_rank() -> jax.Array:
    return jnp.zeros((), jnp.float32)

  log_step = jnp.asarray(log_step)
  rank_or_0 = jax.lax.cond(log_step, rank, no_rank)
  is_log_step = log_step.astype(jnp.float32)
  return {
    "effective_rank": metrics.Occasional((rank_or_0, is_log_step), is_log_step),
    "view_distance": metrics.pair(between_views_B, weight_B),
    "image_distance": metrics.pair(between_images_B, weight_B),
  }


def problem(
  values: Mapping[str, float], vectors: str, features: str
) -> str | None:
  """Describes a collapse that a log entry shows; None if there is none.

  Args:
    vectors: name of the vectors that "image_distance" compares, for the
      message.
    features: name of the features that have the "effective_rank".
  """
  if values.get("effective_rank", 2.0) < 1.05:
    return f"{features} of all images are on one line"
  if values.get("image_distance", 1.0) < 1e-3:
    return f"{vectors} of all images are equal"
  return None
