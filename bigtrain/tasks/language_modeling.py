"""Language modeling: predicts each token from the ones before it.

Axes: B batch, L length, V vocabulary.

A batch has
  "tokens": int [B, L].
  "targets": int [B, L], the token after each.
  "segments": packed rows only: [B, L], each token's document, 0 for padding.
  "positions": optional with "segments": [B, L], places in the document.
  "loss_mask": optional [B, L], 0 for targets without loss. Tokens before a
    target with loss are its context, as a prompt is; others are padding.
  "num_bytes": optional [B], bytes of the targets' text.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import decoding, metrics
from bigtrain.losses import tokens as token_losses


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the model's arguments."""
  arguments = {n: batch[n] for n in ("segments", "positions") if n in batch}
  if "loss_mask" in batch or "_mask" in batch:
    arguments["real"] = token_losses.real_positions(
      token_weights(batch), arguments.get("segments")
    )
  return {"tokens": batch["tokens"], **arguments}


def vocab_sizes(model: Any) -> dict[str, int]:
  """Returns the model's number of token ids, by feature."""
  return {"tokens": model.vocab_size, "targets": model.vocab_size}


def token_weights(batch: Mapping[str, Any]) -> jax.Array:
  """Returns float32 [B, L], 0 for padding and masked targets."""
  tokens = batch["tokens"]
  weight_B = metrics.example_weights(batch, tokens)
  weight_BL = jnp.ones(tokens.shape, jnp.float32)
  if "segments" in batch:
    weight_BL *= batch["segments"] != 0
  if "loss_mask" in batch:
    weight_BL *= batch["loss_mask"]
  return weight_BL * weight_B[:, None]


def loss_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  label_smoothing: float = 0.0,
  label_smoothing_over: str = "all",
  z_loss: float = 0.0,
  load_balance: float = 0.01,
  router_z: float = 0.001,
  chunk: int | None = None,
) -> tuple[metrics.Metrics, Any]:
  """Computes cross-entropy and accuracy of the targets.

  With experts the loss has two more terms and there are metrics of the
  experts, see losses.tokens.add_experts.

  Args:
    variables: dict with "params".
    batch: see the module docstring; "_mask" is 0 for padding.
    rng: key for dropout; unused in evaluation.
    model: flax module such as models/decoder.py.
    train: whether dropout is on.
    label_smoothing: share of a target that is spread over the vocabulary.
    label_smoothing_over: "all" of it or the "others", see
      losses.cross_entropy.softmax_xent.
    z_loss: weight of the squared log of the softmax's denominator, see
      losses.cross_entropy.softmax_xent; 1e-4 is usual.
    load_balance: weight of Switch Transformers' load-balancing loss.
    router_z: weight of the loss that keeps the router's logits small.
    chunk: positions of each example whose logits exist at a time, see
      losses.linear_xent.

  Returns:
    ({"loss": pair in nats, "accuracy": pair}, {}); with experts also "nll", the
    loss without their terms, and their statistics.
  """
  losses = token_losses.model_losses(
    variables,
    *_examples(batch),
    rng,
    model=model,
    train=train,
    chunk=chunk,
    label_smoothing=label_smoothing,
    label_smoothing_over=label_smoothing_over,
    z_loss=z_loss,
  )
  pairs = token_losses.add_experts(
    losses.pairs,
    losses.expert_stats,
    load_balance=load_balance,
    router_z=router_z,
  )
  return pairs, {}


def _examples(batch: Mapping[str, Any]) -> tuple[Any, jax.Array, jax.Array]:
  """Returns (the model's arguments, targets, weights of the targets)."""
  return inputs(batch), batch["targets"], token_weights(batch)


def predict_fns(model: Any) -> dict[str, Callable[..., Any]]:
  """Returns functions for evaluators: perplexity, logits, score, generate."""
  fns = (perplexity, logits, score, generate)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def logits(
  variables: Any, batch: Mapping[str, Any], *, model: Any
) -> jax.Array:
  """Returns float32 [B, L, V], the logits of each position's target."""
  return model.apply(variables, **inputs(batch), train=False)[0]


def perplexity(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  chunk: int | None = None,
) -> metrics.Metrics:
  """Computes the pairs of the targets.

  Args:
    variables: as in loss_fn.
    batch: as in loss_fn.
    model: as in loss_fn.
    chunk: as in loss_fn.

  Returns:
    {"loss": (nats, tokens), "accuracy": pair}, and for a batch with "num_bytes"
    also {"bytes": (sum, 1)}.
  """
  losses = token_losses.model_losses(
    variables, *_examples(batch), model=model, chunk=chunk
  )
  return token_losses.add_bytes(losses.pairs, batch)


