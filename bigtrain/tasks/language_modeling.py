"""Language modeling: each token predicted from those before it.

Axes: B batch, L length, V vocabulary.

A batch has "tokens" int [B, L] and "targets" int [B, L], the token after each;
perhaps "segments" [B, L], the document of each token in a packed row, 0 for
padding, and "positions" [B, L] in it; else perhaps "loss_mask" [B, L], 0 where
a target does not count; and "num_bytes" [B], what the targets stand for.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import decoding, metrics
from bigtrain.losses import tokens as token_losses
from bigtrain.settings import ConfigError, did_you_mean


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The model's arguments."""
  there = {n: batch[n] for n in ("segments", "positions") if n in batch}
  return {"tokens": _feature(batch, "tokens"), **there}


def _feature(batch: Mapping[str, Any], name: str) -> jax.Array:
  if name not in batch:
    raise ConfigError(
      f"the data and preprocessing leave no {name!r}, which the task "
      f"language_modeling needs.{did_you_mean(name, batch)}"
    )
  return batch[name]


def vocab_sizes(model: Any) -> dict[str, int]:
  """How many ids the model has for the features of a batch."""
  return {"tokens": model.vocab_size, "targets": model.vocab_size}


def token_weights(batch: Mapping[str, Any]) -> jax.Array:
  """float32 [B, L]: 1 where there is a target to predict, else 0."""
  tokens = _feature(batch, "tokens")
  weight_B = metrics.example_weights(batch, tokens)
  if "segments" in batch:
    weight_BL = (batch["segments"] != 0).astype(jnp.float32)
  elif "loss_mask" in batch:
    weight_BL = batch["loss_mask"].astype(jnp.float32)
  else:
    weight_BL = jnp.ones(tokens.shape, jnp.float32)
  return weight_BL * weight_B[:, None]


def loss_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  load_balance: float = 0.01,
  router_z: float = 0.001,
  chunk: int | None = None,
) -> tuple[metrics.Pairs, Any]:
  """Cross-entropy and accuracy of the targets.

  With experts the loss has two more terms, and there are metrics of what the
  layers report on average: see token_losses.with_experts.

  Args:
    variables: "params".
    batch: see the head of this file; "_mask" marks padding with 0.
    rng: key for dropout; unused when not training.
    model: such as models/decoder.py.
    train: whether dropout is at work.
    label_smoothing: share of a target spread over the whole vocabulary.
    z_loss: weight of the squared log of the softmax's denominator, see
      losses.softmax_xent; 1e-4 is usual.
    load_balance: weight of the loss that keeps experts evenly loaded.
    router_z: weight of the loss that keeps the router's logits small.
    chunk: positions of each example for which logits exist at a time; see
      losses.linear_softmax_xent.

  Returns:
    ({"loss": pair in nats, "accuracy": pair, with experts "nll", the loss
    without their terms, and their statistics}, {}).
  """
  found = token_losses.predict(
    variables,
    *_examples(batch),
    rng,
    model=model,
    train=train,
    chunk=chunk,
    label_smoothing=label_smoothing,
    z_loss=z_loss,
  )
  pairs = token_losses.with_experts(
    found.pairs, found.experts, load_balance=load_balance, router_z=router_z
  )
  return pairs, {}


def _examples(batch: Mapping[str, Any]) -> tuple[Any, jax.Array, jax.Array]:
  """(the model's arguments, targets, their weights)."""
  return inputs(batch), _feature(batch, "targets"), token_weights(batch)


def predict_fns(model: Any) -> dict[str, Callable[..., Any]]:
  """Functions for evaluators: perplexity, logits, score and generate."""
  fns = (perplexity, logits, score, generate)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def logits(
  variables: Any, batch: Mapping[str, Any], *, model: Any
) -> jax.Array:
  """float32 [B, L, V]."""
  return model.apply(variables, **inputs(batch), train=False)[0]


def perplexity(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  chunk: int | None = None,
) -> metrics.Pairs:
  """Pairs of the targets.

  Args:
    variables: as in loss_fn.
    batch: as in loss_fn.
    model: as in loss_fn.
    chunk: as in loss_fn.

  Returns:
    {"loss": (nats, tokens), "accuracy": pair}, and where the batch has
    "num_bytes", {"bytes": (sum, 1)}.
  """
  found = token_losses.predict(
    variables, *_examples(batch), model=model, chunk=chunk
  )
  return token_losses.with_bytes(found.pairs, batch)


