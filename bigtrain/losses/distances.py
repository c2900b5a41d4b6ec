"""Distances between the logits of a student and those of its teacher.

From Hinton et al. 2015 (arxiv.org/abs/1503.02531) for "kl", and Beyer et al.
2021 (arxiv.org/abs/2106.05237). Axes: B batch, C classes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.config.errors import ConfigError, check_choice

KINDS = ("kl", "hard", "l2", "euclidean", "logsoftmax_euclidean")
# Keeps the gradient of a square root finite where both are equal.
_EPSILON = 1e-12


def distance(
  student_BC: jax.Array,
  teacher_BC: jax.Array,
  kind: str = "kl",
  *,
  temperature: float = 1.0,
  label_smoothing: float = 0.0,
) -> jax.Array:
  """Returns the distance of each example, float32 [B].

  Args:
    kind: "kl": Kullback-Leibler divergence, times the squared temperature;
      "hard": cross-entropy with the teacher's best class, minus the entropy of
      the smoothed label; "l2": squared Euclidean distance; "euclidean": its
      root; "logsoftmax_euclidean": the same between log-probabilities.
  """
  check_choice("config.loss.distance", kind, KINDS)
  _check_used("temperature", temperature, 1, kind, "kl")
  _check_used("label_smoothing", label_smoothing, 0, kind, "hard")
  if student_BC.shape != teacher_BC.shape:
    raise ConfigError(
      f"config.teacher.model: expected {student_BC.shape[-1]} classes, as the "
      f"student has, got {teacher_BC.shape[-1]}."
    )
  s_BC, t_BC = student_BC.astype(jnp.float32), teacher_BC.astype(jnp.float32)
  log_softmax = jax.nn.log_softmax
  if kind == "kl":
    log_s_BC = log_softmax(s_BC / temperature)
    log_t_BC = log_softmax(t_BC / temperature)
    divergence_B = jnp.sum(jnp.exp(log_t_BC) * (log_t_BC - log_s_BC), axis=-1)
    return temperature**2 * divergence_B
  if kind == "hard":
    C = t_BC.shape[-1]
    best_BC = jax.nn.one_hot(jnp.argmax(t_BC, axis=-1), C)
    rest = label_smoothing / (C - 1)
    labels_BC = (1.0 - label_smoothing) * best_BC + rest * (1.0 - best_BC)
    negative_BC = jax.scipy.special.xlogy(labels_BC, labels_BC)
    return jnp.sum(negative_BC - labels_BC * log_softmax(s_BC), axis=-1)
  if kind == "logsoftmax_euclidean":
    s_BC, t_BC = log_softmax(s_BC), log_softmax(t_BC)
  square_B = jnp.sum(jnp.square(s_BC - t_BC), axis=-1)
  return square_B if kind == "l2" else jnp.sqrt(square_B + _EPSILON)


def _check_used(
  name: str, value: Any, default: float, kind: str, only_kind: str
) -> None:
  """Raises ConfigError for an option that the kind does not have."""
  is_default = not isinstance(value, jax.Array) and value == default
  if kind != only_kind and not is_default:
    raise ConfigError(
      f"config.loss.{name}: used only with distance={only_kind!r}, got "
      f"{kind!r}."
    )


def agreement(student_BC: jax.Array, teacher_BC: jax.Array) -> jax.Array:
  """Whether both have the same best class; False if the teacher has none."""
  best_B = jnp.argmax(teacher_BC, axis=-1)
  hits_B = metrics.top_k_hits(student_BC, best_B, 1)
  return hits_B & metrics.has_order(teacher_BC)


def entropy(logits_BC: jax.Array) -> jax.Array:
  log_p_BC = jax.nn.log_softmax(logits_BC.astype(jnp.float32))
  return -jnp.sum(jnp.exp(log_p_BC) * log_p_BC, axis=-1)
