"""Losses of two answers to a prompt, from the log-probabilities of both.

A pair holds a chosen and a rejected answer, in that order, along an axis of
size 2. Methods with a reference compare each answer's log-probability
with that of a frozen model. Constants follow TRL's trainers.

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
  reference_B2: jax.Array | None = None  # If the method has a reference.
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
    e = self.label_smoothing
    return -(1 - e) * _log_sigmoid(x_B) - e * _log_sigmoid(-x_B)


_Loss = Callable[[Pairs, Options], jax.Array]
_log_sigmoid, _sigmoid, _relu = jax.nn.log_sigmoid, jax.nn.sigmoid, jax.nn.relu


def _margin(x_B2: jax.Array) -> jax.Array:
  return x_B2[:, 0] - x_B2[:, 1]


def _robust(p: Pairs, o: Options) -> jax.Array:
  x_B, e = o.beta * _margin(p.ratio_B2), o.label_smoothing
  loss_B = -(1 - e) * _log_sigmoid(x_B) + e * _log_sigmoid(-x_B)
  return loss_B / (1 - 2 * e)


def _squared_distance(x_B2: jax.Array, half: float) -> jax.Array:
  return (x_B2[:, 0] - half) ** 2 + (x_B2[:, 1] + half) ** 2


def _log_odds(log_prob: jax.Array) -> jax.Array:
  """log(p / (1 - p)), accurately on both sides of p = 1/2."""
  near_0 = log_prob > -0.6931472
  small = jnp.where(near_0, log_prob, -1.0)
  large = jnp.where(near_0, -1.0, log_prob)
  of_small = jnp.log(-jnp.expm1(small))
  return log_prob - jnp.where(near_0, of_small, jnp.log1p(-jnp.exp(large)))


def _kto(p: Pairs, o: Options) -> jax.Array:
  drift = jax.lax.stop_gradient(jnp.maximum(p.drift, 0.0))
  x_B2 = o.beta * (p.ratio_B2 - drift)
  loss_B2 = 1 - _sigmoid(x_B2 * jnp.array([1.0, -1.0]))
  loss_B2 *= jnp.array([o.desirable, o.undesirable])
  return jnp.sum(jnp.where(p.tokens_B2 > 0, loss_B2, 0.0), axis=1)


WITH_REFERENCE: dict[str, _Loss] = {
  # DPO, arXiv 2305.18290; with label smoothing, cDPO.
  "sigmoid": lambda p, o: o.smoothed(o.beta * _margin(p.ratio_B2)),
  "sigmoid_norm": lambda p, o: o.smoothed(o.beta * _margin(p.mean(p.ratio_B2))),
  # arXiv 2310.12036, with means over tokens.
  "ipo": lambda p, o: (_margin(p.mean(p.ratio_B2)) - 1 / (2 * o.beta)) ** 2,
  # SLiC, arXiv 2305.10425.
  "hinge": lambda p, o: _relu(1 - o.beta * _margin(p.ratio_B2)),
  "robust": _robust,  # arXiv 2403.00409.
  # arXiv 2408.06266, for chosen answers that are better than the model's own
  # (equation 7), or worse (equation 8).
  "apo_zero": lambda p, o: 1 - _margin(_sigmoid(o.beta * p.ratio_B2)),
  "apo_down": lambda p, o: (
    _sigmoid(o.beta * p.ratio_B2[:, 0])
    + 1
    - _sigmoid(_margin(o.beta * p.ratio_B2))
  ),
  "bco_pair": lambda p, o: jnp.sum(
    -_log_sigmoid(o.beta * p.ratio_B2 * jnp.array([1.0, -1.0])), axis=1
  ),
  # arXiv 2405.00675.
  "sppo_hard": lambda p, o: _squared_distance(p.ratio_B2, 0.5 / o.beta),
  "kto": _kto,  # arXiv 2402.01306; an answer may be absent.
}
WITHOUT_REFERENCE: dict[str, _Loss] = {
  # arXiv 2405.14734.
  "simpo": lambda p, o: o.smoothed(
    o.beta * _margin(p.mean(p.sums_B2)) - o.gamma
  ),
  # arXiv 2401.08417.
  "cpo": lambda p, o: o.smoothed(o.beta * _margin(p.sums_B2)),
  # arXiv 2403.07691: the ratio of the odds of both answers.
  "orpo": lambda p, o: (
    -o.beta * _log_sigmoid(_margin(_log_odds(p.mean(p.sums_B2))))
  ),
}
KINDS = (*WITH_REFERENCE, *WITHOUT_REFERENCE)
# Kinds with an option that the others ignore.
_KINDS_WITH = dict(
  label_smoothing="sigmoid sigmoid_norm robust simpo cpo",
  gamma="simpo",
  desirable="kto",
  undesirable="kto",
)


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
    kinds = _KINDS_WITH.get(name, kind)
    if kind not in kinds.split() and value != Options._field_defaults[name]:
      raise ConfigError(f"{key}.{name}: used only by {kinds}.")
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
