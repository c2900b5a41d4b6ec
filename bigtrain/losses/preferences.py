"""Losses of two answers to a prompt, from the log-probabilities of both.

A pair has a chosen and a rejected answer, in that order, along an axis of size
2. Methods with a reference compare each answer's log-probability with that of a
frozen model. Each loss is a function of Pairs and Options. The tables after the
functions give them their names in configs. Constants are those of TRL's
trainers.

Axes: B pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.config.errors import ConfigError, check_choice, check_number


class Pairs(NamedTuple):
  """Log-probabilities of the answers, summed over their tokens."""

  sums_B2: jax.Array
  tokens_B2: jax.Array  # Numbers of tokens; 0 for an absent answer, as in KTO.
  reference_B2: jax.Array | None = None  # The reference's, if it is needed.
  drift: jax.Array | float = 0.0  # For kto: log-ratio of mismatched answers.

  @property
  def ratio_B2(self) -> jax.Array:
    assert self.reference_B2 is not None
    return self.sums_B2 - self.reference_B2

  def mean(self, x_B2: jax.Array) -> jax.Array:
    return x_B2 / jnp.maximum(self.tokens_B2, 1)


class Options(NamedTuple):
  """Options of the losses, named as in TRL and the papers."""

  beta: float = 0.1  # Inverse strength of the reference, or of the margin.
  label_smoothing: float = 0.0  # Assumed share of swapped pairs.
  gamma: float = 0.5  # Margin of simpo.
  sft: float = 0.0  # Weight of the chosen answer's loss, a mean over tokens.
  desirable: float = 1.0  # Weight of kto's chosen answers.
  undesirable: float = 1.0  # Weight of its rejected ones.

  def smoothed(self, x_B: jax.Array) -> jax.Array:
    """Cross-entropy of the logit that says the chosen answer is better."""
    e = self.label_smoothing
    return -(1 - e) * _log_sigmoid(x_B) - e * _log_sigmoid(-x_B)


_Loss = Callable[[Pairs, Options], jax.Array]

# +1 for the chosen answer, and -1 for the rejected one.
_SIGNS = (1.0, -1.0)


def _log_sigmoid(x: jax.Array) -> jax.Array:
  return jax.nn.log_sigmoid(x)


def _margin(x_B2: jax.Array) -> jax.Array:
  """The chosen answer's value minus the rejected one's."""
  return x_B2[:, 0] - x_B2[:, 1]


# Losses of each pair, [B], with a reference.


def _sigmoid(pairs: Pairs, options: Options) -> jax.Array:
  """DPO, arXiv 2305.18290; with label smoothing, cDPO."""
  return options.smoothed(options.beta * _margin(pairs.ratio_B2))


def _sigmoid_norm(pairs: Pairs, options: Options) -> jax.Array:
  """DPO with means over tokens in place of sums."""
  return options.smoothed(options.beta * _margin(pairs.mean(pairs.ratio_B2)))


def _ipo(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2310.12036, with means over tokens."""
  margin_B = _margin(pairs.mean(pairs.ratio_B2))
  return (margin_B - 1 / (2 * options.beta)) ** 2


def _hinge(pairs: Pairs, options: Options) -> jax.Array:
  """SLiC, arXiv 2305.10425."""
  return jax.nn.relu(1 - options.beta * _margin(pairs.ratio_B2))


