"""Decoding against brute force, on tiny tables of probabilities."""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bigtrain
from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.text import decoding
from bigtrain.tools import generate

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
V, EOS, PAD, LENGTH = 5, 4, 0, 6


@pytest.fixture(scope="module")
def table():
  """Random logits [previous token, token, position, next token]."""
  rng = np.random.default_rng(0)
  return rng.normal(size=(V, V, LENGTH, V)).astype(np.float32) * 2


def step_fn_of(table):
  """Returns a model that reads two tokens; its cache holds the first."""

  def step_fn(cache, token_B, position):
    logits_BV = jnp.asarray(table)[cache["last"], token_B, position]
    return logits_BV, {"last": token_B}

  return step_fn


def fresh(size):
  return {"last": jnp.zeros(size, jnp.int32)}


def log_probs(table, tokens):
  """Returns the log-probabilities of a sequence's tokens after the first."""
  result, last = [], 0
  for p, (token, following) in enumerate(zip(tokens, tokens[1:])):
    x = table[last, token, p].astype(np.float64)
    result.append(x[following] - np.log(np.exp(x).sum()))
    last = token
  return result


def greedy(table, prompt, max_len=LENGTH, ends=(EOS,)):
  """Decodes one sequence greedily in plain numpy."""
  tokens, last = list(prompt), 0
  for p in range(len(prompt) - 1):
    last = prompt[p]
  while len(tokens) < max_len:
    token = int(np.argmax(table[last, tokens[-1], len(tokens) - 1]))
    last = tokens[-1]
    tokens.append(token)
    if token in ends:
      break
  return tokens + [PAD] * (max_len - len(tokens))


PROMPTS = [[1], [2, 3], [3, 1, 4], [2, 2], [1, 3, 3]]


def padded(prompts):
  longest = max(map(len, prompts))
  rows = [p + [1] * (longest - len(p)) for p in prompts]  # 1 is not the pad.
  return jnp.asarray(rows), jnp.asarray([len(p) for p in prompts])


@pytest.mark.parametrize("ends", [(EOS,), (EOS, 2)])
def test_greedy_continues_each_prompt(table, ends):
  prompt_BL, length_B = padded(PROMPTS)
  tokens = jax.jit(
    lambda *args: decoding.sample(
      step_fn_of(table), *args, max_len=LENGTH, eos_id=ends
    )[0]
  )(fresh(len(PROMPTS)), prompt_BL, length_B)
  assert tokens.dtype == jnp.int32
  # An eos in a prompt does not end the text: the third prompt is continued.
  assert np.asarray(tokens).tolist() == [
    greedy(table, prompt, ends=ends) for prompt in PROMPTS
  ]


def test_padding_and_prompts_that_fill_the_result(table):
  prompt_BL, _ = padded(PROMPTS)
  tokens = decoding.sample(
    step_fn_of(table),
    fresh(len(PROMPTS)),
    prompt_BL,
    jnp.asarray([0, 3, 3, 0, 3]),
    max_len=3,
    eos_id=EOS,
    pad_id=3,
  )[0]
  expected = [[3, 3, 3], [2, 3, 1], [3, 1, 4], [3, 3, 3], [1, 3, 3]]
  assert np.asarray(tokens).tolist() == expected


def test_start_skips_prefilled_positions(table):
  seen = []
  inner = step_fn_of(table)

  def step_fn(cache, token_B, position):
    jax.debug.callback(lambda p: seen.append(int(p)), position)
    return inner(cache, token_B, position)

  prompts = [[2, 3], [1, 3, 3], [2, 2]]
  prompt_BL, length_B = padded(prompts)
  cache = {"last": prompt_BL[:, 0]}
  tokens = decoding.sample(
    step_fn, cache, prompt_BL, length_B, max_len=LENGTH, eos_id=None, start=1
  )[0]
  jax.effects_barrier()
  assert sorted(seen) == [1, 2, 3, 4]
  free = [greedy(table, p) for p in prompts if EOS not in greedy(table, p)]
  assert free and all(row in np.asarray(tokens).tolist() for row in free)


