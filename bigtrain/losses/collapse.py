"""Signs that features collapse, which means that all images get nearly the
same.

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
  # Norms have no gradient at 0.
  first, second, features_BD, others_BxE = jax.lax.stop_gradient(
    (first_BxE, second_BxE, features_BD, others_BxE)
  )
  between = jnp.linalg.norm(first - second, axis=-1)
  if others_BxE is not None:
    first = second = others_BxE
  apart = jnp.linalg.norm(first - jnp.roll(second, 1, axis=0), axis=-1)
  log_step = jnp.asarray(log_step)
  is_log_step = log_step.astype(jnp.float32)
  rank_or_0 = jax.lax.cond(
    log_step,
    lambda: prototypes.effective_rank(features_BD, weight_B),
    lambda: jnp.zeros((), jnp.float32),
  )

  def mean_of_each(x: jax.Array) -> jax.Array:
    return jnp.mean(x, range(1, x.ndim))

  return {
    "effective_rank": metrics.Occasional((rank_or_0, is_log_step), is_log_step),
    "view_distance": metrics.pair(mean_of_each(between), weight_B),
    "image_distance": metrics.pair(mean_of_each(apart), weight_B),
  }


def problem(
  values: Mapping[str, float], vectors: str, features: str
) -> str | None:
  """Describes a collapse that a log entry shows; None if there is none.

  Args:
    vectors: name of the vectors that "image_distance" compares, for the
    message. features: name of the features that have the "effective_rank".
  """
  if values.get("effective_rank", 2.0) < 1.05:
    return f"{features} of all images are on one line"
  if values.get("image_distance", 1.0) < 1e-3:
    return f"{vectors} of all images are equal"
  return None
