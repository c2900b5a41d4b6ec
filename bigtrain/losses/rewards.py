"""Losses of answers with rewards: GRPO and its relatives.

The answers were drawn with the weights of the same step. So the ratio of both
probabilities, the loss's and the sampler's, is 1, and there is
nothing to clip.

Axes: B prompts; G answers to a prompt; L tokens of an answer.
"""

import jax
import jax.numpy as jnp

from bigtrain import metrics

# Papers: https://arxiv.org/abs/2402.03300 (GRPO), 2503.20783 (Dr. GRPO),
# 2503.14476 (DAPO), 2402.14740 (RLOO). "bnpo" is TRL's name for a mean over the
# tokens of a batch; here it is the global one, so it equals DAPO's.
KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "rloo")
# Added to the standard deviation of a prompt's rewards, as in TRL, so that
# equal rewards have advantages of 0.
_SMALLEST_STD = 1e-4


def loss(
  kind: str,
  log_prob_BGL: jax.Array,
  mask_BGL: jax.Array,
  reward_BG: jax.Array,
  weight_B: jax.Array,
  *,
  max_new: int,
  reference_BGL: jax.Array | None = None,
  beta: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns (sum, weight) of the loss over prompts with weights.

  `beta` is the weight of the divergence from the reference. In RLOO it is the
  weight of an answer's log-ratio, which is subtracted from its reward.
  """
  log_prob_BGL = jnp.where(mask_BGL, log_prob_BGL, 0.0)
  stopped_BGL = jax.lax.stop_gradient(log_prob_BGL)
  weight_B1 = weight_B[:, None]
  if kind == "rloo" and reference_BGL is not None:
    reward_BG -= beta * jnp.sum(stopped_BGL - reference_BGL, axis=2)
  advantage_BG = reward_BG - jnp.mean(reward_BG, axis=1, keepdims=True)
  if kind == "rloo":
    # Relative to the mean of the other answers; one ratio for a whole answer.
    G = reward_BG.shape[1]
    advantage_BG *= G / (G - 1)
    ratio_BG = jnp.exp(jnp.sum(log_prob_BGL - stopped_BGL, axis=2))
    return metrics.pair(-ratio_BG * advantage_BG, weight_B1)
  if kind != "dr_grpo":
    std_B1 = jnp.std(reward_BG, axis=1, ddof=1, keepdims=True)
    advantage_BG /= std_B1 + _SMALLEST_STD
  ratio_BGL = jnp.exp(log_prob_BGL - stopped_BGL)
  losses_BGL = -ratio_BGL * advantage_BG[..., None]
  if reference_BGL is not None:
    losses_BGL += beta * divergence(log_prob_BGL, reference_BGL)
  total_BG = jnp.sum(jnp.where(mask_BGL, losses_BGL, 0.0), axis=2)
  tokens_BG = jnp.sum(mask_BGL, axis=2, dtype=jnp.float32)
  if kind in ("bnpo", "dapo"):
    total, _ = metrics.pair(total_BG, weight_B1)
    return total, jnp.sum(tokens_BG * weight_B1)
  divisor = max_new if kind == "dr_grpo" else jnp.maximum(tokens_BG, 1.0)
  return metrics.pair(total_BG / divisor, weight_B1)


def divergence(log_prob: jax.Array, reference: jax.Array) -> jax.Array:
  """Estimate "k3" at each token (http://joschu.net/blog/kl-approx.html)."""
  return jnp.exp(reference - log_prob) - (reference - log_prob) - 1
