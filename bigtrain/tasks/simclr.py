"""SimCLR: finds the other view of an image among the views of all images.

https://arxiv.org/abs/2002.05709. Negatives are all other images of the global
batch, and the norm of the projection head is computed over both views of all
images. So the loss consists of two functions, see objective/gradients.py:
features of each image, and the loss of the batch. Microbatches and meshes
change it only by rounding.

Legend: B batch, D width of features, E width of the projections.

A batch has "image" [B, H, W, channels], of which two views are made on the
devices, or ready-made "views" [B, 2, ...]. The model is
models/contrastive_vit.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, Params, PredictFn, Variables
from bigtrain.losses import collapse, forward, pairwise, random_views

# Options that may follow a schedule, with limits of their values.
LIMITS = dict(temperature=dict(above=0))


def inputs(batch: Batch) -> Batch:
  return {"image": random_views.example(batch)}


def embed_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  view_size: int | None = None,
  view_area: Sequence[float] | None = None,
  flip: bool | None = None,
  contrast: float | None = None,
) -> tuple[dict[str, jax.Array], Any]:
  """Features of both views of each image.

  Args:
    view_size: side of the views; by default the image's.
    view_area: smallest and largest share of the image in a view; by default
      0.08 and 1.
    flip, contrast: see random_views.crops.
  """
  views = random_views.two(
    batch, view_size, view_area, flip=flip, contrast=contrast
  )
  B = len(views)
  (_, out), mutable = forward.apply(
    model, variables, rng, train, views.reshape(2 * B, *views.shape[2:])
  )
  return {"features_B2D": out["head_input"].reshape(B, 2, -1)}, mutable


def embeddings_loss_fn(
  params: Params,
  embeddings: Mapping[str, jax.Array],
  batch: Batch,
  *,
  model: Any,
  log_step: Any = True,
  temperature: float = 0.1,
  chunk: int = 1024,
) -> Metrics:
  """The loss of the global batch, from its features.

  Args:
    temperature: divides the cosines of the projections.
    chunk: pairs of each view at a time, see losses/pairwise.py.
  """
  features_B2D = embeddings["features_B2D"]
  B, _, D = features_B2D.shape
  weight_B = metrics.example_weights(batch, features_B2D)
  z_NE = model.project(
    params, features_B2D.reshape(2 * B, D), jnp.repeat(weight_B, 2)
  )
  z_B2E = model.unit(z_NE).reshape(B, 2, -1)
  loss_B, correct_B = pairwise.nt_xent(
    z_B2E[:, 0],
    z_B2E[:, 1],
    jnp.float32(1 / temperature),
    weight_B=weight_B,
    chunk=chunk,
  )
  return {
    "loss": metrics.pair(loss_B, weight_B),
    "accuracy": metrics.pair(correct_B, weight_B),
    **collapse.signs(
      features_B2D[:, 0], z_B2E[:, 0], z_B2E[:, 1], weight_B, log_step
    ),
  }


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)


def problem(
  values: Mapping[str, float], *, stop_on_collapse: bool = True
) -> str | None:
  """Describes a collapse of features that a log entry shows."""
  if not stop_on_collapse:
    return None
  return collapse.problem(
    values, vectors="the projections", features="the features"
  )


def predict_fns(model: Any) -> dict[str, PredictFn]:
  return {
    "pre_logits": forward.layers_fn(model, inputs),
    "pixels": forward.pixels,
  }
