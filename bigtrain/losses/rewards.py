"""Losses of answers with rewards: GRPO and its relatives.

A loss compares the current probabilities of an answer with those at the time
when it was drawn. In the first update after a rollout, this ratio is 1 and
there is nothing to clip. Later updates with the same rollout clip the ratio, so
that the policy stays close to the one that drew the answers.

Axes: B prompts; G answers to a prompt; L tokens of an answer; R ratios of an
answer, one for each token (L) or one for all (1).
"""

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.config.errors import ConfigError, check_number

# Papers: https://arxiv.org/abs/2402.03300 (GRPO), 2503.20783 (Dr. GRPO),
# 2503.14476 (DAPO), 2402.14740 (RLOO), 2507.18071 (GSPO), 2506.13585 (CISPO).
# "bnpo" is TRL's name for a mean over the tokens of a batch; here it is the
# global one, so it equals DAPO's.
KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")
# (epsilon, epsilon_high) of kinds whose papers give their own: a ratio is
# clipped to the range from 1 - epsilon to 1 + epsilon_high. GSPO's ratio is the
# mean over an answer's tokens, so it moves far less than a token's. CISPO has
# no lower bound; its upper one is from https://arxiv.org/abs/2510.13786.
_EPSILONS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (None, 4.0)}
_USUAL_EPSILONS = (0.2, 0.2)
# Added to the standard deviation of a prompt's rewards, as in TRL, so that
# equal rewards have advantages of 0.
_SMALLEST_STD = 1e-4


def ratio_bounds(
  kind: str, epsilon: float | None, epsilon_high: float | None
) -> tuple[float, float]:
  """Returns the smallest and the largest ratio; None for a kind's default."""
  if kind == "cispo" and epsilon is not None:
    raise ConfigError(
      f"config.loss.epsilon={epsilon}: kind='cispo' has no lower bound; "
      "epsilon_high is the upper one."
    )
  default, default_high = _EPSILONS.get(kind, _USUAL_EPSILONS)
  # If only epsilon is given, it moves both bounds, unless they differ by
  # default.
  if epsilon is not None and epsilon_high is None and default == default_high:
    epsilon_high = epsilon
  low = default if epsilon is None else epsilon
  high = default_high if epsilon_high is None else epsilon_high
  if low is not None:
    check_number("config.loss.epsilon", low, above=0, most=1)
  check_number("config.loss.epsilon_high", high, above=0)
  return (0.0 if low is None else 1 - low), 1 + high


