"""Distillation: a student learns the class probabilities of a teacher.

As in Beyer et al. 2021, arxiv.org/abs/2106.05237: both models see the same
mixed images, and the loss is a distance of their logits alone. The teacher is
`config.teacher`; it is not trained.

Legend: B batch, H height, W width, C classes.

A batch has "image" [B, H, W, 3] floats and perhaps "labels", int [B] or one-hot
[B, C], which only metrics use. With "teacher_image", the teacher sees that one,
such as the same view at its own resolution, blended in the same way.
"""

from typing import Any

import jax

from bigtrain import metrics, model_flops
from bigtrain.losses import distances, forward, mixup
from bigtrain.types import Batch, Metrics, PredictFn, Variables


def inputs(batch: Batch) -> Batch:
  return {"image": batch["image"]}


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
) -> tuple[Metrics, Variables]:
  """Computes the distance between student and teacher.

  Args:
    variables: the student's, and the teacher's as the entry "teacher".
    distance: "kl", "hard", "l2", "euclidean" or "logsoftmax_euclidean"; see
      losses/distances.py.
    temperature, label_smoothing: of "kl", and of "hard".
    mixup_alpha: parameter of mixup's beta distribution; 0 turns mixup off.
    cutmix_alpha: the same of CutMix.
    cutmix_prob: share of the batches with CutMix, if both are on.
  """
  student = {k: v for k, v in variables.items() if k != "teacher"}
  mixing = mixup_alpha, cutmix_alpha, cutmix_prob
  (logits_BC, _), image, mix, mutable = mixup.apply(
    model, student, inputs(batch), rng, mixing, train
  )
  if "teacher_image" in batch:
    image = batch["teacher_image"]
    image = image if mix is None else mix.images(image)
  # Three passes count as a step's model FLOPs; the teacher has one of them.
  with model_flops.share(1, 3):
    teacher_BC = _teacher_logits(teacher, variables, image)
  per_example = {
    "loss": distances.distance(
      logits_BC,
      teacher_BC,
      distance,
      temperature=temperature,
      label_smoothing=label_smoothing,
    ),
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
  result = {n: metrics.pair(x_B, weight_B) for n, x_B in per_example.items()}
  return result, mutable


def _teacher_logits(
  teacher: Any, variables: Variables, image: jax.Array
) -> jax.Array:
  logits_BC, _ = teacher.apply(variables["teacher"], image, train=False)
  return jax.lax.stop_gradient(logits_BC)


def predict_fns(model: Any, teacher: Any = None) -> dict[str, PredictFn]:
  """ "logits" and "pre_logits" of the student, for evaluators.

  With a teacher (None for inference) also "teacher_logits" and "loss".
  """

  def logits(variables: Variables, batch: Batch) -> jax.Array:
    student = {k: v for k, v in variables.items() if k != "teacher"}
    return model.apply(student, **inputs(batch), train=False)[0]

  def teacher_logits(variables: Variables, batch: Batch) -> jax.Array:
    name = "teacher_image" if "teacher_image" in batch else "image"
    return _teacher_logits(teacher, variables, batch[name])

  pre_logits = forward.layers_fn(model, inputs)
  fns: dict[str, PredictFn] = {"logits": logits, "pre_logits": pre_logits}
  if teacher is not None:
    loss = forward.metrics_fn(loss_fn, model=model, teacher=teacher)
    fns |= {"teacher_logits": teacher_logits, "loss": loss}
  return fns
