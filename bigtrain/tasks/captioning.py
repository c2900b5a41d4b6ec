"""Image captioning: in order (Cap), in parallel, or a mix of both (CapPa).

Legend: B batch, L length, D width, V vocabulary, C classes, K classes in a
chunk of them.

A batch has "image" [B, H, W, channels], "labels" int [B, L], a tokenized
caption padded with `pad_id`, and perhaps "label_masks" [B, L], weights of the
tokens. The model is models/cappa.py, or has its methods `states`, `encode`,
`decode`, `begin` and `step`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import decoding, metrics
from bigtrain.losses import linear_xent
from bigtrain.settings import ConfigError, did_you_mean

_NORMALIZE = ("sentence", "tokens")
_METHODS = ("greedy", "beam", "sample")


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The model's arguments."""
  return {
    "image": _feature(batch, "image"),
    "text": _feature(batch, "labels"),
  }


def _feature(batch: Mapping[str, Any], name: str) -> jax.Array:
  if name not in batch:
    raise ConfigError(
      f"the preprocessing (pp) leaves no {name!r}, which the task captioning "
      f"needs.{did_you_mean(name, batch)}"
    )
  return batch[name]


def parallel_examples(
  keys_B: jax.Array, length: int, prob: float, ratio: float
) -> tuple[jax.Array, jax.Array | None]:
  """Draws what is predicted in parallel (arXiv 2306.07915, section 3).

  Args:
    keys_B: a key for each example, which alone decides about it.
    length: L.
    prob: share of the examples.
    ratio: share of the positions of such an example that are masked; rounded
      down to whole positions.

  Returns:
    (bool [B]: whether the example is predicted in parallel, bool [B, L]: which
    of its positions are masked; None for all).
  """
  num_masked = int(ratio * length)
  if not 0 <= prob <= 1:
    raise ConfigError(
      f"config.loss.masked_pred_prob: expected a share in [0, 1], got {prob!r}."
    )
  if not 0 < num_masked <= length:
    raise ConfigError(
      f"config.loss.masking_ratio={ratio!r} masks {num_masked} of {length} "
      "positions; expected at least one, and at most all."
    )

  def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    which, where = jax.random.split(key)
    rank_L = jax.random.permutation(where, length)
    return jax.random.uniform(which) < prob, rank_L < num_masked

  parallel_B, masked_BL = jax.vmap(draw)(keys_B)
  return parallel_B, None if num_masked == length else masked_BL


def token_weights(
  batch: Mapping[str, Any], labels: jax.Array, pad_id: int
) -> jax.Array:
  """float32 [B, L]: 0 for padding, else 1 times "label_masks"."""
  weight_BL = (labels != pad_id).astype(jnp.float32)
  if "label_masks" in batch:
    weight_BL *= batch["label_masks"].astype(jnp.float32)
  return weight_BL * metrics.example_weights(batch, labels)[:, None]


