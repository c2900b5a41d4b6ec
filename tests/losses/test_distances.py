"""Distances of logits, against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.losses import distances

RNG = np.random.default_rng(0)
S, T = RNG.normal(size=(2, 6, 5)) * 3


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(temperature):
  log_s, log_t = log_softmax(S / temperature), log_softmax(T / temperature)
  return temperature**2 * (np.exp(log_t) * (log_t - log_s)).sum(-1)


def hard(smoothing):
  # big_vision spreads the smoothed share over the other classes.
  labels = np.where(np.eye(5)[T.argmax(-1)], 1 - smoothing, smoothing / 4)
  entropy = -(labels * np.log(np.where(labels, labels, 1))).sum(-1)
  return -(labels * log_softmax(S)).sum(-1) - entropy


@pytest.mark.parametrize(
  ("kind", "options", "expected"),
  [
    ("kl", {}, kl(1.0)),
    ("kl", dict(temperature=2.5), kl(2.5)),
    ("hard", {}, hard(0.0)),
    ("hard", dict(label_smoothing=0.2), hard(0.2)),
    ("l2", {}, ((S - T) ** 2).sum(-1)),
    ("euclidean", {}, np.linalg.norm(S - T, axis=-1)),
    (
      "logsoftmax_euclidean",
      {},
      np.linalg.norm(log_softmax(S) - log_softmax(T), axis=-1),
    ),
  ],
)
def test_the_formulas_of_big_vision(kind, options, expected):
  result = distances.distance(jnp.asarray(S), jnp.asarray(T), kind, **options)
  np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_equal_logits_have_no_distance_and_finite_gradients():
  same = jnp.asarray(T, jnp.float32)
  for kind in ("kl", "l2", "euclidean", "logsoftmax_euclidean"):
    value, grad = jax.value_and_grad(
      lambda s: distances.distance(s, same, kind).sum()  # noqa: B023
    )(same)
    assert abs(value) < 1e-4 and np.isfinite(grad).all(), kind
  assert distances.agreement(same, same).all()
  assert distances.entropy(jnp.zeros((1, 5)))[0] == pytest.approx(np.log(5))


def test_mistakes():
  with pytest.raises(ConfigError, match="unknown 'kll'.* mean 'kl'"):
    distances.distance(S, T, "kll")
  with pytest.raises(ConfigError, match="teacher.model: expected 5 classes"):
    distances.distance(S, T[:, :3])


def test_logits_that_are_not_finite_never_agree():
  logits = jnp.asarray([[1.0, 0.0], [jnp.nan, 1.0], [jnp.inf, 0.0]])
  good = jnp.asarray([[1.0, 0.0]] * 3)
  for pair in ((logits, good), (good, logits), (logits, logits)):
    assert distances.agreement(*pair).tolist() == [True, False, False]
