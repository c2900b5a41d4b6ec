"""MoCo v3: contrastive learning whose keys come from an average of the student.

See https://arxiv.org/abs/2104.02057. From one view of an image, the student has
to find the teacher's projection of the other view among those of all images in
the global batch, and vice versa. There is no queue. The heads' norms are
computed over all images of a view. So the loss consists of two functions, see
objective/gradients.py, and meshes and microbatches change it only by rounding.

Legend: B batch, D width of features, E width of the heads' results.

Batches are those of tasks/simclr.py. The model is models/contrastive_vit.py,
with a prediction head. To freeze the patch embedding at its random values, as
the paper does, give its parameters no schedule: ("embedding/.*", None).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops
from bigtrain.arrays.types import Batch, Metrics, Params, PredictFn, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.losses import collapse, forward, pairwise, random_views, teachers

# Options that may follow a schedule, with limits of their values.
LIMITS = dict(momentum=dict(least=0, most=1), temperature=dict(above=0))


def inputs(batch: Batch) -> Batch:
  return {"image": random_views.example(batch)}


# The state: the teacher.


def init_state(params: Params, *, model: Any) -> dict[str, Any]:
  if not model.predictor_layers:
    raise ConfigError(
      "config.model.predictor_layers=0: expected at least 1; MoCo v3 has a "
      "prediction head of 2 layers."
    )
  return {"teacher": params}


def update_state(
  state: Any, *, params: Params, momentum: float = 0.99
) -> dict[str, Any]:
  """The next teacher; its `momentum` usually rises to 1."""
  return {"teacher": teachers.follow(state["teacher"], params, momentum)}


# The loss in two parts: features of each example, then the global batch.


def embed_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  state: Any,
  view_size: int | None = None,
  view_area: Sequence[float] | None = None,
  flip: bool | None = None,
  contrast: float | None = None,
) -> tuple[dict[str, jax.Array], Any]:
  """Features of both views of each image, by student and teacher.

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
  view_N = views.reshape(2 * B, *views.shape[2:])
  (_, out), mutable = forward.apply(model, variables, rng, train, view_N)
  teacher = {**variables, "params": state["teacher"]}
  with model_flops.share(1, 3):  # Without a backward pass.
    _, taught = model.apply(teacher, view_N, train=False)
  taught_ND = jax.lax.stop_gradient(taught["head_input"])
  return {
    "features_B2D": out["head_input"].reshape(B, 2, -1),
    "teacher_features_B2D": taught_ND.reshape(B, 2, -1),
  }, mutable


def embeddings_loss_fn(
  params: Params,
  embeddings: Mapping[str, jax.Array],
  batch: Batch,
  *,
  model: Any,
  state: Any,
  log_step: Any = True,
  temperature: float = 0.2,
  chunk: int = 1024,
) -> tuple[Metrics, Any]:
  """The loss of the global batch, from its features.

  Args:
    temperature: divides the cosines. The loss is multiplied by twice the
      temperature, so that its gradients depend less on the temperature.
    chunk: pairs of each view at a time, see losses/pairwise.py.
  """
  features_B2D = embeddings["features_B2D"]
  taught_B2D = embeddings["teacher_features_B2D"]
  weight_B = metrics.example_weights(batch, features_B2D)
  queries, keys = [], []
  for view in range(2):
    z_BE = model.project(params, features_B2D[:, view], weight_B)
    q_BE = model.predict(params, z_BE, weight_B)
    with model_flops.share(1, 3):
      k_BE = model.project(state["teacher"], taught_B2D[:, view], weight_B)
    queries.append(model.unit(q_BE))
    keys.append(jax.lax.stop_gradient(model.unit(k_BE)))
  loss_B, correct_B = jnp.zeros(()), jnp.zeros(())
  for query_BE, key_BE in zip(queries, reversed(keys)):
    one_loss_B, one_correct_B = pairwise.cross_entropy(
      query_BE,
      key_BE[:, None],
      jnp.float32(1 / temperature),
      weight_B=weight_B,
      chunk=chunk,
    )
    loss_B = loss_B + 2 * temperature * one_loss_B
    correct_B = correct_B + one_correct_B / 2
  return {
    "loss": metrics.pair(loss_B, weight_B),
    "accuracy": metrics.pair(correct_B, weight_B),
    **collapse.signs(
      taught_B2D[:, 0], queries[0], queries[1], weight_B, log_step
    ),
  }, {}


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)


def problem(
  values: Mapping[str, float], *, stop_on_collapse: bool = True
) -> str | None:
  """Describes a collapse of features that a log entry shows."""
  if not stop_on_collapse:
    return None
  return collapse.problem(
    values,
    vectors="the student's predictions",
    features="the teacher's features",
  )


def predict_fns(model: Any) -> dict[str, PredictFn]:
  return {
    "pre_logits": forward.layers_fn(model, inputs),
    "pixels": forward.pixels,
  }
