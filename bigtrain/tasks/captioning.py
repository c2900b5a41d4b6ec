"""Image captioning: left to right (Cap), in parallel, or both (CapPa).

Legend: B batch, L length, D width, V vocabulary, C classes, K classes of a
chunk, E width of the encoder, P patches.

A batch has "image" [B, H, W, channels], "labels" int [B, L], captions padded
with `pad_id`, and optionally "label_masks" [B, L], weights of the tokens. With
"shapes" [B, 2], "image" has ready-made patches, see models.vit. The model has
the methods `states`, `encode`, `decode`, `begin` and `step` of
models/cappa.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.losses import forward, linear_xent
from bigtrain.text import decoding


def inputs(batch: Batch) -> Batch:
  return {**picture_features.needed(batch), "text": batch["labels"]}


def parallel_examples(
  keys_B: jax.Array, length: int, prob: float, ratio: float
) -> tuple[jax.Array, jax.Array | None]:
  """Draws examples to predict in parallel (arXiv 2306.07915, section 3).

  Returns:
    (bool [B]: whether the example is predicted in parallel, bool [B, L]:
    whether a position is masked; None if all are).
  """
  num_masked = int(ratio * length)
  check_number("config.loss.masked_pred_prob", prob, least=0, most=1)
  if not 0 < num_masked <= length:
    raise ConfigError(
      f"config.loss.masking_ratio: expected a share that masks 1 to {length} "
      f"positions, got {ratio!r}, which masks {num_masked}."
    )

  def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    parallel_key, masked_key = jax.random.split(key)
    rank_L = jax.random.permutation(masked_key, length)
    return jax.random.uniform(parallel_key) < prob, rank_L < num_masked

  parallel_B, masked_BL = jax.vmap(draw)(keys_B)
  return parallel_B, None if num_masked == length else masked_BL


def token_weights(batch: Batch, labels: jax.Array, pad_id: int) -> jax.Array:
  """Weights of tokens [B, L]: 0 for padding, else "label_masks" or 1."""
  weight_BL = (labels != pad_id).astype(jnp.float32)
  if "label_masks" in batch:
    weight_BL *= batch["label_masks"].astype(jnp.float32)
  return weight_BL * metrics.example_weights(batch, labels)[:, None]


def token_losses(states: Any, *args: Any, **kwargs: Any) -> Any:
  """linear_softmax_xent from what the model's `states` returns."""
  return linear_xent.linear_softmax_xent(
    states.hidden_BLD, states.kernel_DV, *args, bias_V=states.bias_V, **kwargs
  )


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  masked_pred_prob: float = 0.0,
  masking_ratio: float = 1.0,
  normalize: str = "sentence",
  label_smoothing: float = 0.0,
  label_smoothing_over: str = "all",
  z_loss: float = 0.0,
  pad_id: int = 0,
  chunk: int | None = None,
) -> tuple[Metrics, Variables]:
  """Computes cross-entropy and accuracy of the captions' tokens.

  Args:
    masked_pred_prob: share of the examples to predict in parallel.
    masking_ratio: share of masked positions in these examples.
    normalize: "sentence": the loss is the mean over captions of the mean over
      each caption's tokens; "tokens": the mean over all tokens.
    label_smoothing: share of a token that is spread over the vocabulary.
    label_smoothing_over: "all" of it or the "others".
    z_loss: see losses.cross_entropy.softmax_xent.
    pad_id: padding of the captions, without loss.
    chunk: positions of each caption at a time, see losses.linear_xent.

  Returns:
    (metrics "loss" in nats and "token_accuracy", new mutable collections).
  """
  check_choice("config.loss.normalize", normalize, ("sentence", "tokens"))
  labels = batch["labels"]
  parallel: dict[str, Any] = {}
  if train and masked_pred_prob:
    keys_B = batch.get("_keys")
    if keys_B is None:
      assert rng is not None
      keys_B = jax.random.split(rng, len(labels))
    parallel["parallel_B"], parallel["masked_BL"] = parallel_examples(
      keys_B, labels.shape[1], masked_pred_prob, masking_ratio
    )
  states, mutable = forward.apply(
    model,
    variables,
    rng,
    train,
    **inputs(batch),
    **parallel,
    method="states",
  )
  weight_BL = token_weights(batch, labels, pad_id)
  if normalize == "sentence":
    # A token's share of its caption; each caption has a weight of 1.
    total_B = jnp.sum(weight_BL, axis=1)
    share_BL = weight_BL / jnp.where(total_B == 0, 1.0, total_B)[:, None]
    total_weight = jnp.sum((total_B != 0).astype(jnp.float32))
  else:
    share_BL = weight_BL
    total_weight = jnp.sum(weight_BL)
  losses = token_losses(
    states,
    labels,
    share_BL,
    chunk=chunk,
    label_smoothing=label_smoothing,
    label_smoothing_over=label_smoothing_over,
    z_loss=z_loss,
  )
  return {
    "loss": (losses.total, total_weight),
    "token_accuracy": metrics.pair(losses.correct_BL, weight_BL),
  }, mutable


