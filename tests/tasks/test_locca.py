"""LocCa: its loss by a formula, parallel prediction, and what it writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.models import siglip2
from bigtrain.tasks import locca

B, N, L, V = 3, 3, 10, 23
SIZES = dict(width=16, depth=1, num_heads=2, mlp_dim=16)
MODEL = siglip2.Model(
  image=dict(patch_size=4, pool_type="map", **SIZES),
  text=dict(vocab_size=V - 5, **SIZES),
  out_dim=(None, 16),
  max_len=L,
  num_locations=5,
)


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  # The third sequence of the last image is empty.
  lengths = np.array([[9, 5, 6], [4, 8, 7], [6, 6, 0]])
  places = np.arange(L)
  ids = rng.integers(1, V, (B, N, L))
  inside = places < lengths[..., None]
  return {
    "image": jnp.asarray(rng.normal(size=(B, 8, 8, 1)), jnp.float32),
    "locca": jnp.asarray(np.where(inside, ids, 0), jnp.int32),
    # Two tokens of a prefix.
    "locca_masks": jnp.asarray(inside & (places >= 2), jnp.uint8),
    "_keys": jax.random.split(jax.random.key(5), B),
  }


@pytest.fixture(scope="module")
def variables(batch):
  spec = jax.eval_shape(MODEL.init, jax.random.key(0), image=batch["image"])
  rng = np.random.default_rng(1)

  def draw(x):
    return jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32)

  return jax.tree.map(draw, spec)


def loss(variables, batch, train=False, **options):
  fn = functools.partial(locca.loss_fn, model=MODEL, train=train, **options)
  result, _ = jax.jit(fn)(variables, batch, jax.random.key(0))
  return {name: float(x[0] / x[1]) for name, x in result.items()}


@pytest.mark.parametrize("normalize", ["sentence", "tokens"])
def test_the_loss_is_that_of_the_formula(variables, batch, normalize):
  result = loss(variables, batch, normalize=normalize)
  apply = jax.jit(functools.partial(MODEL.apply, method="states"))
  states = apply(variables, batch["image"], batch["locca"])
  kernel, bias = states.kernel_DV, states.bias_V
  logits = np.asarray(states.hidden_BLD @ kernel + bias)
  labels = np.asarray(batch["locca"]).reshape(B * N, L)
  weights = np.asarray(batch["locca_masks"], float).reshape(B * N, L)
  shifted = logits - logits.max(-1, keepdims=True)
  log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  losses = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
  number = weights.sum(1)
  means = (losses * weights).sum(1) / np.maximum(number, 1)
  expected = means[number > 0].mean()
  if normalize == "tokens":
    expected = (losses * weights).sum() / weights.sum()
  assert result["loss"] == pytest.approx(expected, rel=1e-4)
  hits = (logits.argmax(-1) == labels) * weights
  assert result["token_accuracy"] == pytest.approx(hits.sum() / weights.sum())
  if normalize == "sentence":
    by_task = means.reshape(B, N)
    assert result["loss_1"] == pytest.approx(by_task[:, 1].mean(), rel=1e-4)
    assert result["loss_2"] == pytest.approx(by_task[:2, 2].mean(), rel=1e-4)


def test_padding_of_the_batch_has_no_weight(variables, batch):
  mask = jnp.array([1.0, 1.0, 0.0])
  masked = loss(variables, {**batch, "_mask": mask})
  first = loss(variables, {name: x[:2] for name, x in batch.items()})
  for name, value in first.items():
    assert masked[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.slow
def test_captions_in_parallel_see_their_prefix_alone(variables, batch):
  seen = []

  class Recording:
    """The model, whose results are kept."""

    def apply(self, *args, **kwargs):
      states, mutable = MODEL.apply(*args, **kwargs)
      seen.append(states.hidden_BLD.reshape(B, N, L, -1))
      return states, mutable

  def hidden(labels):
    locca.loss_fn(
      variables,
      {**batch, "locca": labels},
      jax.random.key(0),
      model=Recording(),
      train=True,
      parallel_prob=1.0,
    )
    return np.asarray(seen[-1])

  changed = batch["locca"].at[:, 0, 4:].set(1)
  prefix = batch["locca"].at[:, 0, 0].set(7)
  first, second, third = map(hidden, (batch["locca"], changed, prefix))
  np.testing.assert_array_equal(first[0, 0], second[0, 0])
  assert abs(first[0, 0] - third[0, 0]).max() > 1e-3
  # Other sequences are read in order.
  np.testing.assert_array_equal(first[:, 1:], third[:, 1:])


def test_answers_are_the_likeliest_tokens_one_after_the_other(variables, batch):
  prompt = jnp.array([[3, 4, 0, 0], [5, 6, 7, 0], [2, 0, 0, 0]], jnp.int32)
  asked = {**batch, "prompt": prompt}
  answer = functools.partial(locca.answer, model=MODEL, max_len=5)
  answers = np.asarray(jax.jit(answer)(variables, asked))
  box = jax.jit(functools.partial(locca.box, model=MODEL))
  boxes = np.asarray(box(variables, asked))
  apply = jax.jit(functools.partial(MODEL.apply, method="states"))
  for b, start in enumerate((2, 3, 1)):
    whole = np.zeros((1, 1, L), int)
    whole[0, 0, :start] = prompt[b, :start]
    whole[0, 0, start : start + 5] = answers[b]
    states = apply(variables, batch["image"][b : b + 1], jnp.asarray(whole))
    logits = states.hidden_BLD @ states.kernel_DV + states.bias_V
    likeliest = np.asarray(logits.argmax(-1))[0, start : start + 5]
    np.testing.assert_array_equal(answers[b], likeliest)
  shares = np.clip(answers[:, :4] - (V - 5), 0, 4) / 4
  np.testing.assert_allclose(boxes, shares, atol=1e-6)


def test_mistakes_have_their_line(variables, batch):
  with pytest.raises(ConfigError, match="config.loss.normalize.* tokens"):
    loss(variables, batch, normalize="words")
  with pytest.raises(ConfigError, match="config.loss.parallel_prob"):
    loss(variables, batch, train=True, parallel_prob=2.0)
  long = {**batch, "prompt": jnp.zeros((B, L + 1), jnp.int32)}
  with pytest.raises(ConfigError, match="config.model.max_len: 10 .* 11"):
    locca.answer(variables, long, model=MODEL)
