"""Cross-entropy of each example in float32; the caller weights and reduces.

Axes: C classes; `...` any leading axes. Labels are class numbers [...] or class
probabilities [..., C]. Class numbers outside [0, C) give NaN, even in padding.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.config.errors import check_choice, check_number

# Values of config.loss.label_smoothing_over.
SMOOTHING_OVER = ("all", "others")


def softmax_xent(
  logits: jax.Array,
  labels: jax.Array,
  *,
  label_smoothing: float = 0.0,
  label_smoothing_over: str = "all",
  z_loss: float = 0.0,
  axis_name: str | None = None,
) -> jax.Array:
  """Computes the cross-entropy of softmax(logits) against the labels, in nats.

  Args:
    label_smoothing_over: "all" spreads that share of the label evenly over all
      C classes, including the label's own (Szegedy et al. 2016,
      arxiv.org/abs/1512.00567); "others" over the C - 1 other classes, as in
      big_vision and T5X.
    z_loss: weight of logsumexp(logits) ** 2, which keeps logits from drifting
      (Chowdhery et al. 2022, arxiv.org/abs/2204.02311, section 5).
    axis_name: axis of a shard_map over which the classes of the logits are
      split. Labels are then class numbers, counted over all classes. Devices
      exchange a few numbers per loss.
  """
  check_choice(
    "config.loss.label_smoothing_over", label_smoothing_over, SMOOTHING_OVER
  )
  logits = logits.astype(jnp.float32)
  # Only differences of logits matter, and small numbers keep their digits.
  top = jax.lax.stop_gradient(largest(logits, axis_name))
  logits = logits - top[..., None]
  normaliser = jnp.log(total_of(jnp.sum(jnp.exp(logits), axis=-1), axis_name))
  total: Any = 1.0
  if _are_classes(logits, labels):
    # A masked sum fuses, and unlike a gather has no scatter as its gradient.
    mask = label_mask(logits, labels, axis_name)
    picked = jnp.sum(jnp.where(mask, logits, 0.0), axis=-1)
    picked = total_of(picked, axis_name)
    picked += _nan_unless_valid(logits, labels, axis_name)
  else:
    labels = labels.astype(jnp.float32)
    picked = total_of(jnp.sum(labels * logits, axis=-1), axis_name)
    total = total_of(jnp.sum(labels, axis=-1), axis_name)
  if _smooths(label_smoothing):
    share = label_smoothing
    mean = jnp.mean(logits, axis=-1)
    if axis_name:
      mean = jax.lax.pmean(mean, axis_name)
    if label_smoothing_over == "others":
      # Spreading this larger share over all classes is the same.
      C = logits.shape[-1] * num_parts(axis_name)
      share = label_smoothing * C / (C - 1)
    picked = (1 - share) * picked + share * total * mean
  loss: jax.Array = total * normaliser - picked
  if z_loss:
    loss += z_loss * jnp.square(normaliser + top)
  return loss


def _smooths(label_smoothing: float) -> bool:
  check_number("config.loss.label_smoothing", label_smoothing, least=0, below=1)
  return label_smoothing != 0


def sigmoid_xent(
  logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0
) -> jax.Array:
  """Computes the binary cross-entropy of each class, SUMMED over the classes.

  The published sigmoid recipes (Beyer et al. 2020, arxiv.org/abs/2006.07159)
  use the sum. With smoothing, labels become (1 - s) * label + s / C.
  """
  logits = logits.astype(jnp.float32)
  invalid: Any = 0.0
  if _are_classes(logits, labels):
    invalid = _nan_unless_valid(logits, labels)
    labels = label_mask(logits, labels)
  labels = labels.astype(jnp.float32)
  if _smooths(label_smoothing):
    num_classes = logits.shape[-1]
    labels = (1 - label_smoothing) * labels + label_smoothing / num_classes
  # abs(logits) would have a wrong gradient at 0, where heads of zeros start.
  softplus = jax.nn.softplus
  losses = labels * softplus(-logits) + (1 - labels) * softplus(logits)
  return jnp.sum(losses, axis=-1) + invalid


def _are_classes(logits: jax.Array, labels: jax.Array) -> bool:
  """Whether labels are class numbers rather than probabilities."""
  if labels.shape == logits.shape:
    return False
  integers = jnp.issubdtype(labels.dtype, jnp.integer)
  if integers and labels.shape == logits.shape[:-1]:
    return True
  raise ValueError(
    f"labels: expected int{list(logits.shape[:-1])} class numbers or "
    f"{list(logits.shape)} probabilities for logits {list(logits.shape)}, got "
    f"{labels.dtype}{list(labels.shape)}."
  )


# These reduce over classes that `axis_name` may split over devices.


def largest(logits: jax.Array, axis_name: str | None = None) -> jax.Array:
  top = jnp.max(logits, axis=-1)
  if axis_name is None:
    return top
  return jax.lax.pmax(jax.lax.stop_gradient(top), axis_name)


def total_of(values: jax.Array, axis_name: str | None) -> jax.Array:
  return jax.lax.psum(values, axis_name) if axis_name else values


def num_parts(axis_name: str | None) -> int:
  return jax.lax.axis_size(axis_name) if axis_name else 1


def class_numbers(logits: jax.Array, axis_name: str | None = None) -> jax.Array:
  C = logits.shape[-1]
  if axis_name is None:
    return jnp.arange(C)
  return jax.lax.axis_index(axis_name) * C + jnp.arange(C)


def label_mask(
  logits: jax.Array, classes: jax.Array, axis_name: str | None = None
) -> jax.Array:
  return classes[..., None] == class_numbers(logits, axis_name)


def _nan_unless_valid(
  logits: jax.Array, classes: jax.Array, axis_name: str | None = None
) -> jax.Array:
  # Without NaN an invalid label would look like one that is hard to predict.
  C = logits.shape[-1] * num_parts(axis_name)
  valid = (classes >= 0) & (classes < C)
  return jnp.where(valid, 0.0, jnp.nan)