def score(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  chunk: int | None = None,
) -> dict[str, jax.Array]:
  """Scores the targets that "loss_mask" selects, such as an answer.

  Args:
    variables: as in loss_fn.
    batch: as in loss_fn.
    model: as in loss_fn.
    chunk: as in loss_fn.

  Returns:
    {"log_likelihood": float32 [B] in nats, summed over the selected targets,
    "tokens": float32 [B], their number, "greedy": bool [B], whether greedy
    decoding predicts all of them}.
  """
  losses = token_losses.model_losses(
    variables, *_examples(batch), model=model, chunk=chunk
  )
  selected_BL = token_weights(batch) != 0
  loss_BL = jnp.where(selected_BL, losses.loss_BL, 0.0)
  return {
    "log_likelihood": -jnp.sum(loss_BL, axis=1),
    "tokens": jnp.sum(selected_BL.astype(jnp.float32), axis=1),
    "greedy": jnp.all((losses.correct_BL == 1) | ~selected_BL, axis=1),
  }


def generate(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  max_new: int = 64,
  eos_id: int | None = None,
  pad_id: int = 0,
  num_beams: int = 1,
  length_penalty: float = 0.0,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
) -> jax.Array:
  """Continues prompts, with a cache of keys and values.

  Args:
    variables: as in loss_fn.
    batch: "tokens" [B, L], prompts padded at the end with `pad_id`, and
      optionally "_mask", 0 for examples to skip.
    model: as in loss_fn.
    max_new: largest number of new tokens.
    eos_id: token that ends a text; None if texts have no end.
    pad_id: padding of the prompts, and after the end of a text.
    num_beams: hypotheses of a beam search, see decoding.beam_search; 1 samples.
    length_penalty: see decoding.beam_search.
    temperature: see decoding.sample; 0 is greedy.
    top_k: see decoding.sample.
    top_p: see decoding.sample.
    seed: seed of the samples; a sample depends on it and the prompt.

  Returns:
    int32 [B, max_new].

  Raises:
    ConfigError: options that exclude each other, or texts that are too long for
      the model.
  """
  decoding.check_beams(num_beams, temperature, "generate")
  prompt_BL = batch["tokens"]
  B, L = prompt_BL.shape
  real_BL = (prompt_BL != pad_id) & (
    metrics.example_weights(batch, prompt_BL) != 0
  )[:, None]
  # Up to the last token that is not padding: prompts may contain the pad id.
  length_B = jnp.max(jnp.where(real_BL, jnp.arange(L) + 1, 0), axis=1)
  shortest = jnp.min(jnp.where(length_B == 0, L, length_B))
  _, out = model.apply(
    variables, prompt_BL, cache=model.init_cache(B, L + max_new), head=False
  )
  step = functools.partial(step_fn, variables, model)
  if num_beams > 1:
    return decoding.beam_search(
      step,
      out["cache"],
      prompt_BL,
      length_B,
      max_new=max_new,
      eos_id=eos_id,
      pad_id=pad_id,
      num_beams=num_beams,
      length_penalty=length_penalty,
      start=shortest - 1,
    )[0]
  tokens_BL = decoding.sample(
    step,
    out["cache"],
    prompt_BL,
    length_B,
    max_len=L + max_new,
    eos_id=eos_id,
    pad_id=pad_id,
    rng=jax.random.key(seed) if temperature else None,
    ids_B=_prompt_hashes(jnp.where(real_BL, prompt_BL, 0)),
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    start=shortest - 1,
  )
  # The max_new tokens after each example's own prompt.
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
  """Decodes one token: returns (logits [B, V] of the next, new cache)."""
  logits_B1V, out = model.apply(
    variables, token_B[:, None], cache=cache, start=position
  )
  return logits_B1V[:, 0], out["cache"]


def _prompt_hashes(prompt_BL: jax.Array) -> jax.Array:
  """Returns uint32 [B], hashes that make samples independent of batch order."""
  place_L = jnp.arange(prompt_BL.shape[1], dtype=jnp.uint32) * 2 + 1
  mixed_BL = (prompt_BL.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
  mixed_BL = (mixed_BL ^ (mixed_BL >> 15)) * place_L
  real_BL = prompt_BL != 0
  return jnp.sum(
    jnp.where(real_BL, mixed_BL ^ (mixed_BL >> 13), 0), axis=1, dtype=jnp.uint32
  )