def score(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  chunk: int | None = None,
) -> dict[str, jax.Array]:
  """Log-likelihood of what "loss_mask" marks, such as an answer.

  Args:
    variables: as in loss_fn.
    batch: as in loss_fn.
    model: as in loss_fn.
    chunk: as in loss_fn.

  Returns:
    {"log_likelihood": float32 [B] in nats, summed over the targets that count,
    "tokens": float32 [B], how many, "greedy": bool [B], whether each of them
    is the likeliest token}.
  """
  found = token_losses.predict(
    variables, *_examples(batch), model=model, chunk=chunk
  )
  counts_BL = token_weights(batch) != 0
  counted_BL = jnp.where(counts_BL, found.loss_BL, 0.0)
  return {
    "log_likelihood": -jnp.sum(counted_BL, axis=1),
    "tokens": jnp.sum(counts_BL.astype(jnp.float32), axis=1),
    "greedy": jnp.all((found.correct_BL == 1) | ~counts_BL, axis=1),
  }


def generate(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  max_new: int = 64,
  eos_id: int | None = None,
  pad_id: int = 0,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
) -> jax.Array:
  """Continues prompts, with a cache of keys and values.

  Args:
    variables: as in loss_fn.
    batch: "tokens" [B, L], prompts padded at the end with `pad_id`, and perhaps
      "_mask": nothing is written for padding.
    model: as in loss_fn.
    max_new: tokens to write at most.
    eos_id: the token that ends a text; None if there is none.
    pad_id: see `batch`; also what follows the end.
    temperature: see decoding.sample, as for the next two.
    top_k: see there.
    top_p: see there.
    seed: what a sample depends on, besides the prompt.

  Returns:
    int32 [B, max_new].
  """
  prompt_BL = _feature(batch, "tokens")
  B, L = prompt_BL.shape
  real_BL = (prompt_BL != pad_id) & (
    metrics.example_weights(batch, prompt_BL) != 0
  )[:, None]
  # The last that is not padding, so that a prompt may have the pad's id in it.
  length_B = jnp.max(jnp.where(real_BL, jnp.arange(L) + 1, 0), axis=1)
  shortest = jnp.min(jnp.where(length_B == 0, L, length_B))
  _, out = model.apply(
    variables, prompt_BL, cache=model.init_cache(B, L + max_new), head=False
  )
  step = functools.partial(step_fn, variables, model)
  tokens_BL = decoding.sample(
    step,
    out["cache"],
    prompt_BL,
    length_B,
    max_len=L + max_new,
    eos_id=eos_id,
    pad_id=pad_id,
    rng=jax.random.key(seed) if temperature else None,
    ids_B=_prompt_numbers(jnp.where(real_BL, prompt_BL, 0)),
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    start=shortest - 1,
  )
  # Each example's own max_new tokens after its prompt.
  take = jax.vmap(
    lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, max_new)
  )
  return take(tokens_BL, length_B)


def step_fn(
  variables: Any,
  model: Any,
  cache: Any,
  token_B: jax.Array,
  position: jax.Array,
) -> tuple[jax.Array, Any]:
  """One step of decoding: (logits [B, V] of the next token, new cache)."""
  logits_B1V, out = model.apply(
    variables, token_B[:, None], cache=cache, start=position
  )
  return logits_B1V[:, 0], out["cache"]


def _prompt_numbers(prompt_BL: jax.Array) -> jax.Array:
  """uint32 [B] hashes: a prompt's place in a batch does not change a sample."""
  place_L = jnp.arange(prompt_BL.shape[1], dtype=jnp.uint32) * 2 + 1
  mixed_BL = (prompt_BL.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
  mixed_BL = (mixed_BL ^ (mixed_BL >> 15)) * place_L
  real_BL = prompt_BL != 0
  return jnp.sum(
    jnp.where(real_BL, mixed_BL ^ (mixed_BL >> 13), 0), axis=1, dtype=jnp.uint32
  )
