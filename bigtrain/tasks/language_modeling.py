"""Language modeling: predicts each token from the ones before it.

Axes: B batch, L length, V vocabulary.

A batch has
  "tokens": int [B, L].
  "targets": int [B, L], the token after each.
  "segments": only packed: [B, L], each token's document, 0 for padding.
  "positions": optional with "segments": [B, L], places in the document.
  "loss_mask": optional [B, L], 0 for targets without a loss. Tokens before a
    target with a loss are its context, as a prompt is; others are padding.
  "prefix": optional int [B], number of leading tokens that all tokens see, also
    those before them (a prefix language model). Not with "segments".
  "image": optional float [B, height, width, 3], or [B, N, height, width, 3] for
    several, the pictures of models.vision_language.
  "num_bytes": optional [B], bytes of the targets' text.
  "teacher_ids", "teacher_logits": optional [B, L, k], from `likely`. With them,
    or with config.teacher (one, or several by name), the model learns the
    teachers' probabilities in place of the targets.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.losses import token_losses
from bigtrain.text import decoding


def inputs(batch: Batch) -> Batch:
  optional = ["segments", "positions", "prefix", "image"]
  arguments = {name: batch[name] for name in optional if name in batch}
  if "loss_mask" in batch or "_mask" in batch:
    arguments["real"] = token_losses.real_positions(
      token_weights(batch), arguments.get("segments")
    )
  return {"tokens": batch["tokens"], **arguments}


def vocab_sizes(model: Any) -> dict[str, int]:
  names = ("tokens", "targets", "teacher_ids")
  sizes = dict.fromkeys(names, model.vocab_size)
  if hasattr(model, "num_ids"):  # Some stand for pictures.
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


def predict_fns(model: Any) -> dict[str, PredictFn]:
  fns = (_TASK.perplexity, _TASK.logits, _TASK.score, exact, likely, generate)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def exact(
  variables: Variables, batch: Batch, *, model: Any, chunk: int | None = None
) -> Metrics:
  """Share of the examples whose answer greedy decoding gives."""
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
  seed: int | jax.Array = 0,
  repetition_penalty: float = 1.0,
  no_repeat_ngram_size: int = 0,
  min_new: int = 0,
  whole: bool = False,
) -> Any:
  """Continues prompts by int32 [B, max_new], with a cache of keys and values.

  Args:
    batch: "tokens" [B, L], prompts padded at the end with `pad_id`. With
      "prefix", whatever it holds, all tokens see the whole prompt. "image" are
      its pictures; a prompt does not end with an image token. "sample"
      int32 [B], if there, tells samples of the same prompt apart.
    max_new: largest number of new tokens.
    eos_id: token or tokens that end a text; None if texts have no end.
    pad_id: padding of the prompts, and after the end of a text.
    num_beams: hypotheses of a beam search, see decoding.beam_search; 1 samples.
    length_penalty: see decoding.beam_search.
    temperature, top_k, top_p: see decoding.sample; temperature 0 is greedy.
    seed: seed of the samples; a sample depends on it and the prompt.
    repetition_penalty, no_repeat_ngram_size, min_new: see decoding.Rules.
    whole: whether to return what decoding.sample does, prompts included.
  """
  decoding.check_beams(num_beams, temperature, "generate")
  prompt_BL = batch["tokens"]
  B, L = prompt_BL.shape
  real_B = metrics.example_weights(batch, prompt_BL) != 0
  real_BL = (prompt_BL != pad_id) & real_B[:, None]
  # Up to the last token that is not padding: prompts may contain the pad id.
  length_B = jnp.max(jnp.where(real_BL, jnp.arange(L) + 1, 0), axis=1)
  # One token at a time is read from the end of the shortest prompt on.
  shortest = jnp.min(jnp.where(length_B == 0, L, length_B))
  prefix_B = length_B if "prefix" in batch else None
  options = {} if prefix_B is None else {"prefix": prefix_B}
  if "image" in batch:
    options["image"] = batch["image"]
  _, out = model.apply(
    variables,
    prompt_BL,
    real=jnp.arange(L) < length_B[:, None],
    cache=model.init_cache(B, L + max_new),
    head=False,
    **options,
  )
  step = functools.partial(step_fn, variables, model, prefix_B=prefix_B)
  return decoding.generate(
    step,
    out["cache"],
    prompt_BL,
    length_B,
    max_new=max_new,
    eos_id=eos_id,
    pad_id=pad_id,
    num_beams=num_beams if num_beams > 1 else None,
    length_penalty=length_penalty,
    temperature=temperature,
    seed=seed,
    ids_B=_sample_ids(batch, real_BL),
    top_k=top_k,
    top_p=top_p,
    start=shortest - 1,
    rules=decoding.Rules(repetition_penalty, no_repeat_ngram_size, min_new),
    whole=whole,
  )


def _sample_ids(batch: Batch, real_BL: jax.Array) -> jax.Array:
  """Numbers on which samples depend: not on the order or padding of prompts."""
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
  prefix_B: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
  """Reads one token: returns (logits [B, V] of the next one, new cache)."""
  options = {}
  if prefix_B is not None:  # A beam search has several texts of each prompt.
    num_texts = token_B.shape[0] // prefix_B.shape[0]
    options["prefix"] = jnp.repeat(prefix_B, num_texts)
  logits_B1V, out = model.apply(
    variables, token_B[:, None], cache=cache, start=position, **options
  )
  return logits_B1V[:, 0], out["cache"]