def draw(table, ids, mesh=None, seed=3, **options):
  prompt_BL, length_B = padded([[1]] * len(ids))
  ids_B = jnp.asarray(ids)
  if mesh:
    place = lambda x: jax.device_put(x, sharding.batch(mesh))
    prompt_BL, length_B, ids_B = map(place, (prompt_BL, length_B, ids_B))
  run = jax.jit(
    lambda *args: decoding.sample(
      step_fn_of(table),
      fresh(len(ids)),
      *args[:2],
      max_len=LENGTH,
      eos_id=EOS,
      rng=jax.random.key(seed),
      ids_B=args[2],
      **options,
    )[0]
  )
  return np.asarray(run(prompt_BL, length_B, ids_B))


def test_a_sample_depends_on_its_id_only(table):
  ids = list(range(16))
  one = draw(table, ids, temperature=1.0)
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  assert (draw(table, ids, mesh, temperature=1.0) == one).all()
  assert (draw(table, [11, 3], temperature=1.0) == one[[11, 3]]).all()
  assert (draw(table, ids, seed=4, temperature=1.0) != one).any()
  assert len({tuple(row) for row in one.tolist()}) > 8


@pytest.mark.parametrize(
  "options, allowed",
  [
    (dict(), [0, 1, 2, 3]),
    (dict(top_k=2), [0, 1]),
    (dict(top_k=1), [0]),
    (dict(top_p=0.4), [0]),
    (dict(top_p=0.6), [0, 1]),
    # The first of the three likeliest has probability 0.5 / 0.95.
    (dict(top_k=3, top_p=0.51), [0]),
    (dict(top_p=1e-6), [0]),
    # Of the likeliest token's probability, 0.3 is 0.6 and 0.15 is 0.3.
    (dict(min_p=0.31), [0, 1]),
    (dict(min_p=0.29), [0, 1, 2]),
    (dict(top_k=2, min_p=0.05), [0, 1]),
  ],
)
def test_choose_draws_from_the_tokens_that_the_options_allow(options, allowed):
  probs = np.array([0.5, 0.3, 0.15, 0.05])
  logits_BV = jnp.tile(jnp.log(probs), (2000, 1))
  keys_B = jax.random.split(jax.random.key(0), 2000)
  token_B = decoding.choose(logits_BV, keys_B, 0, temperature=1.0, **options)
  shares = np.bincount(token_B, minlength=4) / 2000
  expected = np.where(np.isin(range(4), allowed), probs, 0)
  np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.04)
  assert (shares[expected == 0] == 0).all()


def test_low_temperatures_sharpen_the_distribution():
  logits_BV = jnp.tile(jnp.log(jnp.asarray([0.6, 0.4])), (2000, 1))
  keys_B = jax.random.split(jax.random.key(0), 2000)
  share = lambda t: float(
    jnp.mean(decoding.choose(logits_BV, keys_B, 0, temperature=t) == 0)
  )
  assert share(0.25) == pytest.approx(0.6**4 / (0.6**4 + 0.4**4), abs=0.04)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(temperature=-1.0), "temperature"),
    (dict(top_k=-1), "top_k"),
    (dict(top_p=0.0), "top_p"),
    (dict(top_p=1.5), "top_p"),
    (dict(min_p=1.5), "min_p"),
    (dict(max_len=1), "max_len: expected at least 3, .*, got 1"),
  ],
)
def test_invalid_options_are_errors(table, options, message):
  prompt_BL, length_B = padded(PROMPTS)
  kwargs = dict(max_len=LENGTH, eos_id=EOS) | options
  with pytest.raises(ConfigError, match=message):
    decoding.sample(step_fn_of(table), fresh(5), prompt_BL, length_B, **kwargs)


def beam(table, prompts, num_beams, start=0, **options):
  prompt_BL, length_B = padded(prompts)
  cache = {
    "last": prompt_BL[:, start - 1] if start else jnp.zeros_like(length_B)
  }
  run = jax.jit(
    lambda *args: decoding.beam_search(
      step_fn_of(table),
      *args,
      **dict(max_new=LENGTH - 1, eos_id=EOS, num_beams=num_beams, start=start)
      | options,
    )
  )
  tokens_BN, score_B = run(cache, prompt_BL, length_B)
  return np.asarray(tokens_BN).tolist(), np.asarray(score_B)


