"""Sequence to sequence: targets predicted from inputs and the targets before.

Axes: B batch, S length of inputs, L length of targets, V vocabulary.

A batch has "inputs" int [B, S] and "targets" int [B, L], both padded with 0;
where documents are packed also "inputs_segments" and "targets_segments", of
these shapes, the document of each token, 0 for padding; and perhaps
"num_bytes" [B], what the targets stand for. "inputs_positions" and
"targets_positions" are not needed: models such as models/t5.py count distances,
which packing does not change.
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
  segments = ("inputs_segments", "targets_segments")
  return {
    "inputs": _feature(batch, "inputs"),
    "targets": _feature(batch, "targets"),
    **{name: batch[name] for name in segments if name in batch},
  }


def _feature(batch: Mapping[str, Any], name: str) -> jax.Array:
  if name not in batch:
    raise ConfigError(
      f"the data and preprocessing leave no {name!r}, which the task seq2seq "
      f"needs.{did_you_mean(name, batch)}"
    )
  return batch[name]


def vocab_sizes(model: Any) -> dict[str, int]:
  """How many ids the model has for the features of a batch."""
  return {"inputs": model.vocab_size, "targets": model.vocab_size}


def token_weights(batch: Mapping[str, Any]) -> jax.Array:
  """float32 [B, L]: 1 where there is a target to predict, else 0."""
  real_BL = batch.get("targets_segments", _feature(batch, "targets")) != 0
  weight_B = metrics.example_weights(batch, real_BL)
  return real_BL.astype(jnp.float32) * weight_B[:, None]


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
  """Cross-entropy and accuracy of the targets, by token.

  With experts the loss has two more terms, and there are metrics of what the
  layers report on average: see token_losses.with_experts.

  Args:
    variables: "params".
    batch: see the head of this file; "_mask" marks padding with 0.
    rng: key for dropout; unused when not training.
    model: such as models/t5.py.
    train: whether dropout is at work.
    label_smoothing: share of a target spread over the whole vocabulary.
    z_loss: weight of the squared log of the softmax's denominator, see
      losses.softmax_xent; T5 has 1e-4.
    load_balance: weight of the loss that keeps experts evenly loaded.
    router_z: weight of the loss that keeps the routers' logits small.
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
  """Functions for evaluators: perplexity, logits and generate."""
  fns = (perplexity, logits, generate)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def logits(
  variables: Any, batch: Mapping[str, Any], *, model: Any
) -> jax.Array:
  """float32 [B, L, V], each target given those before it."""
  return model.apply(variables, **inputs(batch), train=False)[0]


def perplexity(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  chunk: int | None = None,
) -> metrics.Pairs:
  """Pairs of the targets, each given those before it.

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


def generate(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  max_len: int = 64,
  eos_id: int = 1,
  num_beams: int = 1,
  length_penalty: float = 0.0,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
) -> jax.Array:
  """Writes targets for the inputs, with a cache of keys and values.

  Args:
    variables: as in loss_fn.
    batch: "inputs" [B, S], not packed, and perhaps "_mask": nothing is written
      for padding.
    model: with methods `begin` and `step` as models/t5.py has them.
    max_len: tokens to write at most, the end included.
    eos_id: the token that ends targets.
    num_beams: more than 1 searches for the likeliest targets.
    length_penalty: of beams, see decoding.beam_search.
    temperature: see decoding.sample, as for the next two; 0 is greedy.
    top_k: see there.
    top_p: see there.
    seed: what a sample depends on, besides the inputs.

  Returns:
    int32 [B, max_len], padded with 0.
  """
  inputs_BS = _feature(batch, "inputs")
  if "inputs_segments" in batch:
    raise ConfigError(
      "generate: the inputs are packed; give each a row of its own."
    )
  if num_beams > 1 and temperature:
    raise ConfigError(
      f"generate: num_beams={num_beams} and temperature={temperature} do not "
      "go together."
    )
  # The 0 that targets begin with has position 0.
  cache = model.apply(variables, inputs_BS, max_len + 1, method="begin")

  def step(cache: Any, token_B: jax.Array, position: jax.Array) -> Any:
    return model.apply(variables, cache, token_B, position, method="step")

  first_B = jnp.zeros(len(inputs_BS), jnp.int32)
  real_B = metrics.example_weights(batch, inputs_BS) != 0
  if num_beams > 1:
    tokens_BL, _ = decoding.beam_search(
      step,
      cache,
      first_B,
      max_len=max_len + 1,
      eos_id=eos_id,
      num_beams=num_beams,
      length_penalty=length_penalty,
    )
  else:
    tokens_BL = decoding.sample(
      step,
      cache,
      first_B[:, None],
      real_B.astype(jnp.int32),
      max_len=max_len + 1,
      eos_id=eos_id,
      rng=jax.random.key(seed) if temperature else None,
      ids_B=_numbers(inputs_BS),
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
    )
  return jnp.where(real_B[:, None], tokens_BL[:, 1:], 0)


def _numbers(inputs_BS: jax.Array) -> jax.Array:
  """uint32 [B] hashes: neither place in a batch nor padding change a sample."""
  place_S = jnp.arange(inputs_BS.shape[1], dtype=jnp.uint32) * 2 + 1
  mixed_BS = inputs_BS.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
  mixed_BS = (mixed_BS ^ (mixed_BS >> 15)) * place_S
  return jnp.sum(mixed_BS ^ (mixed_BS >> 13), axis=1, dtype=jnp.uint32)
