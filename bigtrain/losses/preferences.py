"""Losses of two answers to a prompt, from the log-probabilities of both.

A pair has an answer that is chosen and one that is rejected, in this order in
an axis of 2. Methods with a reference compare each answer's log-probability
with that of a frozen model. Constants follow TRL's trainers.

Legend: B pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import settings


class Pairs(NamedTuple):
  """Log-probabilities of the answers, summed over their tokens."""

  sums_B2: jax.Array
  tokens_B2: jax.Array  # Numbers of tokens; 0 for an absent answer, as in KTO.
  reference_B2: jax.Array | None = None  # If the method has a reference.
  drift: jax.Array | float = 0.0  # Of kto: log-ratio of mismatched answers.

  @property
  def ratio_B2(self) -> jax.Array:
    assert self.reference_B2 is not None
    return self.sums_B2 - self.reference_B2

  def mean(self, x_B2: jax.Array) -> jax.Array:
    return x_B2 / jnp.maximum(self.tokens_B2, 1)


class Options(NamedTuple):
  """Options of the losses, by TRL's and the papers' letters."""

  beta: float = 0.1  # Inverse strength of the reference, or of the margin.
  label_smoothing: float = 0.0  # Share of pairs with a wrong order.
  gamma: float = 0.5  # Margin of simpo.
  sft: float = 0.0  # Weight of the chosen answer's loss, a mean over tokens.
  desirable: float = 1.0  # Weight of kto's chosen answers; then of the others.
  undesirable: float = 1.0

  def smoothed(self, x_B: jax.Array) -> jax.Array:
    e = self.label_smoothing
    return -(1 - e) * _log_sigmoid(x_B) - e * _log_sigmoid(-x_B)


_Loss = Callable[[Pairs, Options], jax.Array]
_log_sigmoid, _sigmoid = jax.nn.log_sigmoid, jax.nn.sigmoid


def _margin(x_B2: jax.Array) -> jax.Array:
  return x_B2[:, 0] - x_B2[:, 1]


def _sigmoid_loss(p: Pairs, o: Options) -> jax.Array:
  """DPO, arXiv 2305.18290; with label smoothing 2305.18290's cDPO."""
  return o.smoothed(o.beta * _margin(p.ratio_B2))


def _sigmoid_norm(p: Pairs, o: Options) -> jax.Array:
  return o.smoothed(o.beta * _margin(p.mean(p.ratio_B2)))


def _ipo(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2310.12036, of means over tokens."""
  return (_margin(p.mean(p.ratio_B2)) - 1 / (2 * o.beta)) ** 2


def _hinge(p: Pairs, o: Options) -> jax.Array:
  """SLiC, arXiv 2305.10425."""
  return jax.nn.relu(1 - o.beta * _margin(p.ratio_B2))


def _robust(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2403.00409."""
  x_B, e = o.beta * _margin(p.ratio_B2), o.label_smoothing
  loss_B = -(1 - e) * _log_sigmoid(x_B) + e * _log_sigmoid(-x_B)
  return loss_B / (1 - 2 * e)


def _apo_zero(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2408.06266, equation 7: the chosen answers are better than ours."""
  x_B2 = o.beta * p.ratio_B2
  return 1 - _sigmoid(x_B2[:, 0]) + _sigmoid(x_B2[:, 1])


def _apo_down(p: Pairs, o: Options) -> jax.Array:
  """Equation 8: the chosen answers are worse than the model's own."""
  x_B2 = o.beta * p.ratio_B2
  return _sigmoid(x_B2[:, 0]) + 1 - _sigmoid(_margin(x_B2))


def _bco_pair(p: Pairs, o: Options) -> jax.Array:
  x_B2 = o.beta * p.ratio_B2
  return -_log_sigmoid(x_B2[:, 0]) - _log_sigmoid(-x_B2[:, 1])


def _sppo_hard(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2405.00675."""
  half = 0.5 / o.beta
  ratio_B2 = p.ratio_B2
  return (ratio_B2[:, 0] - half) ** 2 + (ratio_B2[:, 1] + half) ** 2


def _simpo(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2405.14734."""
  return o.smoothed(o.beta * _margin(p.mean(p.sums_B2)) - o.gamma)


def _cpo(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2401.08417."""
  return o.smoothed(o.beta * _margin(p.sums_B2))


def _orpo(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2403.07691: the ratio of the odds of both answers."""
  mean_B2 = p.mean(p.sums_B2)
  log_odds_B2 = mean_B2 - _log1mexp(mean_B2)
  return -o.beta * _log_sigmoid(_margin(log_odds_B2))


def _kto(p: Pairs, o: Options) -> jax.Array:
  """arXiv 2402.01306; an answer may be absent."""
  drift = jax.lax.stop_gradient(jnp.maximum(p.drift, 0.0))
  x_B2 = o.beta * (p.ratio_B2 - drift)
  loss_B2 = 1 - _sigmoid(x_B2 * jnp.array([1.0, -1.0]))
  loss_B2 *= jnp.array([o.desirable, o.undesirable])
  return jnp.sum(jnp.where(p.tokens_B2 > 0, loss_B2, 0.0), axis=1)


def _log1mexp(x: jax.Array) -> jax.Array:
  """log(1 - exp(x)) of x < 0, accurately on both sides of log(1/2)."""
  near_0 = x > -0.6931472
  small = jnp.where(near_0, x, -1.0)
  large = jnp.where(near_0, -1.0, x)
  of_small = jnp.log(-jnp.expm1(small))
  return jnp.where(near_0, of_small, jnp.log1p(-jnp.exp(large)))


WITH_REFERENCE: dict[str, _Loss] = {
  "sigmoid": _sigmoid_loss,
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


def read_options(
  kind: str, key: str, sft: float | None, **options: float
) -> Options:
  """Checks the options of a loss; `sft` is 1 for cpo and orpo by default."""
  settings.check_choice(f"{key}.kind", kind, (*KINDS, "reward"))
  sft = float(kind in ("cpo", "orpo")) if sft is None else sft
  result = Options(sft=sft, **options)
  for name, value in result._asdict().items():
    settings.check_number(f"{key}.{name}", value, least=0)
  settings.check_number(f"{key}.beta", result.beta, above=0)
  most = 0.5
  settings.check_number(
    f"{key}.label_smoothing", result.label_smoothing, least=0, below=most
  )
  return result


def losses(kind: str, pairs: Pairs, options: Options) -> jax.Array:
  """Loss of each pair; of kto the sum over the pair's answers."""
  loss_B = (WITH_REFERENCE | WITHOUT_REFERENCE)[kind](pairs, options)
  if not options.sft:
    return loss_B
  return loss_B - options.sft * pairs.mean(pairs.sums_B2)[:, 0]


def reward_losses(
  reward_B2: jax.Array, margin_B: jax.Array | float = 0.0, center: float = 0.0
) -> jax.Array:
  """Bradley and Terry's loss of a reward model, arXiv 2312.09244's centred."""
  loss_B = -_log_sigmoid(_margin(reward_B2) - margin_B)
  return loss_B + center * jnp.sum(reward_B2, axis=1) ** 2
