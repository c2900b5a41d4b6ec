"""Softmax and sigmoid cross-entropy against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.losses import cross_entropy

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 7)).astype(np.float32) * 5
CLASSES = RNG.integers(0, 7, size=(3, 4))
ONE_HOT = np.eye(7, dtype=np.float32)[CLASSES]


def numpy_softmax_xent(logits, probs):
  logits = logits.astype(np.float64)
  top = logits.max(-1, keepdims=True)
  logz = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
  return -(probs * (logits - logz)).sum(-1), logz[..., 0]


@pytest.mark.parametrize("over", cross_entropy.SMOOTHING_OVER)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_softmax_xent_for_class_numbers_and_one_hot_labels(
  smoothing, z_loss, over
):
  if over == "all":
    smooth = (1 - smoothing) * ONE_HOT + smoothing / 7
  else:  # As in big_vision's weighted_softmax_xent, and in T5X.
    smooth = np.where(ONE_HOT == 1, 1 - smoothing, smoothing / 6)
  plain, logz = numpy_softmax_xent(LOGITS, smooth)
  for labels in (CLASSES, ONE_HOT):
    got = cross_entropy.softmax_xent(
      jnp.asarray(LOGITS),
      jnp.asarray(labels),
      label_smoothing=smoothing,
      label_smoothing_over=over,
      z_loss=z_loss,
    )
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain + z_loss * logz**2, rtol=1e-5)


def test_softmax_xent_of_labels_that_do_not_sum_to_one():
  labels = RNG.uniform(size=LOGITS.shape).astype(np.float32)
  want, _ = numpy_softmax_xent(LOGITS, labels)
  got = cross_entropy.softmax_xent(jnp.asarray(LOGITS), jnp.asarray(labels))
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_softmax_xent_gradient_is_softmax_minus_labels():
  for labels in (CLASSES, ONE_HOT):
    grad = jax.grad(lambda x, y: cross_entropy.softmax_xent(x, y).sum())(
      jnp.asarray(LOGITS), jnp.asarray(labels)
    )
    np.testing.assert_allclose(
      grad, jax.nn.softmax(LOGITS) - ONE_HOT, atol=1e-6
    )


def test_softmax_xent_keeps_digits_of_large_bfloat16_logits():
  logits = jnp.asarray(LOGITS, jnp.bfloat16)
  got = cross_entropy.softmax_xent(logits.astype(jnp.float32) + 2e4, CLASSES)
  want, _ = numpy_softmax_xent(
    np.asarray(logits.astype(jnp.float32) + 2e4), ONE_HOT
  )
  np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)
  assert cross_entropy.softmax_xent(logits, CLASSES).dtype == jnp.float32


def test_sigmoid_xent_sums_over_classes():
  labels = (RNG.uniform(size=LOGITS.shape) > 0.5).astype(np.float32)
  prob = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))

  def want(y):
    return -(y * np.log(prob) + (1 - y) * np.log1p(-prob)).sum(-1)

  logits = jnp.asarray(LOGITS)
  # The losses of classes are differences of numbers as large as the logits.
  atol = 10 * np.finfo(np.float32).eps * np.abs(LOGITS).sum(-1).max()
  got = cross_entropy.sigmoid_xent(logits, jnp.asarray(labels))
  np.testing.assert_allclose(got, want(labels), rtol=0, atol=atol)
  got = cross_entropy.sigmoid_xent(
    logits, jnp.asarray(CLASSES), label_smoothing=0.1
  )
  smooth = want(0.9 * ONE_HOT + 0.1 / 7)
  np.testing.assert_allclose(got, smooth, rtol=0, atol=atol)
  grad = jax.grad(lambda x: cross_entropy.sigmoid_xent(x, labels).sum())(logits)
  # A few roundings of numbers up to 1.
  np.testing.assert_allclose(grad, prob - labels, atol=2e-6)
  # A formula with abs(x) is wrong at 0, and the naive form is inf at 500.
  extreme = jnp.asarray([0.0, 500.0, -500.0])
  y = jnp.asarray([1.0, 1.0, 0.0])
  value, grad = jax.value_and_grad(cross_entropy.sigmoid_xent)(extreme, y)
  assert float(value) == pytest.approx(np.log(2))
  np.testing.assert_allclose(grad, [-0.5, 0, 0], atol=1e-6)


@pytest.mark.parametrize("bad", [-1, 7, -100])
def test_only_the_losses_of_invalid_classes_are_nan(bad):
  classes = jnp.asarray(CLASSES).at[1, 2].set(bad)
  for loss in (cross_entropy.softmax_xent, cross_entropy.sigmoid_xent):
    nan = np.isnan(loss(jnp.asarray(LOGITS), classes))
    assert nan[1, 2] and nan.sum() == 1


def test_labels_of_a_wrong_shape_are_errors():
  with pytest.raises(
    ValueError, match=r"labels: expected int\[3, 4\] .*got float32\[3, 4\]"
  ):
    cross_entropy.softmax_xent(LOGITS, ONE_HOT[..., 0])
  with pytest.raises(ValueError, match=r"class numbers or \[3, 4, 7\] prob"):
    cross_entropy.sigmoid_xent(LOGITS, CLASSES[:2])


@pytest.mark.parametrize("share", [-0.1, 1.0, "0.1"])
def test_a_share_of_a_label_is_below_one(share):
  logits, labels = jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32)
  with pytest.raises(ConfigError, match="config.loss.label_smoothing: expec"):
    cross_entropy.softmax_xent(logits, labels, label_smoothing=share)


def test_unknown_smoothing_is_an_error():
  message = "config.loss.label_smoothing_over: unknown 'other'. Did you mean"
  with pytest.raises(ConfigError, match=message):
    cross_entropy.softmax_xent(
      jnp.asarray(LOGITS), jnp.asarray(CLASSES), label_smoothing_over="other"
    )
