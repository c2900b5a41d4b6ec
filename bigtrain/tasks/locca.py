"""LocCa: learns captions, boxes from texts, and texts from boxes.

See https://arxiv.org/abs/2403.19596.

Legend: B batch, N texts of an image, L length, V vocabulary.

A batch has "image" [B, H, W, channels] and, from the op `locca`, sequences
"locca" int [B, N, L] and "locca_masks" [B, N, L], 1 for tokens to predict. The
first sequence may be the caption, which is predicted in parallel for some of
the images. With "shapes" [B, 2], "image" has ready-made patches, see
models.vit. The model has the methods `states`, `encode`, `begin` and `step` of
models/siglip2.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.losses import forward
from bigtrain.tasks import captioning
from bigtrain.text import decoding


def inputs(batch: Batch) -> Batch:
  return picture_features.needed(batch)


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  parallel_prob: float = 0.5,
  normalize: str = "sentence",
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  chunk: int | None = None,
) -> tuple[Metrics, Variables]:
  """Computes the cross-entropy of the sequences' tokens.

  Args:
    parallel_prob: share of the captions, the first sequences, that are
      predicted in parallel, from their prefix alone (arXiv 2306.07915).
    normalize: "sentence": the loss is the mean over sequences of the mean over
      each one's tokens; "tokens": the mean over all tokens.
    label_smoothing: share of a token that is spread over the vocabulary.
    z_loss: see losses.cross_entropy.softmax_xent.
    chunk: positions of each sequence at a time, see losses.linear_xent.

  Returns:
    Metrics "loss" in nats and "token_accuracy", and by the number of the
    sequence "loss_0" and "token_accuracy_0", and so on; new mutable
    collections.
  """
  check_choice("config.loss.normalize", normalize, ("sentence", "tokens"))
  labels_BNL = batch["locca"]
  B, N, L = labels_BNL.shape
  labels = labels_BNL.reshape(B * N, L)
  weight_B = metrics.example_weights(batch, labels_BNL)
  masks_BNL = batch["locca_masks"].astype(jnp.float32)
  weight = (masks_BNL * weight_B[:, None, None]).reshape(B * N, L)

  parallel: dict[str, Any] = {}
  check_number("config.loss.parallel_prob", parallel_prob, least=0, most=1)
  if train and parallel_prob:
    drawn_B = _drawn(batch, rng, B) < parallel_prob
    is_caption_N = jnp.arange(N) == 0
    parallel["parallel_B"] = (drawn_B[:, None] & is_caption_N).reshape(-1)
    # The prefix is never masked. It comes before all tokens to predict.
    predicted = batch["locca_masks"].reshape(B * N, L) > 0
    parallel["masked_BL"] = jnp.cumsum(predicted, axis=1) > 0
  states, mutable = forward.apply(
    model,
    variables,
    rng,
    train,
    texts_BNL=labels_BNL,
    **picture_features.needed(batch),
    **parallel,
    method="states",
  )

  total = jnp.sum(weight, axis=1)
  share = weight
  if normalize == "sentence":
    # A token's share of its sequence; each sequence has a weight of 1.
    share = weight / jnp.where(total == 0, 1.0, total)[:, None]
  losses = captioning.token_losses(
    states,
    labels,
    share,
    chunk=chunk,
    only_weighted=True,  # Most sequences are short.
    label_smoothing=label_smoothing,
    z_loss=z_loss,
  )
  result = {
    "loss": (losses.total, jnp.sum(share)),
    "token_accuracy": metrics.pair(losses.correct_BL, weight),
  }
  of_sequences = _by_sequence(losses, share, weight, N)
  return {**result, **of_sequences}, mutable


def _by_sequence(
  losses: Any, share: jax.Array, weight: jax.Array, N: int
) -> Metrics:
  """Loss and accuracy by the number of the sequence: "loss_0" and so on."""

  def sums_N(x: jax.Array) -> jax.Array:
    return jnp.sum(x.reshape(-1, N, x.shape[-1]), axis=(0, 2))

  loss_N, share_N = sums_N(losses.loss_BL * share), sums_N(share)
  correct_N, weight_N = sums_N(losses.correct_BL * weight), sums_N(weight)
  result: Metrics = {}
  for n in range(N):
    result[f"loss_{n}"] = jax.lax.stop_gradient(loss_N[n]), share_N[n]
    result[f"token_accuracy_{n}"] = correct_N[n], weight_N[n]
  return result


def _drawn(batch: Batch, rng: jax.Array | None, B: int) -> jax.Array:
  keys_B = batch.get("_keys")
  if keys_B is None:
    assert rng is not None
    keys_B = jax.random.split(rng, B)
  return jax.vmap(jax.random.uniform)(keys_B)


def vocab_sizes(model: Any) -> dict[str, int]:
  return {"locca": model.output_size, "prompt": model.output_size}


def predict_fns(model: Any) -> dict[str, PredictFn]:
  return {
    "enc_rep": forward.layers_fn(model, captioning.encode_arguments),
    "locca_loss": forward.metrics_fn(loss_fn, model=model),
    "answer": functools.partial(answer, model=model),
    "box": functools.partial(box, model=model),
  }


def answer(
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  eos_id: decoding.EosId = None,
  pad_id: int = 0,
  max_len: int | None = None,
) -> jax.Array:
  """Continues a "prompt" greedily: int32 [B, max_len].

  Args:
    batch: "image", and "prompt" int [B, L] of the op `locca_question`.
    max_len: longest answer; by default limited only by the model's max_len.
  """
  prompt_BL = batch["prompt"]
  if prompt_BL.shape[1] > model.max_len:
    raise ConfigError(
      f"config.model.max_len: {model.max_len} is less than the "
      f"{prompt_BL.shape[1]} tokens of a prompt."
    )
  # The model always reads 0 first, and then up to max_len - 1 tokens.
  length_B = jnp.sum(prompt_BL != pad_id, axis=1) + 1
  weight_B = metrics.example_weights(batch, prompt_BL)
  length_B = jnp.where(weight_B != 0, length_B, 0)
  length_B = length_B.astype(jnp.int32)
  prompt_BL = jnp.pad(prompt_BL, ((0, 0), (1, 0)))
  encoded = model.apply(variables, **captioning.encode_arguments(batch))
  source, cache = model.apply(variables, encoded, model.max_len, method="begin")

  def step(cache: Any, token_B: jax.Array, position: jax.Array) -> Any:
    return model.apply(
      variables, source, cache, token_B, position, method="step"
    )

  tokens_BL, _ = decoding.sample(
    step,
    cache,
    prompt_BL,
    length_B,
    max_len=model.max_len + 1,
    eos_id=eos_id,
    pad_id=pad_id,
  )
  max_len = max_len or model.max_len
  after = ((0, 0), (0, max_len))
  tokens_BL = jnp.pad(tokens_BL, after, constant_values=pad_id)
  return decoding.new_tokens(tokens_BL, length_B, max_len)


def box(variables: Variables, batch: Batch, *, model: Any) -> jax.Array:
  """The box of a text: [top, left, bottom, right] in shares, float32 [B, 4].

  Args:
    batch: as in `answer`, with prompts of locca_question(task="aref"). A token
      that is not a location counts as the nearest location.
  """
  tokens_B4 = answer(variables, batch, model=model, max_len=4)
  bins_B4 = tokens_B4 - model.first_location
  last = model.num_locations - 1
  return jnp.clip(bins_B4, 0, last).astype(jnp.float32) / last
