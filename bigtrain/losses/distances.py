"""Distances between the logits of a student and of its teacher.

Sources: Hinton et al. 2015 (arxiv.org/abs/1503.02531) for "kl", and Beyer et
al. 2021 (arxiv.org/abs/2106.05237), whose code compares the others.

Axes: B batch, C classes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import settings

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
    kind: "kl": Kullback-Leibler divergence from the teacher's distribution to
      the student's, both at the temperature, times its square; "hard":
      cross-entropy with the teacher's best class, minus the entropy of the
      label smoothed over the other classes; "l2": squared Euclidean distance;
      "euclidean"; "logsoftmax_euclidean", between log-probabilities.
  """
  settings.check_choice("config.loss.distance", kind, _DISTANCES)
  if student_BC.shape != teacher_BC.shape:
    raise settings.ConfigError(
      f"config.teacher.model: expected {student_BC.shape[-1]} classes, as the "
      f"student has, got {teacher_BC.shape[-1]}."
    )
  student_BC, teacher_BC = (
    x_BC.astype(jnp.float32) for x_BC in (student_BC, teacher_BC)
  )
  return _DISTANCES[kind](student_BC, teacher_BC, temperature, label_smoothing)


def agreement(student_BC: jax.Array, teacher_BC: jax.Array) -> jax.Array:
  return jnp.argmax(student_BC, axis=-1) == jnp.argmax(teacher_BC, axis=-1)


def entropy(logits_BC: jax.Array) -> jax.Array:
  log_p_BC = jax.nn.log_softmax(logits_BC.astype(jnp.float32))
  return -jnp.sum(jnp.exp(log_p_BC) * log_p_BC, axis=-1)


def _kl(s_BC: Any, t_BC: Any, temperature: float, smoothing: float) -> Any:
  log_s_BC = jax.nn.log_softmax(s_BC / temperature)
  log_t_BC = jax.nn.log_softmax(t_BC / temperature)
  divergence = jnp.sum(jnp.exp(log_t_BC) * (log_t_BC - log_s_BC), axis=-1)
  return temperature**2 * divergence


def _hard(s_BC: Any, t_BC: Any, temperature: float, smoothing: float) -> Any:
  num_classes = t_BC.shape[-1]
  best_BC = jax.nn.one_hot(jnp.argmax(t_BC, axis=-1), num_classes)
  rest = smoothing / (num_classes - 1)
  labels_BC = (1.0 - smoothing) * best_BC + rest * (1.0 - best_BC)
  log_s_BC = jax.nn.log_softmax(s_BC)
  return jnp.sum(
    jax.scipy.special.xlogy(labels_BC, labels_BC) - labels_BC * log_s_BC, -1
  )


def _l2(s_BC: Any, t_BC: Any, temperature: float, smoothing: float) -> Any:
  return jnp.sum(jnp.square(s_BC - t_BC), axis=-1)


def _euclidean(
  s_BC: Any, t_BC: Any, temperature: float, smoothing: float
) -> Any:
  return jnp.sqrt(_l2(s_BC, t_BC, temperature, smoothing) + _EPSILON)


def _logsoftmax_euclidean(
  s_BC: Any, t_BC: Any, temperature: float, smoothing: float
) -> Any:
  log_s_BC, log_t_BC = jax.nn.log_softmax(s_BC), jax.nn.log_softmax(t_BC)
  return _euclidean(log_s_BC, log_t_BC, temperature, smoothing)


_DISTANCES: dict[str, Callable[..., Any]] = {
  "euclidean": _euclidean,
  "hard": _hard,
  "kl": _kl,
  "l2": _l2,
  "logsoftmax_euclidean": _logsoftmax_euclidean,
}
