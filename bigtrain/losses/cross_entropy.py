"""Per-example losses in float32; the caller weights and reduces.

Axes: B batch, L length, D width, C classes, V vocabulary, K chunk of L; `...`
any leading axes. Labels are class numbers [...], which must be valid wherever
they are, padding included (any other gives NaN), or class probabilities
[..., C] such as one-hot vectors or mixtures of them.
"""

from typing import Any

import jax
import jax.numpy as jnp


def softmax_xent(
  logits: jax.Array,
  labels: jax.Array,
  *,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
) -> jax.Array:
  """Cross-entropy of softmax(logits) against the labels.

  Args:
    logits: [..., C].
    labels: class numbers [...] or probabilities [..., C].
    label_smoothing: weight of the uniform distribution that labels are mixed
      with (Szegedy et al. 2016, arxiv.org/abs/1512.00567).
    z_loss: weight of logsumexp(logits) ** 2, which keeps logits from drifting
      (Chowdhery et al. 2022, arxiv.org/abs/2204.02311, section 5).

  Returns:
    float32 [...], in nats.
  """
  logits = logits.astype(jnp.float32)
  # The loss knows only differences of logits: small ones lose no digits.
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  logits = logits - top[..., None]
  normaliser = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
  total: Any = 1.0
  if _are_classes(logits, labels):
    # A masked sum and no gather: its gradient is no scatter, and it fuses.
    picked = jnp.sum(jnp.where(hits(logits, labels), logits, 0.0), axis=-1)
    picked += _nan_unless_valid(logits, labels)
  else:
    labels = labels.astype(jnp.float32)
    picked = jnp.sum(labels * logits, axis=-1)
    total = jnp.sum(labels, axis=-1)
  if label_smoothing:
    mean = jnp.mean(logits, axis=-1)
    picked = (1 - label_smoothing) * picked + label_smoothing * total * mean
  loss = total * normaliser - picked
  return loss + z_loss * jnp.square(normaliser + top) if z_loss else loss


def sigmoid_xent(
  logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0
) -> jax.Array:
  """Binary cross-entropy of each class, SUMMED over the classes.

  The published sigmoid recipes (Beyer et al. 2020, arxiv.org/abs/2006.07159)
  sum; a mean would want a learning rate that grows with C.

  Args:
    logits: [..., C].
    labels: class numbers [...], or a probability for each class [..., C],
      which need not add up to 1.
    label_smoothing: labels become (1 - s) * label + s / C.

  Returns:
    float32 [...], in nats.
  """
  logits = logits.astype(jnp.float32)
  invalid: Any = 0.0
  if _are_classes(logits, labels):
    invalid = _nan_unless_valid(logits, labels)
    labels = hits(logits, labels)
  labels = labels.astype(jnp.float32)
  if label_smoothing:
    num_classes = logits.shape[-1]
    labels = (1 - label_smoothing) * labels + label_smoothing / num_classes
  # Not through abs(logits): its gradient is wrong at 0, where heads start.
  losses = labels * jax.nn.softplus(-logits) + (1 - labels) * jax.nn.softplus(
    logits
  )
  return jnp.sum(losses, axis=-1) + invalid


def _are_classes(logits: jax.Array, labels: jax.Array) -> bool:
  if labels.shape == logits.shape:
    return False
  if labels.shape == logits.shape[:-1] and jnp.issubdtype(
    labels.dtype, jnp.integer
  ):
    return True
  raise ValueError(
    f"labels {labels.dtype}{list(labels.shape)} are neither class numbers nor "
    f"probabilities for logits {list(logits.shape)}."
  )


def hits(logits: jax.Array, classes: jax.Array) -> jax.Array:
  return classes[..., None] == jnp.arange(logits.shape[-1])


def _nan_unless_valid(logits: jax.Array, classes: jax.Array) -> jax.Array:
  """A bad label must not pass for one that is merely hard to predict."""
  valid = (classes >= 0) & (classes < logits.shape[-1])
  return jnp.where(valid, 0.0, jnp.nan)