@pytest.mark.parametrize(
  "length_penalty, ends", [(0.0, (EOS,)), (1.5, (EOS,)), (1.5, (EOS, 0))]
)
def test_enough_beams_find_the_likeliest_sequence(table, length_penalty, ends):
  options = dict(length_penalty=length_penalty, eos_id=ends)
  tokens, scores = beam(table, [[1], [2]], 700, **options)
  words = [w for w in range(V) if w not in ends]
  for first, row, score in zip((1, 2), tokens, scores):
    best = -np.inf, None
    for n in range(LENGTH - 1):
      for middle in itertools.product(words, repeat=n):
        for end in ends:
          sequence = [first, *middle, end]
          penalty = ((5 + n + 1) / 6) ** length_penalty
          value = sum(log_probs(table, sequence)) / penalty
          best = max(best, (value, sequence))
    assert [first, *row] == best[1] + [PAD] * (LENGTH - len(best[1]))
    assert score == pytest.approx(best[0], rel=1e-4)


def test_the_best_unfinished_beam_is_returned_if_none_ended(table):
  endless = table.copy()
  endless[..., EOS] = -1e4
  tokens, scores = beam(endless, [[1]], 3)
  assert EOS not in tokens[0]
  assert scores[0] == pytest.approx(
    sum(log_probs(endless, [1, *tokens[0]])), rel=1e-4
  )


def test_prompts_of_one_batch_do_not_change_each_other(table):
  # Long texts after short prompts need positions that others have no room for.
  long = np.tile(table, (1, 1, 2, 1))
  options = dict(num_beams=2, max_new=5, length_penalty=1.0)
  prompts = [[2, 3], [3, 1, 4]]
  together = beam(long, prompts, start=1, **options)
  for prompt, tokens, score in zip(prompts, *together):
    alone, best = beam(long, [prompt], **options)
    assert alone == [tokens] and best == pytest.approx([score], rel=1e-5)


def test_padding_of_the_batch_stays_empty(table):
  run = jax.jit(
    lambda length_B: decoding.beam_search(
      step_fn_of(table),
      fresh(2),
      jnp.asarray([[1], [2]]),
      length_B,
      max_new=4,
      eos_id=EOS,
      pad_id=3,
      num_beams=2,
    )[0]
  )
  both, one = run(jnp.asarray([1, 1])), run(jnp.asarray([1, 0]))
  np.testing.assert_array_equal(one, jnp.stack([both[0], jnp.full(4, 3)]))


def published_search(log_p, num_beams, alpha, num_new, t5x):
  """Returns the best score of a beam search, by its published definition.

  Args:
    log_p: log-probabilities [previous token, position, token].
    num_beams: M.
    alpha: length penalty.
    num_new: largest number of tokens.
    t5x: whether a hypothesis may end if it is among the best 2 M candidates,
      and unfinished ones count only if none has ended. Otherwise as in Hugging
      Face: M candidates, and unfinished ones count at the largest length.
  """
  M, penalty = num_beams, lambda n: ((5 + n) / 6) ** alpha
  live, finished = [(0.0, 0)], []
  for n in range(1, num_new + 1):
    candidates = [
      (score + log_p[last, n - 1, token], token)
      for score, last in live
      for token in range(V)
    ]
    best = sorted(candidates, reverse=True)[: 2 * M]
    ends = [s / penalty(n) for s, t in best[: 2 * M if t5x else M] if t == EOS]
    finished = sorted(finished + ends, reverse=True)[:M]
    live = [c for c in best if c[1] != EOS][:M]
    bound = live[0][0] / penalty(num_new)
    if len(finished) == M and finished[-1] >= bound:
      return finished[0]
  return finished[0] if t5x and finished else max([*finished, bound])


