"""Distillation: a student learns the class probabilities of its teachers.

As in Beyer et al. 2021, arxiv.org/abs/2106.05237, all models see the same mixed
images, and the loss is only a distance between their logits. `config.teacher`
is one teacher, or several by name; they are not trained. With ema=True and
`label_weight` it is a mean teacher, arxiv.org/abs/1703.01780.

Legend: B batch, H height, W width, C classes.

A batch has "image" [B, H, W, 3] floats and optionally "labels", int [B] or
one-hot [B, C], which only metrics and `label_weight` use; an example without a
label has zeros. The teacher sees "teacher_image" if there is one, or
"NAME_image" if its name is NAME: for instance the same view at a different
resolution. This image is blended like the student's. "shapes" belong to the
student's image, see models.vit.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops, picture_features
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.losses import cross_entropy, distances, forward, mixup, teachers

# Options that may follow a schedule, with limits of their values.
LIMITS = dict(temperature=dict(above=0), label_weight=dict(least=0))


def inputs(batch: Batch) -> Batch:
  return picture_features.of(batch)


def class_counts(model: Any) -> dict[str, int]:
  size = getattr(model, "num_classes", None)
  return {"labels": size} if size else {}


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  teacher: Any,
  train: bool,
  distance: str = "kl",
  temperature: float = 1.0,
  label_smoothing: float = 0.0,
  mixup_alpha: float = 0.0,
  cutmix_alpha: float = 0.0,
  cutmix_prob: float = 0.5,
  weights: Mapping[str, float] | None = None,
  label_weight: Any = 0.0,
) -> tuple[Metrics, Variables]:
  """Computes the distance between student and teacher.

  Args:
    variables: the student's variables, with the teacher's as entry "teacher".
    distance: "kl", "hard", "l2", "euclidean" or "logsoftmax_euclidean"; see
      losses/distances.py.
    temperature: used by "kl".
    label_smoothing: used by "hard".
    mixup_alpha: parameter of mixup's beta distribution; 0 turns mixup off.
    cutmix_alpha: the same for CutMix.
    cutmix_prob: share of the batches with CutMix, if both are on.
    weights: weights of the distances from several teachers, by name; by
      default their mean. big_vision's are 1.
    label_weight: weight of the cross-entropy with the labels, which is added.
  """
  student = _without_teacher(variables)
  (logits_BC, _), image, mix, mutable = mixup.apply(
    model,
    student,
    inputs(batch),
    rng,
    (mixup_alpha, cutmix_alpha, cutmix_prob),
    train,
  )
  teacher_logits = _teacher_logits(teacher, variables, batch, image, mix)
  shares = teachers.weights_of(teacher_logits, weights, "config.loss.weights")
  loss_B: Any = 0
  losses = {}
  for name, x_BC in teacher_logits.items():
    distance_B = distances.distance(
      logits_BC,
      x_BC,
      distance,
      temperature=temperature,
      label_smoothing=label_smoothing,
    )
    losses[f"{name}_loss"] = distance_B
    loss_B = loss_B + shares[name] * distance_B
  if isinstance(label_weight, jax.Array) or label_weight:
    labels = batch["labels"]
    xent = functools.partial(cross_entropy.softmax_xent, logits_BC)
    xent_B = mix.losses(image, labels, xent) if mix else xent(labels)
    losses["label_loss"] = xent_B
    loss_B = loss_B + label_weight * xent_B
  teacher_BC = _ensemble(teacher_logits)
  per_example: dict[str, Any] = {
    "loss": loss_B,
    **(losses if len(losses) > 1 else {}),
    "agreement": distances.agreement(logits_BC, teacher_BC),
    "entropy": distances.entropy(logits_BC),
    "teacher_entropy": distances.entropy(teacher_BC),
  }
  if "labels" in batch:
    labels = batch["labels"]
    per_example |= {
      "accuracy": metrics.top_k_hits(logits_BC, labels, 1),
      "teacher_accuracy": metrics.top_k_hits(teacher_BC, labels, 1),
    }
  weight_B = metrics.example_weights(batch, logits_BC)
  result = {
    name: metrics.pair(x_B, weight_B) for name, x_B in per_example.items()
  }
  return result, mutable


def _without_teacher(variables: Variables) -> Variables:
  return {name: x for name, x in variables.items() if name != "teacher"}


def _teacher_logits(
  teacher: Any,
  variables: Variables,
  batch: Batch,
  image: jax.Array,
  mix: mixup.Mix | None = None,
) -> dict[str, jax.Array]:
  """Logits [B, C] by name; `image` is the student's, already blended."""
  result = {}
  # Three passes count as a step's model FLOPs; a teacher has one of them.
  with model_flops.share(1, 3):
    for name, model, fixed in teachers.by_name(teacher, variables):
      seen: Batch = {**inputs(batch), "image": image}
      for feature in (f"{name}_image", "teacher_image"):
        if feature in batch:
          own_image = batch[feature]
          seen = {"image": mix.images(own_image) if mix else own_image}
          break
      logits_BC, _ = model.apply(fixed, **seen, train=False)
      result[name] = jax.lax.stop_gradient(logits_BC)
  return result


def _ensemble(logits: Mapping[str, jax.Array]) -> jax.Array:
  """Logits of the teachers' mean probabilities, or of the single teacher."""
  if len(logits) == 1:
    return next(iter(logits.values()))
  log_p = [jax.nn.log_softmax(x_BC) for x_BC in logits.values()]
  return jax.nn.logsumexp(jnp.stack(log_p), axis=0) - jnp.log(len(logits))


def predict_fns(model: Any, teacher: Any = None) -> dict[str, PredictFn]:
  """Functions for evaluators: the student's "logits" and "pre_logits".

  With a teacher (None for inference) there are also "loss" and
  "teacher_logits". With several teachers, these are the logits of their mean
  probabilities.
  """

  def logits(variables: Variables, batch: Batch) -> jax.Array:
    student = _without_teacher(variables)
    return model.apply(student, **inputs(batch), train=False)[0]

  def teacher_logits(variables: Variables, batch: Batch) -> jax.Array:
    return _ensemble(_teacher_logits(teacher, variables, batch, batch["image"]))

  fns: dict[str, PredictFn] = {
    "logits": logits,
    "pre_logits": forward.layers_fn(model, inputs),
  }
  if teacher is not None:
    loss = forward.metrics_fn(loss_fn, model=model, teacher=teacher)
    fns |= {"teacher_logits": teacher_logits, "loss": loss}
  return fns
