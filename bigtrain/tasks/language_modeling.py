"""Language modeling: predicts each token from the ones before it.

Axes: B batch, L length, V vocabulary.

A batch has
  "tokens": int [B, L].
  "targets": int [B, L], the token after each.
  "segments": only packed: [B, L], each token's document, 0 for padding.
  "positions": optional with "segments": [B, L], places in the document.
  "loss_mask": optional [B, L], 0 for targets without a loss. Tokens before a
    target with a loss are its context, as a prompt is; others are padding.
  "prefix": optional int [B], number of leading tokens that all tokens see, even
    earlier ones (a prefix language model). Not with "segments".
  "image": optional float [B, height, width, 3], or [B, N, height, width, 3] for
    several, the pictures of models.vision_language; or ready-made patches,
    float [B, N, P, values], of pictures of any shape. With these also
  "shapes": int [B, N, 2], rows and columns of the patches of each.
  "num_bytes": optional [B], bytes of the targets' text.
  "teacher_ids", "teacher_logits": optional [B, L, k], from `likely`. With them,
    or with config.teacher (one, or several by name), the model learns the
    teachers' probabilities in place of the targets.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.losses import token_losses
from bigtrain.text import decoding, speculation


def inputs(batch: Batch) -> Batch:
  optional = ("segments", "positions")
  arguments = {name: batch[name] for name in optional if name in batch}
  arguments |= picture_features.of_prompts(batch)
  if "loss_mask" in batch or "_mask" in batch:
    arguments["real"] = token_losses.real_positions(
      token_weights(batch), arguments.get("segments")
    )
  return {"tokens": batch["tokens"], **arguments}


def vocab_sizes(model: Any) -> dict[str, int]:
  names = ("tokens", "targets", "teacher_ids")
  sizes = dict.fromkeys(names, model.vocab_size)
  if hasattr(model, "num_ids"):  # Some tokens stand for pictures.
    sizes |= dict.fromkeys(("tokens", "targets"), model.num_ids)
  return sizes


def token_weights(batch: Batch) -> jax.Array:
  tokens = batch["tokens"]
  weight_B = metrics.example_weights(batch, tokens)
  weight_BL = jnp.ones(tokens.shape, jnp.float32)
  if "segments" in batch:
    weight_BL *= batch["segments"] != 0
  if "loss_mask" in batch:
    weight_BL *= batch["loss_mask"]
  return weight_BL * weight_B[:, None]


_TASK = token_losses.TokenTask(inputs, token_weights)
loss_fn = _TASK.loss_fn
LIMITS = token_losses.LIMITS


def predict_fns(model: Any) -> dict[str, PredictFn]:
  fns = (_TASK.perplexity, _TASK.logits, _TASK.score, exact, likely, generate)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def exact(
  variables: Variables, batch: Batch, *, model: Any, chunk: int | None = None
) -> Metrics:
  """Share of the examples whose answer greedy decoding reproduces."""
  scores = _TASK.score(variables, batch, model=model, chunk=chunk)
  weight_B = metrics.example_weights(batch, batch["tokens"])
  return {"exact": metrics.pair(scores["greedy"], weight_B)}


def likely(
  variables: Variables, batch: Batch, *, model: Any, top_k: int = 64
) -> dict[str, jax.Array]:
  """Features for a student, which evaluators.columns writes to files."""
  logits_BLV = _TASK.logits(variables, batch, model=model)
  values, ids = jax.lax.top_k(logits_BLV, top_k)
  return {"teacher_ids": ids, "teacher_logits": values}


def generate(
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  max_new: int = 64,
  eos_id: decoding.EosId = None,
  pad_id: int = 0,
  num_beams: int = 1,
  length_penalty: float = 0.0,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  seed: int | jax.Array = 0,
  repetition_penalty: float = 1.0,
  no_repeat_ngram_size: int = 0,
  min_new: int = 0,
  suppress_tokens: Sequence[int] = (),
  begin_suppress_tokens: Sequence[int] = (),
  bad_words_ids: Sequence[Sequence[int]] = (),
  drafts: int = 0,
  whole: bool = False,
) -> Any:
  """Continues prompts by int32 [B, max_new], with a cache of keys and values.

  Args:
    batch: "tokens" [B, L], prompts padded at the end with `pad_id`. If there is
      a "prefix", whatever its values, all tokens see the whole prompt. "image"
      has the prompt's pictures; a prompt must not end with an image token. The
      optional "sample" int32 [B] distinguishes samples of the same prompt.
    max_new: largest number of new tokens.
    eos_id: token or tokens that end a text; None if texts have no end.
    pad_id: padding of the prompts, and after the end of a text.
    num_beams, length_penalty: see decoding.beam_search; 1 beam samples.
    temperature, top_k, top_p, min_p, seed: see decoding.sample; temperature 0
      is greedy. A sample depends only on the seed and the prompt.
    repetition_penalty and those up to bad_words_ids: see decoding.Rules.
    drafts: number of tokens that the modules of config.model.mtp draft at once,
      for greedy decoding with fewer calls.
    whole: whether to return all results of decoding.sample, with prompts.
  """
  decoding.check_beams(num_beams, temperature, "generate")
  real_BL, length_B = _real_tokens(batch, pad_id)
  prompts = batch["tokens"], length_B
  options = _options_of(batch, length_B)
  rules = decoding.Rules(
    repetition_penalty,
    no_repeat_ngram_size,
    min_new,
    suppress_tokens,
    begin_suppress_tokens,
    bad_words_ids,
  )
  if drafts:
    others = whole or num_beams > 1 or temperature or options
    _check_drafts(drafts, model, variables, rules, others)
  out = _prefilled(variables, model, *prompts, max_new + drafts, options)
  start = _first_position(*prompts)
  common: Any = dict(eos_id=eos_id, pad_id=pad_id, start=start)
  if drafts:
    args = out, *prompts, drafts, max_new
    return _with_drafts(variables, model, *args, **common)
  return decoding.generate(
    functools.partial(step_fn, variables, model, prompts=options),
    out["cache"],
    *prompts,
    max_new=max_new,
    num_beams=num_beams if num_beams > 1 else None,
    length_penalty=length_penalty,
    temperature=temperature,
    seed=seed,
    ids_B=_sample_ids(batch, real_BL),
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    rules=rules,
    whole=whole,
    **common,
  )


def _prefilled(
  variables: Variables,
  model: Any,
  prompt_BL: jax.Array,
  length_B: jax.Array,
  room: int,
  options: Mapping[str, jax.Array],
) -> dict[str, Any]:
  """Outputs of the model for prompts, with a cache of `room` more tokens."""
  B, L = prompt_BL.shape
  _, out = model.apply(
    variables,
    prompt_BL,
    real=jnp.arange(L) < length_B[:, None],
    cache=model.init_cache(B, L + room),
    head=False,
    **options,
  )
  return out


def _first_position(prompt_BL: jax.Array, length_B: jax.Array) -> jax.Array:
  """The last token of the shortest prompt.

  From there on, the model reads one token at a time.
  """
  lengths_B = jnp.where(length_B == 0, prompt_BL.shape[1], length_B)
  return jnp.min(lengths_B) - 1


def _options_of(batch: Batch, length_B: jax.Array) -> dict[str, jax.Array]:
  """Arguments of the model for prompts, besides the tokens."""
  options = {"prefix": length_B} if "prefix" in batch else {}
  return options | picture_features.of(batch)


def _real_tokens(batch: Batch, pad_id: int) -> tuple[jax.Array, jax.Array]:
  """Which tokens are not padding, [B, L], and the lengths of prompts, [B]."""
  prompt_BL = batch["tokens"]
  real_B = metrics.example_weights(batch, prompt_BL) != 0
  real_BL = (prompt_BL != pad_id) & real_B[:, None]
  # Up to the last token that is not padding: prompts may contain the pad id.
  place_L = jnp.arange(prompt_BL.shape[1]) + 1
  return real_BL, jnp.max(jnp.where(real_BL, place_L, 0), axis=1)


def _check_drafts(
  drafts: int,
  model: Any,
  variables: Variables,
  rules: decoding.Rules,
  others: Any,
) -> None:
  number = getattr(model, "mtp", 0)
  if not 0 < drafts <= number:
    raise ConfigError(
      f"drafts={drafts}: expected at most config.model.mtp={number}, the "
      "number of modules that draft a token each."
    )
  if others or rules != decoding.NO_RULES:
    raise ConfigError(
      f"drafts={drafts}: expected greedy decoding, without beams, a "
      "temperature, rules for the next token, a prefix or log-probabilities."
    )
  if "base" in variables:
    raise ConfigError(
      f"drafts={drafts}: expected a model without adapters; an export merges "
      "them."
    )


def _with_drafts(
  variables: Variables,
  model: Any,
  prefilled: dict[str, Any],
  prompt_BL: jax.Array,
  length_B: jax.Array,
  num_drafts: int,
  max_new: int,
  **options: Any,
) -> jax.Array:
  """Greedy decoding with tokens that config.model.mtp drafts.

  Args:
    prefilled: the model's second result for the prompts, after the logits.
    **options: further arguments of speculation.greedy.
  """
  B, L = prompt_BL.shape
  params = variables["params"]

  def read(cache: Any, tokens_BW: jax.Array, position: jax.Array) -> Any:
    logits_BWV, out = model.apply(
      variables, tokens_BW, cache=cache, start=position
    )
    return logits_BWV, out["pre_logits"], out["cache"]

  def draft(
    cache: Any,
    number: int,
    hidden_BWD: jax.Array,
    ahead_BW: jax.Array,
    position: jax.Array,
    index: jax.Array,
  ) -> Any:
    hidden_BWD, cache = model.draft(
      variables, number, hidden_BWD, ahead_BW, cache, position
    )
    newest_B1D = jax.lax.dynamic_slice_in_dim(hidden_BWD, index, 1, axis=1)
    return model.logits(newest_B1D, params)[:, 0], hidden_BWD, cache

  # The draft modules read the prompts too.
  draft_cache = model.init_draft_cache(B, L + max_new + num_drafts)
  hidden_BLD = prefilled["pre_logits"]
  for number in range(num_drafts):
    is_real_BL = jnp.arange(L) + number + 1 < length_B[:, None]
    ahead_BL = jnp.roll(prompt_BL, -number - 1, axis=1)
    hidden_BLD, draft_cache = model.draft(
      variables, number, hidden_BLD, ahead_BL, draft_cache, 0, real=is_real_BL
    )
  tokens_BL, _ = speculation.greedy(
    read,
    draft,
    (prefilled["cache"], draft_cache),
    prompt_BL,
    length_B,
    num_drafts=num_drafts,
    max_len=L + max_new,
    **options,
  )
  return decoding.new_tokens(tokens_BL, length_B, max_new)


def _sample_ids(batch: Batch, real_BL: jax.Array) -> jax.Array:
  """Seeds of samples, independent of the order and padding of the prompts."""
  prompt_BL = batch["tokens"]
  # The multipliers are those of xxHash32.
  words_BL = (prompt_BL.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
  hashed_BL = jnp.where(real_BL & (prompt_BL != 0), words_BL, 0)
  ids_B = decoding.row_hashes(hashed_BL)
  if "sample" in batch:
    ids_B += batch["sample"].astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
  return ids_B


def step_fn(
  variables: Variables,
  model: Any,
  cache: Any,
  token_B: jax.Array,
  position: jax.Array,
  prompts: Mapping[str, jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
  """Reads one token: returns (logits [B, V] of the next one, new cache).

  Args:
    prompts: the model's arguments for the prompts, see `_options_of`.
  """
  options = dict(prompts or {})
  if "prefix" in options:  # A beam search has several beams for each prompt.
    prefix_B = options["prefix"]
    num_texts = token_B.shape[0] // prefix_B.shape[0]
    options["prefix"] = jnp.repeat(prefix_B, num_texts)
  text = getattr(cache, "text", None)
  for length in () if text is None else text.switches:
    cache = jax.lax.cond(
      (position == length) & jnp.any(cache.text.length_B <= length),
      functools.partial(_read_again, variables, model, length, options),
      lambda cache: cache,
      cache,
    )
  options = {name: options[name] for name in ("prefix",) if name in options}
  logits_B1V, out = model.apply(
    variables, token_B[:, None], cache=cache, start=position, **options
  )
  return logits_B1V[:, 0], out["cache"]


def _read_again(
  variables: Variables,
  model: Any,
  length: int,
  options: Mapping[str, jax.Array],
  cache: Any,
) -> Any:
  """Reads the first `length` tokens as the beginning of longer texts.

  LongRoPE rotates all tokens of a text differently once it is longer, so keys
  and values in the cache, also those of later layers, are no longer right. As
  in transformers, this happens in the step that reads the next token. But there
  the longest text of a batch decides for all, and here each text for itself.
  """
  text = cache.text
  is_short_B = text.length_B <= length
  longer = dataclasses.replace(
    text, length_B=jnp.full_like(text.length_B, length + 1)
  )
  empty = model.init_cache(len(is_short_B), cache.length)
  _, out = model.apply(
    variables,
    # A text that has ended goes on with `pad_id`, which need not be a token.
    jnp.maximum(text.tokens_BS[:, :length], 0),
    cache=dataclasses.replace(empty, text=longer),
    head=False,
    **options,
  )

  def choose(new: jax.Array, old: jax.Array) -> jax.Array:
    is_short = is_short_B.reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(is_short, new, old)

  return jax.tree.map(choose, out["cache"], cache)
