"""I-JEPA: predicts the features of blocks of an image from the rest of it.

A teacher, the average of the student, sees the whole image. The student sees a
large block of patches, excluding those of some target blocks. From its
features, a predictor predicts the teacher's features of the targets
(https://arxiv.org/abs/2301.08243). No pixels are predicted, and there are no
augmentations.

Legend: B batch, P patches, K patches of the context, N target blocks, T patches
of a block, D width.

A batch has "image" [B, H, W, channels]. The model is models/ijepa.py. Examples
are independent, so microbatches only change the metric "effective_rank", which
is computed for each microbatch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops
from bigtrain.arrays.types import Batch, Metrics, Params, PredictFn, Variables
from bigtrain.config.errors import check_choice
from bigtrain.losses import block_masks, collapse, forward, teachers

# Options that may follow a schedule, with limits of their values.
LIMITS = dict(momentum=dict(least=0, most=1))
_EPS = 1e-5  # Added to the variance of the teacher's features.


def inputs(batch: Batch) -> Batch:
  return {"image": batch["image"]}


# The state: the teacher.


def init_state(params: Params) -> dict[str, Any]:
  return {"teacher": params}


def update_state(
  state: Any, *, params: Params, momentum: float = 0.996
) -> dict[str, Any]:
  """The next teacher; its `momentum` usually rises to 1."""
  return {"teacher": teachers.follow(state["teacher"], params, momentum)}


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  state: Any,
  log_step: Any = True,
  num_targets: int = 4,
  target_area: Sequence[float] = (0.15, 0.2),
  target_aspect: Sequence[float] = (0.75, 1.5),
  context_area: Sequence[float] = (0.85, 1.0),
  max_context: float = 0.5,
  min_context: int = 10,
  distance: str = "smooth_l1",
) -> tuple[Metrics, Variables]:
  """Computes the distance of predicted features from the teacher's.

  Args:
    num_targets, target_area, target_aspect, context_area, max_context,
      min_context: options of the masks, see losses/block_masks.py.
    distance: "smooth_l1", or "l2", the squared difference.
  """
  check_choice("config.loss.distance", distance, ("smooth_l1", "l2"))
  image = batch["image"]
  p, q = model.patch_size
  masks = block_masks.draw(
    batch["_keys"],
    (image.shape[1] // p, image.shape[2] // q),
    num_targets=num_targets,
    target_area=target_area,
    target_aspect=target_aspect,
    context_area=context_area,
    max_context=max_context,
    min_context=min_context,
  )
  (_, out), mutable = forward.apply(
    model,
    variables,
    rng,
    train,
    image,
    kept_BK=masks.context_BK,
    real_BK=masks.context_real_BK,
    target_BNT=masks.target_BNT,
    real_BNT=masks.target_real_BNT,
  )
  teacher = {**variables, "params": state["teacher"]}
  with model_flops.share(1, 3):  # Without a backward pass.
    _, taught = model.apply(teacher, image, train=False)
  taught_BPD = jax.lax.stop_gradient(_normalised(taught["encoded"]))
  pick = jax.vmap(lambda x_PD, i_NT: x_PD[i_NT])
  wanted_BNTD = pick(taught_BPD, masks.target_BNT)
  predicted_BNTD = out["predicted"]
  error_BNT = jnp.mean(_distance(predicted_BNTD - wanted_BNTD, distance), -1)
  real_BNT = masks.target_real_BNT
  loss_B = jnp.mean(error_BNT, axis=(1, 2), where=real_BNT)
  weight_B = metrics.example_weights(batch, loss_B)
  signs = collapse.signs(
    jnp.mean(taught_BPD, axis=1),
    # Padding of a block repeats its first patch.
    _unit(predicted_BNTD),
    _unit(wanted_BNTD),
    weight_B,
    log_step,
    others_BxE=_unit(taught_BPD),
  )
  context_B = jnp.sum(masks.context_real_BK, axis=1)
  return {
    "loss": metrics.pair(loss_B, weight_B),
    "context_patches": metrics.pair(context_B, weight_B),
    **signs,
  }, mutable


def _normalised(x_BPD: jax.Array) -> jax.Array:
  """Features normalised to mean 0 and variance 1, for each patch separately."""
  x_BPD = x_BPD.astype(jnp.float32)
  mean_BP1 = jnp.mean(x_BPD, -1, keepdims=True)
  variance_BP1 = jnp.var(x_BPD, -1, keepdims=True)
  return (x_BPD - mean_BP1) * jax.lax.rsqrt(variance_BP1 + _EPS)


def _distance(difference: jax.Array, kind: str) -> jax.Array:
  square = jnp.square(difference)
  if kind == "l2":
    return square
  size = jnp.abs(difference)
  return jnp.where(size < 1, square / 2, size - 0.5)


def _unit(x: jax.Array) -> jax.Array:
  return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + _EPS)


def problem(
  values: Mapping[str, float], *, stop_on_collapse: bool = True
) -> str | None:
  """Describes a collapse of features that a log entry shows."""
  if not stop_on_collapse:
    return None
  teachers = "the teacher's features"
  return collapse.problem(values, vectors=teachers, features=teachers)


def predict_fns(model: Any) -> dict[str, PredictFn]:
  return {
    "pre_logits": forward.layers_fn(model, inputs),
    "pixels": forward.pixels,
  }
