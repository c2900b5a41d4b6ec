"""Generation with a cache: greedy, sampled, and by beam search.

Axes: B batch, M beams, L length, V vocabulary.

A model is a `step_fn(cache, token_B, position) -> (logits_BV, cache)`: it sees
the tokens at `position` (an int32 scalar) and returns logits for those at
`position + 1`. The cache is a tree of arrays whose first axis is the batch.
All functions can be jitted, under any mesh: one loop, which ends as soon as
every example has ended.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.settings import ConfigError

StepFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]

# Lower than any log-likelihood, and finite: sums with it stay numbers.
_IMPOSSIBLE = -1e9


def sample(
  step_fn: StepFn,
  cache: Any,
  prompt_BL: jax.Array,
  prompt_len_B: jax.Array,
  *,
  max_len: int,
  eos_id: int | None,
  pad_id: int = 0,
  rng: jax.Array | None = None,
  ids_B: jax.Array | None = None,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  start: jax.Array | int = 0,
) -> jax.Array:
  """Continues prompts token by token.

  The token at position p of example b is drawn with the key
  fold_in(fold_in(rng, ids_B[b]), p): neither the other examples of the batch
  nor the number of devices change it.

  Args:
    step_fn: see the head of this file.
    cache: what step_fn starts from; positions before `start` are in it.
    prompt_BL: int tokens, at most max_len of them; each example has at least
      the token that decoding begins with.
    prompt_len_B: how many of them are the prompt. An example with 0 of them is
      padding: nothing is generated for it.
    max_len: length of the result, prompt included.
    eos_id: token that ends an example; None if there is none.
    pad_id: what follows it.
    rng: a key; needed unless greedy.
    ids_B: number of each example, which its draws depend on; 0, 1, ... unless
      given.
    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: draw from so many most likely tokens only; 0 from all.
    top_p: draw only from the fewest most likely tokens whose probabilities
      add up to this (https://arxiv.org/abs/1904.09751).
    start: first position that step_fn is given: after a prefill, the length of
      the shortest prompt less 1.

  Returns:
    int32 tokens [B, max_len]: the prompt, what follows it up to and including
    the eos, padding.
  """
  check_sampling(temperature, top_k, top_p)
  if temperature and rng is None:
    raise ValueError("rng: sampling needs a key")
  B, L = prompt_BL.shape
  if not 1 <= L <= max_len:
    raise ConfigError(
      f"max_len={max_len}: the prompts are up to {L} tokens long."
    )
  if ids_B is None:
    ids_B = jnp.arange(B)
  keys_B = None
  if temperature:
    keys_B = jax.vmap(lambda i: jax.random.fold_in(rng, i))(ids_B)
  prompt_BL = jnp.where(
    jnp.arange(L) < prompt_len_B[:, None], prompt_BL, pad_id
  ).astype(jnp.int32)
  tokens_BL = jnp.pad(
    prompt_BL, ((0, 0), (0, max_len - L)), constant_values=pad_id
  )

  def going_on(carry: tuple[Any, ...]) -> jax.Array:
    position, _, ended_B, _ = carry
    return (position + 1 < max_len) & ~jnp.all(ended_B)

  def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
    position, tokens_BL, ended_B, cache = carry
    at = lambda p: jax.lax.dynamic_index_in_dim(tokens_BL, p, 1, keepdims=False)
    logits_BV, cache = step_fn(cache, at(position), position)
    position = position + 1
    token_B = choose(
      logits_BV,
      keys_B,
      position,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
    )
    token_B = jnp.where(ended_B, pad_id, token_B)
    free_B = position >= prompt_len_B
    token_B = jnp.where(free_B, token_B, at(position))
    if eos_id is not None:
      ended_B |= free_B & (token_B == eos_id)
    tokens_BL = jax.lax.dynamic_update_index_in_dim(
      tokens_BL, token_B, position, 1
    )
    return position, tokens_BL, ended_B, cache

  begin = (jnp.asarray(start, jnp.int32), tokens_BL, prompt_len_B == 0, cache)
  return jax.lax.while_loop(going_on, step, begin)[1]


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
  """Raises ConfigError for options of `sample` that cannot be meant."""
  if not temperature >= 0:
    raise ConfigError(
      f"temperature={temperature!r}: expected 0 (greedy) or more."
    )
  if not isinstance(top_k, int) or top_k < 0:
    raise ConfigError(f"top_k={top_k!r}: expected a number, or 0 for all.")
  if not 0 < top_p <= 1:
    raise ConfigError(f"top_p={top_p!r}: expected a probability in (0, 1].")


def choose(
  logits_BV: jax.Array,
  keys_B: jax.Array | None,
  position: jax.Array | int,
  *,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
) -> jax.Array:
  """The next token of each example; see `sample` for the options.

  Args:
    logits_BV: unnormalised log-probabilities.
    keys_B: a key for each example, unless greedy.
    position: that of the token to choose, folded into the keys.

  Returns:
    int32 [B].
  """
  logits_BV = logits_BV.astype(jnp.float32)
  if not temperature:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  logits_BV = logits_BV / temperature
  V = logits_BV.shape[-1]
  if 0 < top_k < V or top_p < 1:
    kept = min(top_k, V) if top_k else V
    best_BK, _ = jax.lax.top_k(logits_BV, kept)
    probs_BK = jax.nn.softmax(best_BK, axis=-1)
    before_BK = jnp.cumsum(probs_BK, axis=-1) - probs_BK
    # The first has nothing before it, so one at least is always left.
    lowest_B = jnp.min(
      jnp.where(before_BK < top_p, best_BK, jnp.inf), axis=-1, keepdims=True
    )
    logits_BV = jnp.where(logits_BV < lowest_B, -jnp.inf, logits_BV)
  draw = lambda key, logits_V: jax.random.categorical(
    jax.random.fold_in(key, position), logits_V
  )
  return jax.vmap(draw)(keys_B, logits_BV).astype(jnp.int32)


class _Beams(NamedTuple):
  """State of the search; axis M holds an example's beams, best first."""

  position: jax.Array
  tokens_BML: jax.Array
  score_BM: jax.Array  # Sums of log-probabilities.
  ended_BL: jax.Array  # The best hypothesis that has its eos, ...
  ended_score_B: jax.Array  # ... and its penalised score.
  cache: Any


def beam_search(
  step_fn: StepFn,
  cache: Any,
  first_B: jax.Array,
  *,
  max_len: int,
  eos_id: int,
  pad_id: int = 0,
  num_beams: int,
  length_penalty: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """The most likely sequence that a search with so many hypotheses finds.

  Hypotheses compare by log-likelihood / ((5 + n) / 6) ** length_penalty with n
  generated tokens, eos included (https://arxiv.org/abs/1609.08144, section 7).
  The search of an example ends when no hypothesis that goes on can beat the
  best that has ended.

  Args:
    step_fn: see the head of this file; called with B * num_beams examples.
    cache: for B examples; each leaf's first axis is repeated for the beams.
    first_B: the token at position 0.
    max_len: length of the result, that token included.
    eos_id: token that ends a hypothesis.
    pad_id: what follows it.
    num_beams: M; 1 is greedy decoding.
    length_penalty: 0 or more; larger ones favour longer sequences.

  Returns:
    (int32 tokens [B, max_len], which begin with first_B, score [B]). Where
    nothing ended in time, the best that did not.
  """
  if num_beams < 1:
    raise ConfigError(f"num_beams={num_beams}: expected at least 1.")
  if length_penalty < 0:
    raise ConfigError(f"length_penalty={length_penalty}: expected 0 or more.")
  B, M = len(first_B), num_beams
  fold = lambda x: x.reshape(B * M, *x.shape[2:])
  unfold = lambda x: x.reshape(B, M, *x.shape[1:])

  def penalised(score: jax.Array, num_tokens: Any) -> jax.Array:
    return score / ((5.0 + num_tokens) / 6.0) ** length_penalty

  def take(tree: Any, index_BN: jax.Array) -> Any:
    pick = jax.vmap(lambda x, i: jnp.take(x, i, axis=0))
    return jax.tree.map(lambda x: pick(x, index_BN), tree)

  def going_on(s: _Beams) -> jax.Array:
    # A score only falls, so the best that can still come is today's best
    # under the penalty of the longest sequence.
    hope_B = penalised(s.score_BM[:, 0], max_len - 1.0)
    better_B = hope_B > s.ended_score_B
    return (s.position + 1 < max_len) & jnp.any(better_B)

  def step(s: _Beams) -> _Beams:
    last_BM = jax.lax.dynamic_index_in_dim(
      s.tokens_BML, s.position, 2, keepdims=False
    )
    logits, cache = step_fn(s.cache, fold(last_BM), s.position)
    logp_BMV = jax.nn.log_softmax(unfold(logits.astype(jnp.float32)))
    V = logp_BMV.shape[-1]
    # At most one candidate a beam ends, so of twice as many M go on.
    score_BN, index_BN = jax.lax.top_k(
      (s.score_BM[:, :, None] + logp_BMV).reshape(B, M * V), 2 * M
    )
    beam_BN, token_BN = index_BN // V, index_BN % V
    tokens_BNL = jax.lax.dynamic_update_index_in_dim(
      take(s.tokens_BML, beam_BN),
      token_BN.astype(jnp.int32),
      s.position + 1,
      2,
    )
    ends_BN = token_BN == eos_id
    # Ends must be among the M best, so that one beam is greedy decoding.
    counts_BN = ends_BN & (jnp.arange(2 * M) < M)
    ended_score_BN = jnp.where(
      counts_BN & (score_BN > _IMPOSSIBLE / 2),
      penalised(score_BN, s.position + 1.0),
      _IMPOSSIBLE,
    )
    best_B = jnp.argmax(ended_score_BN, axis=1)
    best_score_B = jnp.max(ended_score_BN, axis=1)
    best_BL = take(tokens_BNL, best_B[:, None])[:, 0]
    better_B = best_score_B > s.ended_score_B
    score_BM, going_BM = jax.lax.top_k(
      jnp.where(ends_BN, _IMPOSSIBLE, score_BN), M
    )
    return _Beams(
      s.position + 1,
      take(tokens_BNL, going_BM),
      score_BM,
      jnp.where(better_B[:, None], best_BL, s.ended_BL),
      jnp.maximum(best_score_B, s.ended_score_B),
      jax.tree.map(
        fold, take(jax.tree.map(unfold, cache), take(beam_BN, going_BM))
      ),
    )

  tokens_BML = jnp.full((B, M, max_len), pad_id, jnp.int32)
  tokens_BML = tokens_BML.at[:, :, 0].set(first_B[:, None])
  # Only one of M equal hypotheses counts at first.
  score_BM = jnp.full((B, M), _IMPOSSIBLE).at[:, 0].set(0.0)
  cache = jax.tree.map(lambda x: jnp.repeat(x, M, axis=0), cache)
  begin = _Beams(
    jnp.zeros((), jnp.int32),
    tokens_BML,
    score_BM,
    tokens_BML[:, 0],
    jnp.full(B, _IMPOSSIBLE),
    cache,
  )
  end = jax.lax.while_loop(going_on, step, begin)
  some_B = end.ended_score_B > _IMPOSSIBLE / 2
  tokens_BL = jnp.where(some_B[:, None], end.ended_BL, end.tokens_BML[:, 0])
  going_score_B = penalised(end.score_BM[:, 0], end.position * 1.0)
  return tokens_BL, jnp.where(some_B, end.ended_score_B, going_score_B)
