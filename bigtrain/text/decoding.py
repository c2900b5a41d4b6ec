"""Generation with a cache: greedy decoding, sampling and beam search.

Axes: B batch, M beams, L length, N new tokens, V vocabulary, K top-k tokens, C
candidates.

To this module, a model is a `step_fn(cache, token_B, position) -> (logits_BV,
cache)`. It reads the tokens at `position` (an int32 scalar) and returns logits
for the tokens at `position + 1`. The cache is a tree of arrays whose first axis
is the batch.

A batch may have prompts of different lengths. So at a given position, one
example may still be reading its prompt while another already writes. Examples
of length 0 are padding and stay empty. The loops stop when every example has
ended. `start` is the first position passed to step_fn: 0 or, after a prefill of
the cache, the length of the shortest prompt minus 1.

`generate` calls `sample`, which is also greedy decoding, or `beam_search`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.config.errors import ConfigError, check_number

StepFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
# The token or tokens that end a text; None if texts have no end.
EosId = int | Sequence[int] | None

# Lower than any log-likelihood, but finite, so that sums with it are not NaN.
_IMPOSSIBLE = -1e9


class Rules(NamedTuple):
  """Rules that change the scores of the next token, as in transformers.

  Attributes:
    repetition_penalty: makes tokens that are already in the text, including the
      prompt, less likely. Positive logits are divided by it, negative ones
      multiplied (https://arxiv.org/abs/1909.05858, section 4.1).
    no_repeat_ngram_size: length of sequences that may not occur twice, even in
      the prompt; 0 for no limit.
    min_new: minimum number of new tokens before a token that ends the text.
    suppress_tokens: tokens that are never generated.
    begin_suppress_tokens: tokens that are not the first new token.
    bad_words_ids: sequences of tokens that are not generated. One that is a
      single token which ends a text has no effect.
  """

  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int = 0
  min_new: int = 0
  suppress_tokens: Sequence[int] = ()
  begin_suppress_tokens: Sequence[int] = ()
  bad_words_ids: Sequence[Sequence[int]] = ()

  def check(self) -> None:
    check_number("repetition_penalty", self.repetition_penalty, above=0)
    for name in ("no_repeat_ngram_size", "min_new"):
      check_number(name, getattr(self, name), least=0, whole=True)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
      for token in getattr(self, name):
        check_number(name, token, least=0, whole=True)
    for words in self.bad_words_ids:
      if not words:
        raise ConfigError(
          "bad_words_ids: expected sequences of tokens, got []."
        )
      for token in words:
        check_number("bad_words_ids", token, least=0, whole=True)

  def apply(
    self,
    scores_BV: jax.Array,
    text_BL: jax.Array,
    position: jax.Array,
    num_new_B: jax.Array,
    ends: jax.Array,
  ) -> jax.Array:
    """Returns the scores of the token after `position`, float32.

    Args:
      text_BL: prompt and new tokens together; anything after `position` is
        ignored.
      num_new_B: new tokens so far; negative within the prompt.
      ends: the tokens that end a text.
    """
    scores_BV = scores_BV.astype(jnp.float32)
    place_L = jnp.arange(text_BL.shape[1])
    # Of an array [B, V]: the score of the token at each place of the text.
    at_text = jnp.arange(len(text_BL))[:, None], text_BL
    if self.repetition_penalty != 1:
      is_past_L = place_L <= position
      seen_BV = jnp.zeros(scores_BV.shape, bool).at[at_text].max(is_past_L)
      lower_BV = jnp.where(
        scores_BV < 0,
        scores_BV * self.repetition_penalty,
        scores_BV / self.repetition_penalty,
      )
      scores_BV = jnp.where(seen_BV, lower_BV, scores_BV)
    if size := self.no_repeat_ngram_size:
      # The token at a place is banned if the tokens before it are the ones
      # that the next token would follow.
      bans_BL = (place_L >= size - 1) & (place_L <= position)
      for k in range(1, size):
        last_B1 = jax.lax.dynamic_index_in_dim(text_BL, position + 1 - k, 1)
        bans_BL &= jnp.roll(text_BL, k, axis=1) == last_B1
      limit_BL = jnp.where(bans_BL, -jnp.inf, jnp.inf)
      scores_BV = scores_BV.at[at_text].min(limit_BL)
    if self.min_new:
      early_B1 = num_new_B[:, None] < self.min_new
      lowest = jnp.where(early_B1, -jnp.inf, jnp.inf)
      scores_BV = scores_BV.at[:, ends].min(lowest)
    if self.suppress_tokens:
      scores_BV = _without(scores_BV, self.suppress_tokens)
    if self.begin_suppress_tokens:
      begins_B1 = num_new_B[:, None] == 0
      suppressed_BV = _without(scores_BV, self.begin_suppress_tokens)
      scores_BV = jnp.where(begins_B1, suppressed_BV, scores_BV)
    for words in self.bad_words_ids:
      banned_BV = _without(scores_BV, words[-1:])
      if len(words) == 1:  # Texts may still end.
        is_end = jnp.isin(words[0], ends)
        scores_BV = jnp.where(is_end, scores_BV, banned_BV)
      else:
        follows_B1 = _follows(text_BL, words, position)[:, None]
        scores_BV = jnp.where(follows_B1, banned_BV, scores_BV)
    return scores_BV


def _without(scores_BV: jax.Array, tokens: Sequence[int]) -> jax.Array:
  """The scores, with those of some tokens at minus infinity."""
  return scores_BV.at[:, jnp.asarray(tokens)].set(-jnp.inf)


def _follows(
  text_BL: jax.Array, words: Sequence[int], position: jax.Array
) -> jax.Array:
  """Whether all but the last of `words` end at `position`, bool [B].

  As in transformers, a text that is shorter than `words` never matches.
  """
  size = len(words)
  if size > text_BL.shape[1]:
    return jnp.zeros(len(text_BL), bool)
  start = position + 2 - size
  last_BS = jax.lax.dynamic_slice_in_dim(text_BL, start, size - 1, axis=1)
  matches_B = jnp.all(last_BS == jnp.asarray(words[:-1]), axis=1)
  return matches_B & (position + 1 >= size)


NO_RULES = Rules()


def generate(
  step_fn: StepFn,
  cache: Any,
  prompt_BL: jax.Array,
  prompt_len_B: jax.Array,
  *,
  max_new: int,
  eos_id: EosId,
  pad_id: int = 0,
  num_beams: int | None = None,
  length_penalty: float = 0.0,
  temperature: float = 0.0,
  seed: int | jax.Array = 0,
  ids_B: jax.Array | None = None,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  start: jax.Array | int = 0,
  rules: Rules = NO_RULES,
  whole: bool = False,
) -> Any:
  """Returns the new tokens, int32 [B, max_new].

  `beam_search` makes them, or `sample` if `num_beams` is None. With `whole`,
  the result is all that `sample` returns.
  """
  if num_beams is not None:
    new_BN, _ = beam_search(
      step_fn,
      cache,
      prompt_BL,
      prompt_len_B,
      max_new=max_new,
      eos_id=eos_id,
      pad_id=pad_id,
      num_beams=num_beams,
      length_penalty=length_penalty,
      start=start,
      rules=rules,
    )
    return new_BN
  tokens_BL, log_probs_BL = sample(
    step_fn,
    cache,
    prompt_BL,
    prompt_len_B,
    max_len=prompt_BL.shape[1] + max_new,
    eos_id=eos_id,
    pad_id=pad_id,
    rng=jax.random.key(seed) if temperature else None,
    ids_B=ids_B,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    start=start,
    rules=rules,
  )
  if whole:
    return tokens_BL, log_probs_BL
  return new_tokens(tokens_BL, prompt_len_B, max_new)


def new_tokens(
  tokens_BL: jax.Array, prompt_len_B: jax.Array, max_new: int
) -> jax.Array:
  """The tokens after each prompt, [B, max_new]."""

  def of_text(tokens_L: jax.Array, prompt_len: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(tokens_L, prompt_len, max_new)

  return jax.vmap(of_text)(tokens_BL, prompt_len_B)


def eos_ids(eos_id: EosId) -> tuple[int, ...]:
  """Returns the tokens that end a text, as a tuple."""
  return () if eos_id is None else tuple(np.atleast_1d(eos_id).tolist())


def row_hashes(values_BN: jax.Array, factor: int = 1) -> jax.Array:
  """Returns a hash of each example's values, uint32 [B], for `sample`'s ids_B.

  With these ids, the draws for a prompt do not depend on its place in the
  batch. Zeros at the end of the values, which are padding, do not change the
  hash.
  """
  place_N = jnp.arange(values_BN.shape[1], dtype=jnp.uint32) * 2 + 1
  mixed_BN = (values_BN ^ (values_BN >> 15)) * jnp.uint32(factor) * place_N
  return jnp.sum(mixed_BN ^ (mixed_BN >> 13), axis=1, dtype=jnp.uint32)


def sample(
  step_fn: StepFn,
  cache: Any,
  prompt_BL: jax.Array,
  prompt_len_B: jax.Array,
  *,
  max_len: int,
  eos_id: EosId,
  pad_id: int = 0,
  rng: jax.Array | None = None,
  ids_B: jax.Array | None = None,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  start: jax.Array | int = 0,
  rules: Rules = NO_RULES,
) -> tuple[jax.Array, jax.Array]:
  """Continues prompts token by token.

  The token at position p of example b is drawn with the key
  fold_in(fold_in(rng, ids_B[b]), p), so it does not depend on the other
  examples of the batch or the number of devices.

  Args:
    eos_id: token or tokens that end an example; None if none does.
    ids_B: integers that seed each example's draws; 0, 1, ... by default.
    temperature: divisor of the logits; 0 for the likeliest token.
    top_k: number of likeliest tokens to draw from; 0 for all.
    top_p: draw from the smallest set of likeliest tokens whose probabilities
      add up to this (https://arxiv.org/abs/1904.09751).
    min_p: least share of the likeliest token's probability, arXiv 2407.01082.

  Returns:
    The tokens, int32 [B, max_len], prompts included, and the log-probabilities
    of the new ones, float32 [B, max_len], at the temperature, before top_k,
    top_p and min_p.
  """
  rules.check()
  check_sampling(temperature, top_k, top_p, min_p)
  limits = top_k, top_p, min_p
  B, L = prompt_BL.shape
  if not 1 <= L <= max_len:
    raise ConfigError(
      f"max_len: expected at least {L}, the length of the longest prompt, got "
      f"{max_len}."
    )
  ends = jnp.asarray(eos_ids(eos_id), jnp.int32)
  keys_B = _keys(rng, ids_B, B) if temperature else None
  tokens_BL = jnp.pad(prompt_BL.astype(jnp.int32), [(0, 0), (0, max_len - L)])
  in_prompt_BL = jnp.arange(max_len) < prompt_len_B[:, None]
  tokens_BL = jnp.where(in_prompt_BL, tokens_BL, pad_id)

  def unfinished(carry: tuple[Any, ...]) -> jax.Array:
    position, _, _, ended_B, _ = carry
    return (position + 1 < max_len) & ~jnp.all(ended_B)

  def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
    position, tokens_BL, log_probs_BL, ended_B, cache = carry
    logits_BV, cache = step_fn(cache, _at(tokens_BL, position), position)
    position = position + 1
    num_new_B = position - prompt_len_B
    logits_BV = rules.apply(logits_BV, tokens_BL, position - 1, num_new_B, ends)
    token_B = choose(logits_BV, keys_B, position, temperature, *limits)
    token_B = jnp.where(ended_B, pad_id, token_B)
    # Within its prompt, an example keeps the token that is there.
    generated_B = num_new_B >= 0
    log_prob_B = _log_prob(logits_BV / (temperature or 1.0), token_B)
    log_prob_B = jnp.where(generated_B & ~ended_B, log_prob_B, 0.0)
    token_B = jnp.where(generated_B, token_B, _at(tokens_BL, position))
    ended_B |= generated_B & jnp.isin(token_B, ends)
    tokens_BL = _put(tokens_BL, token_B, position)
    log_probs_BL = _put(log_probs_BL, log_prob_B, position)
    return position, tokens_BL, log_probs_BL, ended_B, cache

  zeros_BL = jnp.zeros(tokens_BL.shape, jnp.float32)
  start = jnp.asarray(start, jnp.int32)
  initial = start, tokens_BL, zeros_BL, prompt_len_B == 0, cache
  _, tokens_BL, log_probs_BL, *_ = jax.lax.while_loop(unfinished, step, initial)
  return tokens_BL, log_probs_BL


def _keys(rng: Any, ids_B: jax.Array | None, B: int) -> jax.Array:
  """Returns a random key for each example."""
  if ids_B is None:
    ids_B = jnp.arange(B)
  return jax.vmap(functools.partial(jax.random.fold_in, rng))(ids_B)


def _at(x_BL: jax.Array, position: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x_BL, position, 1, keepdims=False)


def _put(x_BL: jax.Array, x_B: jax.Array, position: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x_BL, x_B, position, axis=1)


def _log_prob(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
  log_probs_BV = jax.nn.log_softmax(logits_BV)
  return jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]


def check_sampling(
  temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> None:
  """Checks these arguments of `sample`."""
  check_number("temperature", temperature, least=0)
  check_number("top_k", top_k, least=0, whole=True)
  check_number("top_p", top_p, above=0, most=1)
  check_number("min_p", min_p, least=0, most=1)


def choose(
  logits_BV: jax.Array,
  keys_B: jax.Array | None,
  position: jax.Array | int,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
) -> jax.Array:
  """Returns the next token of each example, int32 [B]; see `sample`."""
  logits_BV = logits_BV.astype(jnp.float32)
  if not temperature:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  logits_BV = logits_BV / temperature
  V = logits_BV.shape[-1]
  if 0 < top_k < V or top_p < 1:
    K = min(top_k, V) if top_k else V
    best_BK, _ = jax.lax.top_k(logits_BV, K)
    probs_BK = jax.nn.softmax(best_BK, axis=-1)
    before_BK = jnp.cumsum(probs_BK, axis=-1) - probs_BK
    # The likeliest token has a sum of 0 before it, so it always remains.
    lowest_B = jnp.min(
      jnp.where(before_BK < top_p, best_BK, jnp.inf), axis=-1, keepdims=True
    )
    logits_BV = jnp.where(logits_BV < lowest_B, -jnp.inf, logits_BV)
  if min_p:
    best_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    is_low_BV = logits_BV < best_B1 + np.log(min_p)
    logits_BV = jnp.where(is_low_BV, -jnp.inf, logits_BV)
  assert keys_B is not None

  def draw(key: jax.Array, logits_V: jax.Array) -> jax.Array:
    return jax.random.categorical(jax.random.fold_in(key, position), logits_V)

  return jax.vmap(draw)(keys_B, logits_BV).astype(jnp.int32)


def check_beams(num_beams: int, temperature: float, name: str) -> None:
  """Checks that beam search and sampling are not combined."""
  check_number("num_beams", num_beams, least=1, whole=True)
  if num_beams > 1 and temperature:
    raise ConfigError(
      f"{name}: expected num_beams=1 or temperature=0, got {num_beams} and "
      f"{temperature}."
    )


def beam_search(
  step_fn: StepFn,
  cache: Any,
  prompt_BL: jax.Array,
  prompt_len_B: jax.Array,
  *,
  max_new: int,
  eos_id: EosId,
  pad_id: int = 0,
  num_beams: int,
  length_penalty: float = 0.0,
  start: jax.Array | int = 0,
  rules: Rules = NO_RULES,
) -> tuple[jax.Array, jax.Array]:
  """Searches for the likeliest continuations with `num_beams` hypotheses.

  Hypotheses are ranked by log-likelihood / ((5 + n) / 6) ** length_penalty for
  n generated tokens, eos included (https://arxiv.org/abs/1609.08144, section
  7). As in T5X, each step takes the 2 * num_beams best candidates: those that
  end are finished, and the num_beams best of the others continue. An example is
  done when no unfinished hypothesis can beat its best finished one. With one
  beam this is greedy decoding, except that a text may also end where the eos is
  the second likeliest token.

  Returns:
    The new tokens of the best hypothesis, int32 [B, max_new], and its score,
    [B]. The hypothesis is finished, or has the largest length.
  """
  check_number("max_new", max_new, least=1, whole=True)
  check_number("num_beams", num_beams, least=1, whole=True)
  check_number("length_penalty", length_penalty, least=0)
  rules.check()
  B, M, N = len(prompt_BL), num_beams, max_new
  search = _Search(
    step_fn=step_fn,
    prompt_BL=prompt_BL.astype(jnp.int32),
    prompt_len_B=prompt_len_B,
    max_new=max_new,
    eos_ids=eos_ids(eos_id),
    length_penalty=length_penalty,
    rules=rules,
  )
  new_BMN = jnp.full((B, M, N), pad_id, jnp.int32)
  start = jnp.asarray(start, jnp.int32)
  initial = _Beams(
    position=start,
    token_BM=jnp.broadcast_to(search.prompt_at(start), (B, M)),
    new_BMN=new_BMN,
    # The M initial hypotheses are equal, so only the first may continue.
    score_BM=jnp.full((B, M), _IMPOSSIBLE).at[:, 0].set(0.0),
    ended_BN=new_BMN[:, 0],
    ended_score_B=jnp.full(B, _IMPOSSIBLE),
    cache=jax.tree.map(lambda x: jnp.repeat(x, M, axis=0), cache),
  )
  end = jax.lax.while_loop(search.is_unfinished, search.step, initial)
  # If the search ended early, this is below the score of the finished one.
  score_B = search.penalised(end.score_BM[:, 0], float(N))
  ended_B = end.ended_score_B >= score_B
  best_BN = jnp.where(ended_B[:, None], end.ended_BN, end.new_BMN[:, 0])
  return (
    jnp.where(prompt_len_B[:, None] > 0, best_BN, pad_id),
    jnp.maximum(end.ended_score_B, score_B),
  )


class _Beams(NamedTuple):
  """The M unfinished hypotheses of each example, and its best finished one."""

  position: jax.Array  # Of `token_BM`; a scalar.
  token_BM: jax.Array  # The last token of each hypothesis, which is read next.
  new_BMN: jax.Array  # New tokens of each hypothesis, the best one first.
  score_BM: jax.Array  # Sums of their log-probabilities.
  ended_BN: jax.Array  # New tokens of the best finished hypothesis.
  ended_score_B: jax.Array  # Its score, with the length penalty.
  cache: Any  # Of all hypotheses: the first axis is B * M.


@dataclasses.dataclass(frozen=True)
class _Search:
  """One beam search: its settings, and `step`, which adds a token to each beam.

  In its methods, s is the state.
  """

  step_fn: StepFn
  prompt_BL: jax.Array
  prompt_len_B: jax.Array
  max_new: int
  eos_ids: tuple[int, ...]
  length_penalty: float
  rules: Rules

  def apply_rules(
    self, logp_BMV: jax.Array, s: _Beams, num_new_B: jax.Array
  ) -> jax.Array:
    """Applies the rules, which look at prompt and new tokens together."""
    if self.rules == NO_RULES:
      return logp_BMV
    B, M, N = s.new_BMN.shape
    T = self.prompt_BL.shape[1] + N
    # Each text is the prompt, and directly behind it the new tokens.
    place_T = jnp.arange(T)
    new_at_BT = jnp.clip(place_T - self.prompt_len_B[:, None], 0, N - 1)
    text_BMT = jnp.where(
      place_T < self.prompt_len_B[:, None, None],
      jnp.pad(self.prompt_BL, [(0, 0), (0, N)])[:, None],
      jnp.take_along_axis(s.new_BMN, new_at_BT[:, None], axis=2),
    )
    scores = self.rules.apply(
      logp_BMV.reshape(B * M, -1),
      text_BMT.reshape(B * M, -1),
      s.position,
      jnp.repeat(num_new_B, M),
      jnp.asarray(self.eos_ids, jnp.int32),
    )
    return jnp.maximum(scores.reshape(logp_BMV.shape), _IMPOSSIBLE)

  def prompt_at(self, position: jax.Array) -> jax.Array:
    last = self.prompt_BL.shape[1] - 1
    position = jnp.minimum(position, last)
    return jax.lax.dynamic_index_in_dim(self.prompt_BL, position, 1)

  def penalised(self, score: jax.Array, num_tokens: Any) -> jax.Array:
    return score / ((5.0 + num_tokens) / 6.0) ** self.length_penalty

  def is_unfinished(self, s: _Beams) -> jax.Array:
    # Sums of log-probabilities only fall, so the best sum so far, with the
    # length penalty of the longest text, is an upper bound.
    bound_B = self.penalised(s.score_BM[:, 0], float(self.max_new))
    room_B = s.position + 1 < self.prompt_len_B + self.max_new
    better_B = bound_B > s.ended_score_B
    return jnp.any((self.prompt_len_B > 0) & room_B & better_B)

  def step(self, s: _Beams) -> _Beams:
    B, M, N = s.new_BMN.shape

    def fold(x: jax.Array) -> jax.Array:  # [B, M, ...] -> [B * M, ...].
      return x.reshape(B * M, *x.shape[2:])

    def unfold(x: jax.Array) -> jax.Array:
      return x.reshape(B, M, *x.shape[1:])

    logits, cache = self.step_fn(s.cache, fold(s.token_BM), s.position)
    logp_BMV = jax.nn.log_softmax(unfold(logits.astype(jnp.float32)))
    # Number of tokens before the new one.
    n_B = s.position + 1 - self.prompt_len_B
    logp_BMV = self.apply_rules(logp_BMV, s, n_B)
    V = logp_BMV.shape[-1]
    # Whether an example writes: it has read its prompt, and has room.
    grows_B = (n_B >= 0) & (n_B < N)
    # The C best candidates, one more token for any of the beams. With one token
    # that ends a text, each beam has one candidate that ends, so at least M of
    # 2 M candidates continue.
    C = min(M * V, M * (1 + max(1, len(self.eos_ids))))
    score_BC, index_BC = jax.lax.top_k(
      (s.score_BM[:, :, None] + logp_BMV).reshape(B, M * V), C
    )
    beam_BC, token_BC = index_BC // V, (index_BC % V).astype(jnp.int32)
    new_BCN = jnp.where(
      jnp.arange(N) == n_B[:, None, None],
      token_BC[..., None],
      _take(s.new_BMN, beam_BC),
    )
    # The best of the candidates that end a text, if it is better than before.
    ends_BC = jnp.isin(token_BC, jnp.asarray(self.eos_ids, jnp.int32))
    ended_score_BC = jnp.where(
      ends_BC & grows_B[:, None] & (score_BC > _IMPOSSIBLE / 2),
      self.penalised(score_BC, jnp.maximum(n_B, 0)[:, None] + 1.0),
      _IMPOSSIBLE,
    )
    best_B = jnp.argmax(ended_score_BC, axis=1)
    best_score_B = jnp.max(ended_score_BC, axis=1)
    best_BN = _take(new_BCN, best_B[:, None])[:, 0]
    better_B = best_score_B > s.ended_score_B
    # The M best of the candidates that continue.
    score_BM, index_BM = jax.lax.top_k(
      jnp.where(ends_BC, _IMPOSSIBLE, score_BC), M
    )
    # Within its prompt, and at its largest length, an example stays as it is:
    # it reads the next token of the prompt.
    prompt_B1 = self.prompt_at(s.position + 1)
    token_BM = jnp.where(grows_B[:, None], _take(token_BC, index_BM), prompt_B1)
    beam_BM = jnp.where(
      grows_B[:, None], _take(beam_BC, index_BM), jnp.arange(M)
    )
    return _Beams(
      position=s.position + 1,
      token_BM=token_BM,
      new_BMN=jnp.where(
        grows_B[:, None, None], _take(new_BCN, index_BM), s.new_BMN
      ),
      score_BM=jnp.where(grows_B[:, None], score_BM, s.score_BM),
      ended_BN=jnp.where(better_B[:, None], best_BN, s.ended_BN),
      ended_score_B=jnp.maximum(best_score_B, s.ended_score_B),
      cache=jax.tree.map(fold, _take(jax.tree.map(unfold, cache), beam_BM)),
    )


def _take(tree: Any, index_BI: jax.Array) -> Any:
  """Returns x[b, index_BI[b]] for each array x [B, ...] of a tree."""
  pick = jax.vmap(lambda x, index_I: jnp.take(x, index_I, axis=0))
  return jax.tree.map(lambda x_B: pick(x_B, index_BI), tree)