def vocab_sizes(model: Any) -> dict[str, int]:
  size = getattr(model, "vocab_size", None)
  return {} if size is None else {"labels": size}


def encode_arguments(batch: Batch) -> dict[str, Any]:
  """Arguments of `model.apply` for the encoder alone."""
  return {**picture_features.needed(batch), "method": "encode"}


def predict_fns(model: Any) -> dict[str, PredictFn]:
  return {
    "enc_rep": forward.layers_fn(model, encode_arguments),
    "perplexity": functools.partial(perplexity, model=model),
    "score": functools.partial(score, model=model),
    "caption": functools.partial(caption, model=model),
  }


def perplexity(
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  pad_id: int = 0,
  chunk: int | None = None,
) -> Metrics:
  """Metrics of the captions' tokens, each predicted from those before it."""
  result, _ = loss_fn(
    variables,
    batch,
    None,
    model=model,
    train=False,
    normalize="tokens",
    pad_id=pad_id,
    chunk=chunk,
  )
  return result


def score(
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  pad_id: int = 0,
  class_chunk: int = 8,
  chunk: int | None = None,
) -> jax.Array:
  """Computes the log-likelihood of every class's text for every image.

  Args:
    batch: as in training, with "class_tokens" int [C, L], the tokenized names.
    pad_id: padding of the names, without likelihood.
    class_chunk: K, classes at a time.
    chunk: positions at a time, see losses.linear_xent.

  Returns:
    float32 [B, C], in nats, summed over the tokens of a class.
  """
  tokens_CL = batch["class_tokens"]
  encoded = model.apply(variables, **encode_arguments(batch))
  B = len(batch["image"])
  C, L = tokens_CL.shape
  K = min(class_chunk, C)
  tokens_CL = jnp.pad(tokens_CL, ((0, -C % K), (0, 0)), constant_values=pad_id)

  def score_chunk(tokens_KL: jax.Array) -> jax.Array:
    text = jnp.broadcast_to(tokens_KL, (B, K, L)).reshape(B * K, L)
    states = model.apply(variables, encoded, text, method="decode")
    losses = token_losses(states, text, chunk=chunk)
    loss_BL = jnp.where(text == pad_id, 0.0, losses.loss_BL)
    return -jnp.sum(loss_BL, axis=1).reshape(B, K)

  scores = jax.lax.map(score_chunk, tokens_CL.reshape(-1, K, L))
  return jnp.moveaxis(scores, 0, 1).reshape(B, -1)[:, :C]


def caption(
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  eos_id: decoding.EosId = None,
  pad_id: int = 0,
  max_len: int | None = None,
  method: str = "greedy",
  num_beams: int = 4,
  length_penalty: float = 0.0,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
) -> jax.Array:
  """Generates captions, int32 [B, max_len], for a batch's "image".

  Args:
    eos_id: token that ends a caption; None if captions have no end.
    pad_id: padding after the end. The first token that the model reads is
      always 0.
    max_len: longest caption in tokens; by default the model's.
    method: "greedy", "beam" or "sample".
    num_beams, length_penalty: for "beam", see decoding.beam_search.
    temperature, top_k, top_p: for "sample", see decoding.sample.
    seed: for "sample": a sample depends on it and on the image.
  """
  check_choice("caption.method", method, ("greedy", "beam", "sample"))
  max_len = max_len or model.max_len
  if max_len > model.max_len:
    raise ConfigError(
      f"caption: expected max_len of at most {model.max_len} "
      f"(config.model.max_len), got {max_len}."
    )
  image = batch["image"]
  encoded = model.apply(variables, **encode_arguments(batch))
  source, cache = model.apply(variables, encoded, max_len, method="begin")

  def step(cache: Any, token_B: jax.Array, position: jax.Array) -> Any:
    return model.apply(
      variables, source, cache, token_B, position, method="step"
    )

  prompt_B1 = jnp.zeros((len(image), 1), jnp.int32)
  length_B = (metrics.example_weights(batch, image) != 0).astype(jnp.int32)
  # Samples depend on the images, not on their order.
  bits = jax.lax.bitcast_convert_type(image.astype(jnp.float32), jnp.uint32)
  return decoding.generate(
    step,
    cache,
    prompt_B1,
    length_B,
    max_new=max_len,
    eos_id=eos_id,
    pad_id=pad_id,
    num_beams=num_beams if method == "beam" else None,
    length_penalty=length_penalty,
    temperature=temperature if method == "sample" else 0.0,
    seed=seed,
    ids_B=decoding.row_hashes(bits.reshape(len(image), -1), 0x85EBCA6B),
    top_k=top_k,
    top_p=top_p,
  )
