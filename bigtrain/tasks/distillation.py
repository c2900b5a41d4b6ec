"""Distillation: a student learns the class probabilities of a teacher.

As in "Knowledge distillation: A good teacher is patient and consistent" (Beyer
et al. 2021, arxiv.org/abs/2106.05237): both models see the same augmented and
mixed images, and the loss is a distance of their logits alone. The teacher is
`config.teacher`; it is not trained.

Legend: B batch, H height, W width, C classes.

A batch has "image" [B, H, W, 3] floats and perhaps "labels", int [B] or one-hot
[B, C], which only metrics use.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from bigtrain import metrics, model_flops, trees
from bigtrain.losses import distillation
from bigtrain.losses.mixup import mixup


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arguments of both models."""
  return {"image": batch["image"]}


def class_counts(model: Any) -> dict[str, int]:
  """Returns the student's number of classes by feature, if it has a head."""
  size = getattr(model, "num_classes", None)
  return {"labels": size} if size else {}


def loss_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  teacher: Any,
  train: bool,
  distance: str = "kl",
  temperature: float = 1.0,
  label_smoothing: float = 0.0,
  mixup_alpha: float = 0.0,
) -> tuple[metrics.Metrics, Any]:
  """Computes the distance between student and teacher.

  Args:
    variables: the student's, and the teacher's as the entry "teacher".
    batch: see the module docstring; "_mask" is 0 for padding.
    rng: key for dropout and mixup; unused in evaluation.
    model: the student, a flax module that returns (logits [B, C], dict).
    teacher: the teacher, a flax module with the same results.
    train: whether the student's dropout and updates of batch statistics, and
      mixup, are on.
    distance: "kl", "hard", "l2", "euclidean" or "logsoftmax_euclidean"; see
      losses/distillation.py.
    temperature: of "kl".
    label_smoothing: of "hard".
    mixup_alpha: parameter of mixup's beta distribution; 0 turns mixup off.

  Returns:
    ({"loss", "agreement": same best class, "entropy", "teacher_entropy", and
    with labels "accuracy" and "teacher_accuracy": pairs}, the student's new
    mutable collections).
  """
  student = {k: v for k, v in variables.items() if k != "teacher"}
  mutable = [name for name in student if name != "params"]
  mixup_rng, dropout_rng = jax.random.split(rng) if train else (None, None)
  image = batch["image"]
  if train and trees.is_on(mixup_alpha):
    image, _ = mixup(mixup_rng, image, mixup_alpha)
  (logits_BC, _), new_mutable = model.apply(
    student,
    image,
    train=train,
    rngs={"dropout": dropout_rng} if train else None,
    mutable=mutable if train else [],
  )
  # Three passes of the loss count as the model FLOPs of a step, forward and
  # backward. The teacher has no backward pass.
  with model_flops.share(1, 3):
    teacher_BC = _teacher_logits(teacher, variables, image)
  per_example = {
    "loss": distillation.distance(
      logits_BC,
      teacher_BC,
      distance,
      temperature=temperature,
      label_smoothing=label_smoothing,
    ),
    "agreement": distillation.agreement(logits_BC, teacher_BC),
    "entropy": distillation.entropy(logits_BC),
    "teacher_entropy": distillation.entropy(teacher_BC),
  }
  if "labels" in batch:
    labels = batch["labels"]
    per_example |= {
      "accuracy": metrics.top_k_hits(logits_BC, labels, 1),
      "teacher_accuracy": metrics.top_k_hits(teacher_BC, labels, 1),
    }
  weight_B = metrics.example_weights(batch, logits_BC)
  pairs = {k: metrics.pair(x_B, weight_B) for k, x_B in per_example.items()}
  return pairs, new_mutable if train else {k: variables[k] for k in mutable}


def _teacher_logits(teacher: Any, variables: Any, image: jax.Array) -> Any:
  logits_BC, _ = teacher.apply(variables["teacher"], image, train=False)
  return jax.lax.stop_gradient(logits_BC)


def predict_fns(
  model: Any, teacher: Any = None
) -> dict[str, Callable[..., Any]]:
  """Returns functions for evaluators.

  They are "logits" and "pre_logits" of the student, and with a teacher
  "teacher_logits" and "loss", with the metrics of both.

  Args:
    model: the student.
    teacher: the teacher; None where only the student is loaded.
  """

  def apply(variables: Any, batch: Mapping[str, Any]) -> Any:
    student = {k: v for k, v in variables.items() if k != "teacher"}
    return model.apply(student, **inputs(batch), train=False)

  def logits(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return apply(variables, batch)[0]

  def pre_logits(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return apply(variables, batch)[1]["pre_logits"]

  def teacher_logits(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return _teacher_logits(teacher, variables, batch["image"])

  def loss(
    variables: Any, batch: Mapping[str, Any], **options: Any
  ) -> metrics.Metrics:
    pairs, _ = loss_fn(
      variables,
      batch,
      None,
      model=model,
      teacher=teacher,
      train=False,
      **options,
    )
    return pairs

  fns: dict[str, Callable[..., Any]] = {
    "logits": logits,
    "pre_logits": pre_logits,
  }
  if teacher is not None:
    fns |= {"teacher_logits": teacher_logits, "loss": loss}
  return fns