def _robust(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2403.00409."""
  x_B = options.beta * _margin(pairs.ratio_B2)
  e = options.label_smoothing
  loss_B = -(1 - e) * _log_sigmoid(x_B) + e * _log_sigmoid(-x_B)
  return loss_B / (1 - 2 * e)


def _apo_zero(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2408.06266, equation 7, for answers better than the model's own."""
  return 1 - _margin(jax.nn.sigmoid(options.beta * pairs.ratio_B2))


def _apo_down(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2408.06266, equation 8, for answers worse than the model's own."""
  return (
    jax.nn.sigmoid(options.beta * pairs.ratio_B2[:, 0])
    + 1
    - jax.nn.sigmoid(_margin(options.beta * pairs.ratio_B2))
  )


def _bco_pair(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2404.04656, without the shift of rewards."""
  x_B2 = options.beta * pairs.ratio_B2 * jnp.array(_SIGNS)
  return jnp.sum(-_log_sigmoid(x_B2), axis=1)


def _sppo_hard(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2405.00675."""
  half = 0.5 / options.beta
  ratio_B2 = pairs.ratio_B2
  return (ratio_B2[:, 0] - half) ** 2 + (ratio_B2[:, 1] + half) ** 2


def _kto(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2402.01306, summed over a pair's answers; one may be absent."""
  drift = jax.lax.stop_gradient(jnp.maximum(pairs.drift, 0.0))
  x_B2 = options.beta * (pairs.ratio_B2 - drift)
  loss_B2 = 1 - jax.nn.sigmoid(x_B2 * jnp.array(_SIGNS))
  loss_B2 *= jnp.array([options.desirable, options.undesirable])
  return jnp.sum(jnp.where(pairs.tokens_B2 > 0, loss_B2, 0.0), axis=1)


# And without a reference.


def _simpo(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2405.14734."""
  margin_B = _margin(pairs.mean(pairs.sums_B2))
  return options.smoothed(options.beta * margin_B - options.gamma)


def _cpo(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2401.08417."""
  return options.smoothed(options.beta * _margin(pairs.sums_B2))


def _orpo(pairs: Pairs, options: Options) -> jax.Array:
  """arXiv 2403.07691: the ratio of the odds of both answers."""
  log_odds_B2 = _log_odds(pairs.mean(pairs.sums_B2))
  return -options.beta * _log_sigmoid(_margin(log_odds_B2))


def _log_odds(log_prob: jax.Array) -> jax.Array:
  """log(p / (1 - p)), accurately on both sides of p = 1/2."""
  is_large = log_prob > -0.6931472  # log(1/2)
  # Each form sees -1 in place of the arguments that the other one is for.
  large = jnp.where(is_large, log_prob, -1.0)
  small = jnp.where(is_large, -1.0, log_prob)
  log_rest_of_large = jnp.log(-jnp.expm1(large))
  log_rest_of_small = jnp.log1p(-jnp.exp(small))
  return log_prob - jnp.where(is_large, log_rest_of_large, log_rest_of_small)


WITH_REFERENCE: dict[str, _Loss] = {
  "sigmoid": _sigmoid,
  "sigmoid_norm": _sigmoid_norm,
  "ipo": _ipo,
  "hinge": _hinge,
  "robust": _robust,
  "apo_zero": _apo_zero,
  "apo_down": _apo_down,
  "bco_pair": _bco_pair,
  "sppo_hard": _sppo_hard,
  "kto": _kto,
}
WITHOUT_REFERENCE: dict[str, _Loss] = {
  "simpo": _simpo,
  "cpo": _cpo,
  "orpo": _orpo,
}
KINDS = (*WITH_REFERENCE, *WITHOUT_REFERENCE)
# Kinds that use an option which the others ignore.
_KINDS_WITH = {
  "label_smoothing": ("sigmoid", "sigmoid_norm", "robust", "simpo", "cpo"),
  "gamma": ("simpo",),
  "desirable": ("kto",),
  "undesirable": ("kto",),
}


def read_options(
  kind: str, key: str, sft: float | None, **options: float
) -> Options:
  """Checks the options of a loss; `sft` is 1 for cpo and orpo by default."""
  check_choice(f"{key}.kind", kind, (*KINDS, "reward"))
  sft = float(kind in ("cpo", "orpo")) if sft is None else sft
  result = Options(sft=sft, **options)
  check_number(f"{key}.beta", result.beta, above=0)
  for name, value in result._asdict().items():
    below = 0.5 if name == "label_smoothing" else None
    check_number(f"{key}.{name}", value, least=0, below=below)
    kinds = _KINDS_WITH.get(name)
    is_default = value == Options._field_defaults[name]
    if kinds is not None and kind not in kinds and not is_default:
      raise ConfigError(f"{key}.{name}: used only by {' '.join(kinds)}.")
  return result


def losses(kind: str, pairs: Pairs, options: Options) -> jax.Array:
  """Loss of each pair; for kto, the sum over the pair's answers."""
  loss_B = (WITH_REFERENCE | WITHOUT_REFERENCE)[kind](pairs, options)
  if not options.sft:
    return loss_B
  return loss_B - options.sft * pairs.mean(pairs.sums_B2)[:, 0]


def reward_losses(
  reward_B2: jax.Array, margin_B: jax.Array | float = 0.0, center: float = 0.0
) -> jax.Array:
  """Bradley and Terry's loss of a reward model; `center`: arXiv 2312.09244."""
  loss_B = -_log_sigmoid(_margin(reward_B2) - margin_B)
  return loss_B + center * jnp.sum(reward_B2, axis=1) ** 2
