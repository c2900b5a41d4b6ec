"""Greedy decoding with drafts: the same text, with fewer calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.text import decoding, speculation

V, L, NEW = 23, 6, 13


def following(token, position):
  """The likeliest token after another one, at its position."""
  return (3 * token + position) % V


def prompts():
  rng = np.random.default_rng(0)
  lengths = np.asarray([6, 3, 0, 4])
  tokens = rng.integers(1, V, (4, L))
  tokens = np.where(np.arange(L) < lengths[:, None], tokens, 0)
  return jnp.asarray(tokens), jnp.asarray(lengths)


def read(cache, tokens_BW, position):
  places_W = position + jnp.arange(tokens_BW.shape[1])
  return (
    jax.nn.one_hot(following(tokens_BW, places_W), V),
    tokens_BW,
    cache + 1,
  )


def draft(wrong_every, cache, number, hidden, ahead_BW, position, index):
  """Right, except at every n-th position."""
  token_B = ahead_BW[:, index]
  place = position + index + 1 + number
  next_B = following(token_B, place)
  next_B = jnp.where(place % wrong_every == 0, next_B + 1, next_B) % V
  return jax.nn.one_hot(next_B, V), hidden, cache + 1


@functools.cache
def plain(eos_id):
  tokens_BL, lengths_B = prompts()

  def step(cache, token_B, position):
    return jax.nn.one_hot(following(token_B, position), V), cache

  return decoding.sample(
    step,
    jnp.zeros(4),
    tokens_BL,
    lengths_B,
    max_len=L + NEW,
    eos_id=eos_id,
    start=2,
  )[0]


@functools.cache
def with_drafts(eos_id, num_drafts):
  """Compiled function of `wrong_every`."""

  def run(wrong_every):
    return speculation.greedy(
      read,
      functools.partial(draft, wrong_every),
      (jnp.zeros(4), jnp.zeros(4)),
      *prompts(),
      num_drafts=num_drafts,
      max_len=L + NEW,
      eos_id=eos_id,
      pad_id=0,
      start=2,
    )

  return jax.jit(run)


NEVER = 1000  # There are fewer positions.


@pytest.mark.parametrize("eos_id", [None, (2, 19)])
@pytest.mark.parametrize("wrong_every", [NEVER, 1, 3])
@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_the_text_is_that_of_greedy_decoding(eos_id, wrong_every, num_drafts):
  new_BL, calls = with_drafts(eos_id, num_drafts)(wrong_every)
  expected = np.asarray(plain(eos_id))
  np.testing.assert_array_equal(new_BL, expected)
  if eos_id is not None:
    ended = np.isin(expected, eos_id) & (np.arange(L + NEW) >= 6)
    assert ended.any(), "choose end tokens that occur"
    return
  num_tokens = L + NEW - 3  # From the position 3 on.
  if wrong_every == NEVER:
    # The first call has no drafts yet, but the prompts.
    assert calls <= 1 + -(-num_tokens // (num_drafts + 1))
  if wrong_every == 1:  # Only what stands in all prompts is right.
    assert calls == num_tokens
