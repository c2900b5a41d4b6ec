"""Sequence to sequence: predicts targets from inputs and earlier targets.

Axes: B batch, S length of inputs, L length of targets, V vocabulary.

A batch has
  "inputs", "targets": int [B, S] and [B, L], padded with 0.
  "inputs_segments", "targets_segments": only packed: [B, S] and [B, L], each
    token's document, 0 for padding. Models use distances, not positions.
  "loss_mask": optional [B, L], weights of the targets: 0 for padding and for
    targets without a loss. By default, ids of 0 are padding.
  "num_bytes": optional [B], bytes of the targets' text.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.losses import token_losses
from bigtrain.text import decoding


def inputs(batch: Batch) -> Batch:
  segments = ("inputs_segments", "targets_segments")
  arguments = {name: batch[name] for name in segments if name in batch}
  if "_mask" in batch or "targets_segments" not in batch:
    arguments["real"] = token_losses.real_positions(
      token_weights(batch), arguments.get("targets_segments")
    )
  return {"inputs": batch["inputs"], "targets": batch["targets"], **arguments}


def vocab_sizes(model: Any) -> dict[str, int]:
  return {"inputs": model.vocab_size, "targets": model.vocab_size}


def token_weights(batch: Batch) -> jax.Array:
  name = "targets_segments" if "targets_segments" in batch else "targets"
  weight_BL = (batch[name] != 0).astype(jnp.float32)
  weight_BL = batch.get("loss_mask", weight_BL)
  weight_B = metrics.example_weights(batch, weight_BL)
  return weight_BL * weight_B[:, None]


_TASK = token_losses.TokenTask(inputs, token_weights)
loss_fn = _TASK.loss_fn
LIMITS = token_losses.LIMITS


def predict_fns(model: Any) -> dict[str, PredictFn]:
  fns = (_TASK.perplexity, _TASK.logits, _TASK.score, generate)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def generate(
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  max_len: int = 64,
  eos_id: decoding.EosId = 1,
  num_beams: int = 1,
  length_penalty: float = 0.0,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  repetition_penalty: float = 1.0,
  no_repeat_ngram_size: int = 0,
  min_new: int = 0,
  suppress_tokens: Sequence[int] = (),
  begin_suppress_tokens: Sequence[int] = (),
  bad_words_ids: Sequence[Sequence[int]] = (),
) -> jax.Array:
  """Generates targets, int32 [B, max_len], padded with 0, for the inputs.

  Args:
    batch: "inputs" [B, S], not packed.
    max_len: largest number of tokens, including the end.
    eos_id: token or tokens that end targets.
    num_beams: number of hypotheses, see decoding.beam_search; 1 means sampling.
    length_penalty: see decoding.beam_search.
    temperature, top_k, top_p: see decoding.sample; temperature 0 is greedy.
    seed: seed of the samples; a sample depends on it and the inputs.
    repetition_penalty, no_repeat_ngram_size, min_new, suppress_tokens,
      begin_suppress_tokens, bad_words_ids: see decoding.Rules.
  """
  inputs_BS = batch["inputs"]
  if "inputs_segments" in batch:
    raise ConfigError(
      "generate: expected one document per example, got packed inputs "
      "(inputs_segments)."
    )
  decoding.check_beams(num_beams, temperature, "generate")
  # Position 0 is the 0 that starts the decoder.
  cache = model.apply(variables, inputs_BS, max_len + 1, method="begin")

  def step(cache: Any, token_B: jax.Array, position: jax.Array) -> Any:
    return model.apply(variables, cache, token_B, position, method="step")

  prompt_B1 = jnp.zeros((len(inputs_BS), 1), jnp.int32)
  length_B = (metrics.example_weights(batch, inputs_BS) != 0).astype(jnp.int32)
  return decoding.generate(
    step,
    cache,
    prompt_B1,
    length_B,
    max_new=max_len,
    eos_id=eos_id,
    num_beams=num_beams if num_beams > 1 else None,
    length_penalty=length_penalty,
    temperature=temperature,
    seed=seed,
    # Samples depend on the inputs, not on their order or padding.
    ids_B=decoding.row_hashes(
      inputs_BS.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    ),
    top_k=top_k,
    top_p=top_p,
    rules=decoding.Rules(
      repetition_penalty,
      no_repeat_ngram_size,
      min_new,
      suppress_tokens,
      begin_suppress_tokens,
      bad_words_ids,
    ),
  )