def loss(
  kind: str,
  log_prob_BGL: jax.Array,
  mask_BGL: jax.Array,
  reward_BG: jax.Array,
  weight_B: jax.Array,
  *,
  max_new: int,
  old_BGL: jax.Array | None = None,
  bounds: tuple[float, float] = (0.0, jnp.inf),
  reference_BGL: jax.Array | None = None,
  beta: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns (sum, weight) of the loss over prompts with weights.

  Args:
    old_BGL: log-probabilities of the answers when they were drawn; None if
      there has been no update since.
    bounds: bounds of the ratio to the old probabilities, see `ratio_bounds`.
    beta: weight of the divergence from the reference. In RLOO it is the weight
      of an answer's log-ratio, which is subtracted from its reward.
  """
  log_prob_BGL = jnp.where(mask_BGL, log_prob_BGL, 0.0)
  drawn_BGL = jax.lax.stop_gradient(log_prob_BGL)
  if old_BGL is not None:
    drawn_BGL = jnp.where(mask_BGL, old_BGL, 0.0)
  weight_B1 = weight_B[:, None]
  if kind == "rloo" and reference_BGL is not None:
    reward_BG = with_divergence(reward_BG, drawn_BGL, reference_BGL, beta)
  advantage_BG = advantages(kind, reward_BG)
  ratio_BGR = _ratios(kind, log_prob_BGL, drawn_BGL, mask_BGL)
  gain_BGR = ratio_BGR * advantage_BG[..., None]
  if kind == "cispo":
    # The clipped ratio is a weight: also tokens beyond the bound are learned.
    weight_BGL = jax.lax.stop_gradient(jnp.clip(ratio_BGR, *bounds))
    gain_BGR = weight_BGL * advantage_BG[..., None] * log_prob_BGL
  elif old_BGL is not None:
    clipped_BGR = jnp.clip(ratio_BGR, *bounds)
    gain_BGR = jnp.minimum(gain_BGR, clipped_BGR * advantage_BG[..., None])
  if kind == "rloo":
    return metrics.pair(-gain_BGR[..., 0], weight_B1)
  losses_BGL = jnp.broadcast_to(-gain_BGR, mask_BGL.shape)
  if reference_BGL is not None:
    losses_BGL += beta * divergence(log_prob_BGL, reference_BGL)
  total_BG = jnp.sum(jnp.where(mask_BGL, losses_BGL, 0.0), axis=2)
  tokens_BG = jnp.sum(mask_BGL, axis=2, dtype=jnp.float32)
  if kind in ("bnpo", "dapo", "cispo"):
    total, _ = metrics.pair(total_BG, weight_B1)
    return total, jnp.sum(tokens_BG * weight_B1)
  divisor = max_new if kind == "dr_grpo" else jnp.maximum(tokens_BG, 1.0)
  return metrics.pair(total_BG / divisor, weight_B1)


def with_divergence(
  reward_BG: jax.Array,
  drawn_BGL: jax.Array,
  reference_BGL: jax.Array,
  beta: float,
) -> jax.Array:
  """Subtracts from RLOO's rewards the log-ratio of each answer."""
  return reward_BG - beta * jnp.sum(drawn_BGL - reference_BGL, axis=2)


def advantages(kind: str, reward_BG: jax.Array) -> jax.Array:
  """Rewards relative to the other answers of a group, [B, G]."""
  advantage_BG = reward_BG - jnp.mean(reward_BG, axis=1, keepdims=True)
  if kind == "rloo":  # Relative to the mean of the other answers.
    G = reward_BG.shape[1]
    return advantage_BG * G / (G - 1)
  if kind == "dr_grpo":
    return advantage_BG
  std_B1 = jnp.std(reward_BG, axis=1, ddof=1, keepdims=True)
  return advantage_BG / (std_B1 + _SMALLEST_STD)


def clipped(
  kind: str,
  log_prob_BGL: jax.Array,
  old_BGL: jax.Array,
  mask_BGL: jax.Array,
  reward_BG: jax.Array,
  bounds: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
  """Returns which ratios are clipped below and above, two bool [B, G, R].

  A ratio beyond a bound counts only if clipping it changes the gradient.
  """
  masked = lambda x_BGL: jnp.where(mask_BGL, x_BGL, 0.0)
  ratio_BGR = _ratios(kind, masked(log_prob_BGL), masked(old_BGL), mask_BGL)
  advantage_BG1 = advantages(kind, reward_BG)[..., None]
  low, high = bounds
  return (
    (ratio_BGR < low) & (advantage_BG1 < 0),
    # CISPO also bounds the weights of answers that become less likely.
    (ratio_BGR > high) & ((advantage_BG1 > 0) | (kind == "cispo")),
  )


def _ratios(
  kind: str, log_prob_BGL: jax.Array, drawn_BGL: jax.Array, mask_BGL: jax.Array
) -> jax.Array:
  """Returns the ratios of probabilities, [B, G, R].

  RLOO uses the ratio of whole answers, GSPO its geometric mean over tokens.
  """
  log_ratio_BGL = log_prob_BGL - drawn_BGL
  if kind not in ("rloo", "gspo"):
    return jnp.exp(log_ratio_BGL)
  log_ratio_BG1 = jnp.sum(log_ratio_BGL, axis=2, keepdims=True)
  if kind == "gspo":
    tokens_BG1 = jnp.sum(mask_BGL, axis=2, keepdims=True)
    log_ratio_BG1 /= jnp.maximum(tokens_BG1, 1)
  return jnp.exp(log_ratio_BG1)


def divergence(log_prob: jax.Array, reference: jax.Array) -> jax.Array:
  """Estimate "k3" at each token (http://joschu.net/blog/kl-approx.html)."""
  return jnp.exp(reference - log_prob) - (reference - log_prob) - 1