@pytest.mark.parametrize("num_beams, alpha", [(2, 0.0), (3, 0.6), (1, 1.2)])
def test_scores_are_at_least_those_of_t5x_and_hugging_face(num_beams, alpha):
  searches = 320
  rng = np.random.default_rng(num_beams)
  logits = rng.normal(size=(searches, V, LENGTH, V)) * 2
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  def step_fn(cache, token_B, position):
    table = jnp.asarray(log_p, jnp.float32)
    return table[cache, token_B, position], cache

  search = lambda: decoding.beam_search(
    step_fn,
    jnp.arange(searches),
    jnp.zeros((searches, 1), jnp.int32),
    jnp.ones(searches, jnp.int32),
    max_new=LENGTH,
    eos_id=EOS,
    num_beams=num_beams,
    length_penalty=alpha,
  )[1]
  ours = np.asarray(jax.jit(search)())
  theirs = np.asarray(
    [
      [
        published_search(table, num_beams, alpha, LENGTH, t5x)
        for table in log_p
      ]
      for t5x in (True, False)
    ]
  )
  np.testing.assert_allclose(ours, theirs.max(0), rtol=1e-5)
  # Neither of the two is the better one.
  assert (ours > theirs + 1e-3).any(1).all()


GENERATION = json.loads((GOLDEN / "generation.json").read_text())


def rules_of(case):
  names = {"min_new_tokens": "min_new"}
  return {names.get(k, k): x for k, x in case["rules"].items()}


@pytest.mark.parametrize(
  "case", GENERATION["cases"], ids=lambda c: str(c["rules"])
)
def test_rules_change_scores_as_in_transformers(case):
  text = np.asarray(GENERATION["text"])
  scores = jnp.asarray(GENERATION["scores"])
  rules = decoding.Rules(**rules_of(case))
  expected = [
    [-np.inf if x is None else x for x in row] for row in case["scores"]
  ]
  num_new = 0 if "begin_suppress_tokens" in case["rules"] else 5
  # Padding after the text changes nothing.
  padded = np.pad(text, [(0, 0), (0, 3)], constant_values=1)
  for known in (text, padded):
    got = jax.jit(functools.partial(rules.apply, ends=jnp.asarray([2, 5])))(
      scores, known, text.shape[1] - 1, jnp.full(len(text), num_new)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.golden
def test_texts_by_the_rules_are_those_of_transformers():
  model = bigtrain.load(GOLDEN / "hf_llama")
  prompts = np.asarray(GENERATION["prompts"], np.int32)
  for number in (0, 6, -1):
    case = GENERATION["cases"][number]
    ends = [29, 48 if "min_new_tokens" in case["rules"] else 50]
    options = dict(max_new=20, eos_id=ends, **rules_of(case))
    got = model.run("generate", {"tokens": prompts}, **options).tolist()
    want = [row + [0] * (20 - len(row)) for row in case["tokens"]]
    assert got == want
  # The tool makes texts token by token.
  obey = functools.partial(
    decoding.Rules(**rules_of(case)).apply, ends=jnp.asarray(ends)
  )
  stream = generate._sample(
    model.variables, model.model, prompts[0].tolist(), 20, 0, {}, obey
  )
  until = lambda ids: [*itertools.takewhile(lambda i: i not in ends, ids)]
  assert until(stream) == until(want[0])


@pytest.mark.parametrize("length", [1, 2])
def test_a_beam_search_obeys_the_rules(table, length):
  prompt_BL, length_B = padded(PROMPTS)
  common = dict(max_new=3, eos_id=EOS)
  search = lambda **options: decoding.beam_search(
    step_fn_of(table), fresh(5), prompt_BL, length_B, **common, **options
  )[0].tolist()
  rules = decoding.Rules(no_repeat_ngram_size=length, min_new=3)
  rows = search(num_beams=4, rules=rules)
  assert rows != search(num_beams=4)
  for prompt, new in zip(PROMPTS, rows):
    text = [*prompt, *new]
    grams = [tuple(text[i:][:length]) for i in range(len(text) - length + 1)]
    fresh_grams = grams[len(prompt) - length + 1 :]
    assert all(grams.count(gram) == 1 for gram in fresh_grams) or length == 1
    assert EOS not in new[:2]
