"""Distillation: a student learns the class probabilities of its teachers.

As in Beyer et al. 2021, arxiv.org/abs/2106.05237: all models see the same
mixed images, and the loss is a distance of their logits alone. `config.teacher`
is one teacher, or several by name; they are not trained. With ema=True and
`label_weight` it is a mean teacher, arxiv.org/abs/1703.01780.

Legend: B batch, H height, W width, C classes.

A batch has "image" [B, H, W, 3] floats and perhaps "labels", int [B] or one-hot
[B, C], which only metrics and `label_weight` use; of an example without a label
they are zeros. With "teacher_image", or "NAME_image" for the teacher NAME, it
sees that one, such as the same view at its own resolution, blended in the same
way. "shapes" are of the student's image, see models.vit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.losses import cross_entropy, distances, forward, mixup, teachers


def inputs(batch: Batch) -> Batch:
  return {name: batch[name] for name in ("image", "shapes") if name in batch}


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
  label_weight: float = 0.0,
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
    weights: of the distances from several teachers, by name; by default of
      their mean. big_vision's are 1.
    label_weight: of the cross-entropy with the labels, which is added.
  """
  student = {k: v for k, v in variables.items() if k != "teacher"}
  mixing = mixup_alpha, cutmix_alpha, cutmix_prob
  (logits_BC, _), image, mix, mutable = mixup.apply(
    model, student, inputs(batch), rng, mixing, train
  )
  blend = (lambda x: x) if mix is None else mix.images
  taught = _teacher_logits(teacher, variables, batch, image, blend)
  shares = teachers.weights_of(taught, weights, "config.loss.weights")
  options = dict(temperature=temperature, label_smoothing=label_smoothing)
  losses = {
    f"{name}_loss": distances.distance(logits_BC, x_BC, distance, **options)
    for name, x_BC in taught.items()
  }
  loss_B = sum(shares[name] * losses[f"{name}_loss"] for name in taught)
  if label_weight:
    xent = lambda labels: cross_entropy.softmax_xent(logits_BC, labels)
    labels = batch["labels"]
    xent_B = mix.losses(image, labels, xent) if mix else xent(labels)
    loss_B, losses["label_loss"] = loss_B + label_weight * xent_B, xent_B
  teacher_BC = _ensemble(taught)
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
  result = {n: metrics.pair(x_B, weight_B) for n, x_B in per_example.items()}
  return result, mutable


def _teacher_logits(
  teacher: Any,
  variables: Variables,
  batch: Batch,
  image: jax.Array,
  blend: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
  """Logits [B, C] by name; `image` is the student's, as it sees it."""
  result = {}
  # Three passes count as a step's model FLOPs; a teacher has one of them.
  with model_flops.share(1, 3):
    for name, model, fixed in teachers.by_name(teacher, variables):
      own = [f"{x}_image" for x in (name, "teacher") if f"{x}_image" in batch]
      seen = {**inputs(batch), "image": image}
      seen = {"image": blend(batch[own[0]])} if own else seen
      result[name] = jax.lax.stop_gradient(
        model.apply(fixed, **seen, train=False)[0]
      )
  return result


def _ensemble(logits: Mapping[str, jax.Array]) -> jax.Array:
  """Logits of the mean probabilities; of one teacher its own."""
  if len(logits) == 1:
    return next(iter(logits.values()))
  log_p = [jax.nn.log_softmax(x_BC) for x_BC in logits.values()]
  return jax.nn.logsumexp(jnp.stack(log_p), axis=0) - jnp.log(len(logits))


def predict_fns(model: Any, teacher: Any = None) -> dict[str, PredictFn]:
  """ "logits" and "pre_logits" of the student, for evaluators.

  With a teacher (None for inference) also "loss", and "teacher_logits", of
  several those of their mean probabilities.
  """

  def logits(variables: Variables, batch: Batch) -> jax.Array:
    student = {k: v for k, v in variables.items() if k != "teacher"}
    return model.apply(student, **inputs(batch), train=False)[0]

  def teacher_logits(variables: Variables, batch: Batch) -> jax.Array:
    same = lambda x: x
    return _ensemble(
      _teacher_logits(teacher, variables, batch, batch["image"], same)
    )

  pre_logits = forward.layers_fn(model, inputs)
  fns: dict[str, PredictFn] = {"logits": logits, "pre_logits": pre_logits}
  if teacher is not None:
    loss = forward.metrics_fn(loss_fn, model=model, teacher=teacher)
    fns |= {"teacher_logits": teacher_logits, "loss": loss}
  return fns
