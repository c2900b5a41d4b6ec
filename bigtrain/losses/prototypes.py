"""Losses of self-distillation over prototypes, and signs of a collapse.

Legend: N samples of the global batch, K prototypes, D width.

All sums over N are over the whole global batch, on any mesh. A sample of weight
0, such as padding, has no effect.
"""

import jax
import jax.numpy as jnp

_EPS = 1e-8


def sinkhorn(
  logits_NK: jax.Array, weight_N: jax.Array, rounds: int = 3
) -> jax.Array:
  """Assignments [N, K] that use all prototypes equally (Sinkhorn-Knopp).

  Each row adds up to 1, and each column to about N / K (Caron et al. 2020,
  arXiv 2006.09882; 3 rounds as in DINOv2, arXiv 2304.07193). It is computed
  with logarithms, so that low temperatures do not overflow.
  """
  log_weight_N1 = jnp.log(weight_N)[:, None]  # -inf for padding.
  log_q_NK = logits_NK.astype(jnp.float32)
  for _ in range(rounds):
    total_1K = jax.nn.logsumexp(log_q_NK + log_weight_N1, 0, keepdims=True)
    # Without any sample all are -inf.
    total_1K = jnp.where(jnp.isfinite(total_1K), total_1K, 0.0)
    log_q_NK = jax.nn.log_softmax(log_q_NK - total_1K, axis=-1)
  return jnp.exp(log_q_NK)


def cross_entropy(target_NK: jax.Array, logits_NK: jax.Array) -> jax.Array:
  """Cross-entropy [N] of logits and assignments, in nats."""
  log_p_NK = jax.nn.log_softmax(logits_NK.astype(jnp.float32), axis=-1)
  return -jnp.sum(target_NK * log_p_NK, axis=-1)


def koleo(x_ND: jax.Array, weight_N: jax.Array) -> jax.Array:
  """-log of the distance to the nearest other sample, [N], of unit vectors.

  The estimator of Kozachenko and Leonenko spreads features (Sablayrolles et al.
  2018, arXiv 1806.03198). Neighbours are found in the global batch;
  DINOv2's code looks for them only within each device.
  """
  x_ND = x_ND.astype(jnp.float32)
  x_ND = x_ND / (jnp.linalg.norm(x_ND, axis=-1, keepdims=True) + _EPS)
  N = len(x_ND)
  cosine_NN = jax.lax.stop_gradient(x_ND @ x_ND.T)
  is_other_NN = ~jnp.eye(N, dtype=bool) & (weight_N > 0)[None]
  nearest_N = jnp.argmax(jnp.where(is_other_NN, cosine_NN, -2.0), axis=1)
  distance_N = jnp.sqrt(
    jnp.sum(jnp.square(x_ND - x_ND[nearest_N]), -1) + _EPS**2
  )
  return -jnp.log(distance_N + _EPS)


def entropy(p: jax.Array) -> jax.Array:
  """Entropy of the last axis, in nats."""
  return -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)


def used(target_NK: jax.Array, weight_N: jax.Array) -> jax.Array:
  """Number of prototypes in use: exp of the entropy of the mean assignment."""
  share_N = weight_N / jnp.maximum(jnp.sum(weight_N), 1.0)
  return jnp.exp(entropy(share_N @ target_NK))


def effective_rank(x_ND: jax.Array, weight_N: jax.Array) -> jax.Array:
  """exp of the entropy of the normalised singular values of centred features.

  It is between 1, if all are on a line, and D (Roy and Vetterli 2007).
  Singular values that are only rounding count as 0. There may be D of them, and
  each would add to the entropy.
  """
  x_ND = x_ND.astype(jnp.float32)
  share_N1 = (weight_N / jnp.maximum(jnp.sum(weight_N), 1.0))[:, None]
  centred_ND = x_ND - jnp.sum(share_N1 * x_ND, 0)
  covariance_DD = (share_N1 * centred_ND).T @ centred_ND
  squares_D = jnp.linalg.eigvalsh(covariance_DD)
  # The error of an eigenvalue, relative to the largest, as in matrix_rank.
  rounding = len(squares_D) * jnp.finfo(jnp.float32).eps
  is_known_D = squares_D > rounding * jnp.max(squares_D)
  values_D = jnp.sqrt(jnp.where(is_known_D, squares_D, 0.0))
  return jnp.exp(entropy(values_D / jnp.maximum(jnp.sum(values_D), _EPS)))
