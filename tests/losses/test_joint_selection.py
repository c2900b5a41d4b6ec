"""Joint selection against JEST's formulas in plain numpy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.losses import joint_selection

B, E = 24, 5


def pairs(seed, scale, bias):
  """Pairs that more or less match, as numpy arrays."""
  rng = np.random.default_rng(seed)
  image = rng.normal(size=(B, E))
  text = image + rng.uniform(0, 2, size=(B, 1)) * rng.normal(size=(B, E))
  unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
  return joint_selection.Pairs(unit(image), unit(text), scale, bias)


def losses(p):
  """Loss of image i and text j, -log sigmoid(+-logit): arXiv 2303.15343."""
  logits = p.scale * p.image_BE @ p.text_BE.T + p.bias
  signs = 2 * np.eye(B) - 1
  return np.log1p(np.exp(-signs * logits))


def by_the_paper(scores, real, noise, size):
  """Algorithm 1 of arXiv 2406.17711, with a draw by Gumbel noise."""
  chosen = []
  for noise_B in noise:
    conditional = np.diag(scores).copy()
    for i in chosen:
      conditional += scores[i, :] + scores[:, i]
    conditional[~real] = -1e30
    conditional[chosen] = -np.inf
    order = np.argsort(-(conditional + noise_B))
    chosen += order[:size].tolist()
  return sorted(chosen)


@pytest.mark.parametrize("score", joint_selection.SCORES)
@pytest.mark.parametrize(("number", "chunks"), [(12, 4), (12, 1), (8, 8)])
def test_the_choice_is_that_of_the_paper(score, number, chunks, float64):
  reference, learner = pairs(0, 20.0, -9.0), pairs(1, 6.0, -4.0)
  real = np.arange(B) % 7 != 3
  key = jax.random.key(number)
  scores = -losses(reference)
  if score == "learnability":
    scores += losses(learner)
  noise = [
    np.asarray(jax.random.gumbel(jax.random.fold_in(key, i), (B,)))
    for i in range(chunks)
  ]
  expected = by_the_paper(scores, real, noise, number // chunks)
  chosen, own = jax.jit(
    joint_selection.select, static_argnames=("number", "chunks")
  )(
    reference,
    learner if score == "learnability" else None,
    jnp.asarray(real, float),
    key,
    number=number,
    chunks=chunks,
  )
  assert chosen.tolist() == expected
  np.testing.assert_allclose(own, np.diag(scores), rtol=1e-12, atol=1e-12)


def test_a_set_has_no_pair_twice_and_padding_only_if_it_must(float64):
  reference = jax.tree.map(jnp.asarray, pairs(2, 20.0, -9.0))
  select = lambda weight, seed: joint_selection.select(
    reference, None, weight, jax.random.key(seed), number=20, chunks=5
  )[0].tolist()
  chosen = select(jnp.asarray(np.arange(B) >= 10, float), 0)
  assert len({*chosen}) == 20
  assert {*range(10, B)} < {*chosen}
  assert select(jnp.ones(B), 0) != select(jnp.ones(B), 1)


def test_a_second_pair_with_the_same_caption_is_avoided(float64):
  """The reference knows that its caption fits the first one, too."""
  twice = pairs(3, 40.0, -20.0)
  for i in (0, 1):  # The same pair, and a good one.
    twice.image_BE[i] = twice.text_BE[i] = twice.image_BE[0]
  twice = jax.tree.map(jnp.asarray, twice)
  counts = []
  for chunks in (8, 1):  # A single chunk does not see its own pairs.
    select = lambda key, chunks=chunks: joint_selection.select(
      twice, None, jnp.ones(B), key, number=8, chunks=chunks
    )[0]
    chosen = jax.jit(jax.vmap(select))(jax.random.split(jax.random.key(0), 20))
    counts.append(int(np.sum(np.sum(chosen < 2, axis=1) == 2)))
  assert counts[0] == 0
  assert counts[1] > 0