def loss_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  masked_pred_prob: float = 0.0,
  masking_ratio: float = 1.0,
  normalize: str = "sentence",
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  pad_id: int = 0,
  chunk: int | None = None,
) -> tuple[metrics.Pairs, Any]:
  """Cross-entropy and accuracy of the captions' tokens.

  Args:
    variables: "params" and, where the model has them, mutable collections.
    batch: see the head of this file; "_mask" marks padding with 0, "_keys"
      are keys of the examples, drawn from `rng` unless there.
    rng: key for dropout; unused when not training.
    model: see the head of this file.
    train: whether dropout and parallel prediction are at work.
    masked_pred_prob: share of the examples that are predicted in parallel.
    masking_ratio: share of the positions that are masked in these.
    normalize: "sentence": the loss is the mean over captions of the mean over
      the caption's tokens, "tokens": the mean over all tokens.
    label_smoothing: share of a token spread over the whole vocabulary.
    z_loss: see losses.softmax_xent.
    pad_id: the token that fills captions up, which has no loss.
    chunk: positions of each caption for which logits exist at a time; see
      losses.linear_softmax_xent.

  Returns:
    ({"loss": pair in nats, "token_accuracy": pair}, new mutable collections).
  """
  if normalize not in _NORMALIZE:
    hint = did_you_mean(normalize, _NORMALIZE)
    raise ConfigError(f"config.loss.normalize: unknown {normalize!r}.{hint}")
  image, labels = inputs(batch).values()
  mutable = [name for name in variables if name != "params"]
  drawn: dict[str, Any] = {}
  if train and masked_pred_prob:
    keys_B = batch.get("_keys", None)
    if keys_B is None:
      keys_B = jax.random.split(rng, len(labels))
    drawn["parallel_B"], drawn["masked_BL"] = parallel_examples(
      keys_B, labels.shape[1], masked_pred_prob, masking_ratio
    )
  states, new_mutable = model.apply(
    variables,
    image,
    labels,
    **drawn,
    train=train,
    rngs={"dropout": rng} if train else None,
    mutable=mutable if train else [],
    method="states",
  )
  weight_BL = share_BL = token_weights(batch, labels, pad_id)
  number = jnp.sum(weight_BL)
  if normalize == "sentence":
    total_B = jnp.sum(weight_BL, axis=1)
    share_BL = weight_BL / jnp.where(total_B == 0, 1.0, total_B)[:, None]
    number = jnp.sum((total_B != 0).astype(jnp.float32))
  found = linear_xent.linear_softmax_xent(
    states.hidden_BLD,
    states.kernel_DV,
    labels,
    share_BL,
    chunk=chunk,
    bias_V=states.bias_V,
    label_smoothing=label_smoothing,
    z_loss=z_loss,
  )
  pairs = {
    "loss": (found.total, number),
    "token_accuracy": metrics.pair(found.correct_BL, weight_BL),
  }
  return pairs, new_mutable if train else {k: variables[k] for k in mutable}


def vocab_sizes(model: Any) -> dict[str, int]:
  """How many ids the model has for the features of a batch."""
  size = getattr(model, "vocab_size", None)
  return {} if size is None else {"labels": size}


def predict_fns(model: Any) -> dict[str, Callable[..., Any]]:
  """Functions for evaluators: perplexity, score, enc_rep and caption."""
  fns = (perplexity, score, enc_rep, caption)
  return {fn.__name__: functools.partial(fn, model=model) for fn in fns}


def perplexity(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  pad_id: int = 0,
  chunk: int | None = None,
) -> metrics.Pairs:
  """The pairs of the captions' tokens, each predicted from those before it."""
  pairs, _ = loss_fn(
    variables,
    batch,
    None,
    model=model,
    train=False,
    normalize="tokens",
    pad_id=pad_id,
    chunk=chunk,
  )
  return pairs


def enc_rep(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  layer: str = "pre_logits",
) -> jax.Array:
  """The encoder's features of the images.

  Args:
    variables: as in loss_fn.
    batch: as in loss_fn; without "labels".
    model: as in loss_fn.
    layer: "pre_logits" [B, E], pooled, or "encoded" [B, P, E], for each patch.
  """
  out = model.apply(variables, _feature(batch, "image"), method="encode")
  if layer not in out:
    hint = did_you_mean(layer, out)
    raise ConfigError(f"enc_rep: the encoder has no layer {layer!r}.{hint}")
  return out[layer]


