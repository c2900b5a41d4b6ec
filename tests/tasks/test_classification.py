"""The classification task against plain numpy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import metrics
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.named_features import Features
from bigtrain.losses import mixup
from bigtrain.tasks import classification as task

B, C = 6, 4
RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(B, 2, 2, 1)).astype(np.float32)
LABELS = np.array([0, 3, 1, 1, 2, 0])
ONE_HOT = np.eye(C, dtype=np.float32)[LABELS]


class Net(nn.Module):
  """Flattens and projects; counts training calls."""

  dropout: float = 0.0

  @nn.compact
  def __call__(self, image, *, train=False):
    x = image.reshape(image.shape[0], -1)
    count = self.variable("counts", "trained", jnp.zeros, ())
    if train:
      count.value += 1
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    return nn.Dense(C)(x), {"pre_logits": x}


def make(**kwargs):
  model = Net(**kwargs)
  variables = dict(model.init(jax.random.key(1), **task.inputs(batch())))
  variables["counts"] = {"trained": jnp.zeros(())}
  return model, variables


def batch(**changes):
  return {"image": IMAGE, "labels": LABELS, "id": np.arange(B), **changes}


def logits_of(variables, image=IMAGE):
  dense = jax.device_get(variables["params"]["Dense_0"])
  return image.reshape(len(image), -1) @ dense["kernel"] + dense["bias"]


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def softmax_loss(logits, labels):
  return -(labels * log_softmax(logits)).sum(-1)


def sigmoid_loss(logits, labels):
  p = 1 / (1 + np.exp(-logits.astype(np.float64)))
  return -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).sum(-1)


def run(variables, model, data, train=True, seed=0, **options):
  pairs, mutable = task.loss_fn(
    variables,
    data,
    jax.random.key(seed) if train else None,
    model=model,
    train=train,
    **options,
  )
  return {k: (float(s), float(w)) for k, (s, w) in pairs.items()}, mutable


@pytest.mark.parametrize("labels", [LABELS, ONE_HOT], ids=["int", "one-hot"])
@pytest.mark.parametrize(
  ("kind", "expected"),
  [("softmax_xent", softmax_loss), ("sigmoid_xent", sigmoid_loss)],
)
def test_loss_and_accuracy_are_sums_and_weights(kind, expected, labels):
  model, variables = make()
  logits = logits_of(variables)
  pairs, _ = run(variables, model, batch(labels=labels), kind=kind)
  loss = expected(logits, ONE_HOT)
  assert pairs["loss"] == pytest.approx((loss.sum(), B), rel=1e-5)
  hits = (logits.argmax(-1) == LABELS).sum()
  assert pairs["accuracy"] == (hits, B)


def test_several_labels_for_an_image():
  model, variables = make()
  labels = np.array([[1, 1, 0, 0]] * 3 + [[0, 0, 0, 0]] * 3, np.float32)
  pairs, _ = run(variables, model, batch(labels=labels), kind="sigmoid_xent")
  logits = logits_of(variables)
  loss = sigmoid_loss(logits, labels)
  assert pairs["loss"] == pytest.approx((loss.sum(), B), rel=1e-5)
  # Predictions for images without labels are never correct.
  hits = (logits[:3].argmax(-1) < 2).sum()
  assert pairs["accuracy"][0] == hits


def test_label_smoothing():
  model, variables = make()
  smooth = 0.8 * ONE_HOT + 0.2 / C
  pairs, _ = run(variables, model, batch(), label_smoothing=0.2)
  loss = softmax_loss(logits_of(variables), smooth)
  assert pairs["loss"][0] == pytest.approx(loss.sum(), rel=1e-5)
  options = dict(label_smoothing=0.2, label_smoothing_over="others")
  pairs, _ = run(variables, model, batch(), **options)
  smooth = 0.8 * ONE_HOT + 0.2 / (C - 1) * (1 - ONE_HOT)
  loss = softmax_loss(logits_of(variables), smooth)
  assert pairs["loss"][0] == pytest.approx(loss.sum(), rel=1e-5)
  with pytest.raises(ConfigError, match="sigmoid_xent only has 'all'"):
    run(variables, model, batch(), kind="sigmoid_xent", **options)


@pytest.mark.parametrize("train", [True, False])
def test_padding_has_no_effect(train):
  model, variables = make()
  mask = np.array([1, 1, 0, 1, 0, 0], np.float32)
  real = mask > 0
  spoilt = IMAGE.copy()
  spoilt[~real] = np.nan
  data = batch(image=spoilt, _mask=mask)
  pairs, _ = run(variables, model, data, train=train)
  logits = logits_of(variables)[real]
  loss = softmax_loss(logits, ONE_HOT[real]).sum()
  assert pairs["loss"] == pytest.approx((loss, 3), rel=1e-5)
  assert pairs["accuracy"] == ((logits.argmax(-1) == LABELS[real]).sum(), 3)


def test_mutable_collections_change_in_training_only():
  model, variables = make()
  _, mutable = run(variables, model, batch())
  assert set(mutable) == {"counts"}
  assert mutable["counts"]["trained"] == 1
  _, mutable = run(variables, model, batch(), train=False)
  assert mutable["counts"]["trained"] == 0


def test_dropout_depends_on_the_key_in_training_only():
  model, variables = make(dropout=0.5)
  first, _ = run(variables, model, batch(), seed=0)
  again, _ = run(variables, model, batch(), seed=0)
  other, _ = run(variables, model, batch(), seed=1)
  still, _ = run(variables, model, batch(), train=False)
  assert first == again != other
  loss = softmax_loss(logits_of(variables), ONE_HOT).sum()
  assert still["loss"][0] == pytest.approx(loss, rel=1e-5)


# Mixup.


def test_mixup_blends_with_the_previous_image():
  mix = mixup.draw(jax.random.key(0), 0.2, 0, 0)
  mixed, weight = mix.images(jnp.asarray(IMAGE)), mix.share
  weight = float(weight)
  assert 0.5 <= weight < 1
  neighbours = IMAGE[[-1, 0, 1, 2, 3, 4]]
  np.testing.assert_allclose(
    mixed, weight * IMAGE + (1 - weight) * neighbours, rtol=1e-5, atol=1e-6
  )
  assert mixed.dtype == jnp.float32
  half = mix.images(jnp.asarray(IMAGE, "bfloat16"))
  assert half.dtype == jnp.bfloat16


def test_mixup_weight_distribution():
  keys = jax.random.split(jax.random.key(0), 2000)
  draw = jax.jit(jax.vmap(lambda k: mixup.draw(k, 0.4, 0, 0).share))
  weights = np.asarray(draw(keys))
  # max(w, 1 - w) of w ~ Beta(0.4, 0.4), by quadrature in w = sin(t)^2.
  t = np.linspace(1e-4, np.pi / 2 - 1e-4, 20001)
  w = np.sin(t) ** 2
  density = (w * (1 - w)) ** (0.4 - 0.5)
  expected = (np.maximum(w, 1 - w) * density).sum() / density.sum()
  assert weights.mean() == pytest.approx(expected, abs=0.01)


def test_mixup_loss_equals_the_loss_of_blended_labels():
  model, variables = make()
  # loss_fn draws the blend from the first of the two keys.
  mixup_rng, _ = jax.random.split(jax.random.key(3))
  mix = mixup.draw(mixup_rng, 0.5, 0, 0)
  mixed, weight = mix.images(jnp.asarray(IMAGE)), mix.share
  weight = float(weight)
  blended = weight * ONE_HOT + (1 - weight) * np.roll(ONE_HOT, 1, axis=0)
  loss = softmax_loss(logits_of(variables, np.asarray(mixed)), blended).sum()
  for labels in (LABELS, ONE_HOT):
    data = batch(labels=labels)
    pairs, _ = run(variables, model, data, seed=3, mixup_alpha=0.5)
    assert pairs["loss"][0] == pytest.approx(loss, rel=1e-5)
  still, _ = run(variables, model, batch(), train=False, mixup_alpha=0.5)
  plain, _ = run(variables, model, batch(), train=False)
  assert still == plain


@pytest.mark.parametrize("alphas", [(0.0, 1.0), (0.8, 1.0)])
def test_cutmix_loss_equals_the_loss_of_blended_labels(alphas):
  model, variables = make()
  options = dict(mixup_alpha=alphas[0], cutmix_alpha=1.0, cutmix_prob=0.5)
  kinds = set()
  for seed in range(8):
    mixup_rng, _ = jax.random.split(jax.random.key(seed))
    mix = mixup.draw(mixup_rng, *options.values())
    mixed = np.asarray(mix.images(jnp.asarray(IMAGE)))
    share = np.mean(np.asarray(mix.weights(IMAGE)))
    blended = share * ONE_HOT + (1 - share) * np.roll(ONE_HOT, 1, axis=0)
    loss = softmax_loss(logits_of(variables, mixed), blended).sum()
    pairs, _ = run(variables, model, batch(), seed=seed, **options)
    assert pairs["loss"][0] == pytest.approx(loss, rel=1e-5)
    kinds.add(bool(mix.is_cut))
  assert kinds == ({True} if not alphas[0] else {True, False})


# Predict functions.


def test_predict_functions():
  model, variables = make(dropout=0.5)
  fns = task.predict_fns(model)
  assert set(fns) == {"logits", "pre_logits", "loss"}
  logits = logits_of(variables)
  data = {"image": IMAGE}  # Predictions need no labels.
  np.testing.assert_allclose(fns["logits"](variables, data), logits, rtol=1e-5)
  np.testing.assert_allclose(
    fns["pre_logits"](variables, data), IMAGE.reshape(B, -1)
  )
  pairs = fns["loss"](variables, batch(), kind="sigmoid_xent")
  means = metrics.means(pairs)
  expected = sigmoid_loss(logits, ONE_HOT).mean()
  assert means["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
  ("data", "options", "message"),
  [
    (
      batch(),
      dict(kind="softmax_xnt"),
      "unknown 'softmax_xnt'. .*'softmax_xent'",
    ),
    ({"image": IMAGE, "label": 0}, {}, "no feature 'labels'.* mean 'label'"),
    ({"img": IMAGE, "labels": 0}, {}, "no feature 'image'"),
  ],
)
def test_invalid_options_and_batches(data, options, message):
  model, variables = make()
  with pytest.raises(ConfigError, match=message):
    features = Features(data, "config.input")
    run(variables, model, features, **options)
