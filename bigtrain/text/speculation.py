"""Greedy decoding that reads several drafted tokens at once.

A cheap model drafts the next K tokens, and the large one reads them in one
call (https://arxiv.org/abs/2211.17192). The large model keeps the tokens that
it would have chosen itself, so the text equals that of greedy decoding. All
texts of a batch advance together, by the number of tokens that are right in
every text.

Axes: B batch, K drafts, W = K + 1 tokens of a call, L length with K more places
for drafts, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.text import decoding

# (cache, tokens_BW, position) -> (logits_BWV of the tokens after each, what the
# drafts read, cache).
ReadFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any, Any]]
# (cache, number of the draft, what it reads, tokens_BW from number + 1 places
# behind `position` on, position, index in W of the newest token that is sure)
# -> (logits_BV at that index, what the next draft reads, cache).
DraftFn = Callable[..., tuple[jax.Array, Any, Any]]


class _State(NamedTuple):
  position: jax.Array  # Of the newest token that is sure.
  tokens_BL: jax.Array  # Prompts, new tokens and drafts.
  ended_B: jax.Array
  cache: Any
  draft_cache: Any
  num_calls: jax.Array  # Of the large model.


def greedy(
  read_fn: ReadFn,
  draft_fn: DraftFn,
  caches: tuple[Any, Any],
  prompt_BL: jax.Array,
  prompt_len_B: jax.Array,
  *,
  num_drafts: int,
  max_len: int,
  eos_id: decoding.EosId,
  pad_id: int,
  start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns (tokens [B, max_len], prompts included; number of calls).

  Arguments are as in decoding.sample. `caches`, of the model and of the drafts,
  need `num_drafts` places beyond max_len.
  """
  ends = jnp.asarray(decoding.eos_ids(eos_id), jnp.int32)
  W = num_drafts + 1
  L = max_len + W
  in_prompt_BL = jnp.arange(L) < prompt_len_B[:, None]
  tokens_BL = jnp.pad(
    prompt_BL.astype(jnp.int32), [(0, 0), (0, L - prompt_BL.shape[1])]
  )
  tokens_BL = jnp.where(in_prompt_BL, tokens_BL, pad_id)

  def unfinished(state: _State) -> jax.Array:
    return (state.position + 1 < max_len) & ~jnp.all(state.ended_B)

  def step(state: _State) -> _State:
    position, tokens_BL = state.position, state.tokens_BL
    window_BW = _part(tokens_BL, position, W)
    logits_BWV, hidden, cache = read_fn(state.cache, window_BW, position)
    choice_BW = jnp.argmax(logits_BWV, axis=-1).astype(jnp.int32)
    old_BW = _part(tokens_BL, position + 1, W)
    is_given_BW = _part(in_prompt_BL, position + 1, W)
    next_BW, ended_BW = _checked(
      choice_BW, old_BW, is_given_BW, state.ended_B, ends, pad_id
    )
    # Drafts are right up to the first that differs in any text.
    is_right_BK = (next_BW == old_BW)[:, :-1] | ended_BW[:, :-1]
    num_right = jnp.sum(jnp.cumprod(jnp.all(is_right_BK, axis=0)))
    is_sure_W = jnp.arange(W) <= num_right
    next_BW = jnp.where(is_sure_W, next_BW, old_BW)
    tokens_BL = _with_part(tokens_BL, next_BW, position + 1)
    ended_B = jnp.take(ended_BW, num_right, axis=1)

    newest, draft_cache = position + 1 + num_right, state.draft_cache
    for number in range(num_drafts):
      ahead_BW = _part(tokens_BL, position + 1 + number, W)
      logits_BV, hidden, draft_cache = draft_fn(
        draft_cache, number, hidden, ahead_BW, position, num_right
      )
      draft_B1 = jnp.argmax(logits_BV, axis=-1)[:, None].astype(jnp.int32)
      place = newest + 1 + number
      is_given_B1 = _part(in_prompt_BL, place, 1)
      draft_B1 = jnp.where(is_given_B1, _part(tokens_BL, place, 1), draft_B1)
      tokens_BL = _with_part(tokens_BL, draft_B1, place)
    num_calls = state.num_calls + 1
    return _State(newest, tokens_BL, ended_B, cache, draft_cache, num_calls)

  state = _State(
    jnp.asarray(start, jnp.int32),
    tokens_BL,
    prompt_len_B == 0,
    *caches,
    jnp.zeros((), jnp.int32),
  )
  state = jax.lax.while_loop(unfinished, step, state)
  # Drafts, and tokens after the end, are not part of the text.
  is_sure_L = jnp.arange(L) <= state.position
  tokens_BL = jnp.where(in_prompt_BL | is_sure_L, state.tokens_BL, pad_id)
  return tokens_BL[:, :max_len], state.num_calls


def _checked(
  choice_BW: jax.Array,
  old_BW: jax.Array,
  is_given_BW: jax.Array,
  ended_B: jax.Array,
  ends: jax.Array,
  pad_id: int,
) -> tuple[jax.Array, jax.Array]:
  """The tokens of greedy decoding, and whether a text has ended with each.

  Within its prompt, a text keeps the token that is there.
  """
  tokens, ended = [], []
  for choice_B, old_B, is_given_B in zip(choice_BW.T, old_BW.T, is_given_BW.T):
    token_B = jnp.where(ended_B, pad_id, choice_B)
    token_B = jnp.where(is_given_B & ~ended_B, old_B, token_B)
    ended_B = ended_B | (jnp.isin(token_B, ends) & ~is_given_B)
    tokens.append(token_B)
    ended.append(ended_B)
  return jnp.stack(tokens, axis=1), jnp.stack(ended, axis=1)


def _part(x_BL: jax.Array, start: jax.Array, size: int) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(x_BL, start, size, axis=1)


def _with_part(
  x_BL: jax.Array, part_BW: jax.Array, start: jax.Array
) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(x_BL, part_BW, start, axis=1)