def score(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  pad_id: int = 0,
  class_chunk: int = 8,
  chunk: int | None = None,
) -> jax.Array:
  """Log-likelihood of every class's text for every image.

  The image is encoded once. A few classes at a time are read and their logits
  exist for a few positions at a time, so memory does not grow with C.

  Args:
    variables: as in loss_fn.
    batch: "image", and "class_tokens" int [C, L], the tokenized names.
    model: as in loss_fn.
    pad_id: the token that fills names up, which does not count.
    class_chunk: K, classes at a time.
    chunk: positions at a time; see losses.linear_softmax_xent.

  Returns:
    float32 [B, C], in nats, summed over the tokens of a class.
  """
  image, tokens_CL = _feature(batch, "image"), batch["class_tokens"]
  encoded = model.apply(variables, image, method="encode")["encoded"]
  B, (C, L) = len(image), tokens_CL.shape
  K = min(class_chunk, C)
  tokens_CL = jnp.pad(tokens_CL, ((0, -C % K), (0, 0)), constant_values=pad_id)

  def score_chunk(tokens_KL: jax.Array) -> jax.Array:
    text = jnp.broadcast_to(tokens_KL, (B, K, L)).reshape(B * K, L)
    states = model.apply(variables, encoded, text, method="decode")
    found = linear_xent.linear_softmax_xent(
      states.hidden_BLD,
      states.kernel_DV,
      text,
      chunk=chunk,
      bias_V=states.bias_V,
    )
    counted = jnp.where(text == pad_id, 0.0, found.loss_BL)
    return -jnp.sum(counted, axis=1).reshape(B, K)

  scores = jax.lax.map(score_chunk, tokens_CL.reshape(-1, K, L))
  return jnp.moveaxis(scores, 0, 1).reshape(B, -1)[:, :C]


def caption(
  variables: Any,
  batch: Mapping[str, Any],
  *,
  model: Any,
  eos_id: int | None = None,
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
  """Writes a caption for each image, with a cache of keys and values.

  Args:
    variables: as in loss_fn.
    batch: "image", and perhaps "_mask": nothing is written for padding.
    model: as in loss_fn.
    eos_id: the token that ends a caption.
    pad_id: what follows it; 0 is also what the model reads first.
    max_len: longest caption, in tokens; the model's unless given.
    method: "greedy", "beam" or "sample".
    num_beams: of "beam", as is `length_penalty`: see decoding.beam_search.
    length_penalty: see there.
    temperature: of "sample", as are the next three: see decoding.sample.
    top_k: see there.
    top_p: see there.
    seed: what an image's sample depends on, besides the image.

  Returns:
    int32 [B, max_len].
  """
  if method not in _METHODS:
    hint = did_you_mean(method, _METHODS)
    raise ConfigError(f"caption: unknown method {method!r}.{hint}")
  max_len = max_len or model.max_len
  if max_len > model.max_len:
    raise ConfigError(
      f"caption: max_len={max_len}, but config.model.max_len={model.max_len}."
    )
  image = _feature(batch, "image")
  encoded = model.apply(variables, image, method="encode")["encoded"]
  source, cache = model.apply(variables, encoded, max_len, method="begin")

  def step(cache: Any, token_B: jax.Array, position: jax.Array) -> Any:
    return model.apply(
      variables, source, cache, token_B, position, method="step"
    )

  first_B = jnp.zeros(len(image), jnp.int32)
  if method == "beam":
    if eos_id is None:
      raise ConfigError("caption: method='beam' needs an eos_id.")
    tokens_BL, _ = decoding.beam_search(
      step,
      cache,
      first_B,
      max_len=max_len + 1,
      eos_id=eos_id,
      pad_id=pad_id,
      num_beams=num_beams,
      length_penalty=length_penalty,
    )
  else:
    sampled = method == "sample"
    tokens_BL = decoding.sample(
      step,
      cache,
      first_B[:, None],
      metrics.example_weights(batch, image).astype(jnp.int32),
      max_len=max_len + 1,
      eos_id=eos_id,
      pad_id=pad_id,
      rng=jax.random.key(seed) if sampled else None,
      ids_B=_image_numbers(image) if sampled else None,
      temperature=temperature if sampled else 0.0,
      top_k=top_k,
      top_p=top_p,
    )
  return tokens_BL[:, 1:]


def _image_numbers(image: jax.Array) -> jax.Array:
  """uint32 [B] hashes: an image's place in a batch does not change a sample."""
  bits = jax.lax.bitcast_convert_type(image.astype(jnp.float32), jnp.uint32)
  bits = bits.reshape(len(image), -1)
  place = jnp.arange(bits.shape[1], dtype=jnp.uint32) * 2 + 1
  mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B) * place
  return jnp.sum(mixed ^ (mixed >> 13), axis=1, dtype=jnp.uint32)
