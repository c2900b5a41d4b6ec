"""Contrastive training: matches the images and texts of a batch.

Legend: B batch, H height, W width, L length, E embedding.

A batch has "image" [B, H, W, 3] floats and "labels" int [B, L], the token ids
of the image's text, or [B, H, W, 3] floats, a picture of it. With "shapes"
[B, 2], "image" has ready patches, see models.vit.

The loss compares each image with every text of the global batch, so it consists
of two functions (objective/gradients.py): embed_fn, which treats examples
independently and can run on microbatches, and embeddings_loss_fn.

The model returns (image embeddings, text embeddings, dict). Its parameter "t"
[1] is the logarithm of the logits' scale, and "b" [1], if any, their bias. A
contrastive captioner (CoCa, https://arxiv.org/abs/2205.01917) has "states" in
the dict, and the methods that tasks/captioning.py names; its texts are captions
that are padded with 0.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, Params, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.losses import forward, pairwise
from bigtrain.tasks import captioning

KINDS = ("sigmoid", "softmax")


def inputs(batch: Batch) -> Batch:
  return {**image_inputs(batch), "text": batch["labels"]}


def image_inputs(batch: Batch) -> Batch:
  optional = {"shapes": batch["shapes"]} if "shapes" in batch else {}
  return {"image": batch["image"], **optional}


vocab_sizes = captioning.vocab_sizes


def embed_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
) -> tuple[dict[str, jax.Array], Any]:
  """Returns {"image": [B, E], "text": [B, E]}, and new mutable collections.

  A model that writes captions adds "hits" [B], the number of right tokens, and
  "captions" [B], whose sum is the loss of all captions. All its entries are
  equal, because only the sum has a gradient.
  """
  (image_BE, text_BE, out), mutable = forward.apply(
    model, variables, rng, train, **inputs(batch)
  )
  result = {"image": image_BE, "text": text_BE}
  if "states" in out:
    labels = batch["labels"]
    B = len(labels)
    weight_BL = captioning.token_weights(batch, labels, 0)
    losses = captioning.token_losses(out["states"], labels, weight_BL)
    result["captions"] = jnp.broadcast_to(losses.total / B, (B,))
    result["hits"] = jnp.sum(losses.correct_BL * weight_BL, axis=1)
  return result, mutable


def embeddings_loss_fn(
  params: Params,
  embeddings: dict[str, jax.Array],
  batch: Batch,
  *,
  kind: Literal["sigmoid", "softmax"] = "sigmoid",
  chunk: int = 1024,
  caption_weight: float = 0.0,
) -> Metrics:
  """Computes the loss of the whole global batch from its embeddings.

  Args:
    kind: "sigmoid" (SigLIP): for each image, the binary cross-entropy summed
      over all texts. "softmax" (CLIP): the mean of the cross-entropies of an
      image among the texts and of its text among the images.
    chunk: pairs of each image at a time, see losses/pairwise.py.
    caption_weight: weight of the mean cross-entropy of captions' tokens, which
      is added. CoCa has 2, with "softmax".

  Returns:
    Metrics "loss"; "accuracy", the share of images that no other text scores
    higher with; the logits' "temperature" and, if sigmoid, "bias"; of captions
    "token_accuracy" and both terms, "contrastive_loss" and "caption_loss".
  """
  check_choice("config.loss.kind", kind, KINDS)
  image_BE, text_BE = embeddings["image"], embeddings["text"]
  weight_B = metrics.example_weights(batch, image_BE)
  scale = jnp.exp(params["t"][0])
  scalars = {"temperature": scale}
  if kind == "sigmoid":
    if "b" not in params:
      raise ConfigError(
        "config.model.bias_init: the sigmoid loss needs a bias, such as -10."
      )
    scalars["bias"] = params["b"][0]
    loss_B, correct_B = pairwise.sigmoid(
      image_BE, text_BE, scale, scalars["bias"], weight_B=weight_B, chunk=chunk
    )
  else:
    loss_B, correct_B = pairwise.softmax(
      image_BE, text_BE, scale, weight_B=weight_B, chunk=chunk
    )
  per_example = {"loss": loss_B, "accuracy": correct_B}
  for name, value in scalars.items():
    fixed = jax.lax.stop_gradient(value)
    per_example[name] = jnp.broadcast_to(fixed, loss_B.shape)
  result = {
    name: metrics.pair(x_B, weight_B) for name, x_B in per_example.items()
  }

  check_number("config.loss.caption_weight", caption_weight, least=0)
  if "captions" in embeddings:
    total, number = result["loss"]
    result["contrastive_loss"] = total, number
    tokens = jnp.sum(captioning.token_weights(batch, batch["labels"], 0))
    captions = jnp.sum(embeddings["captions"])
    mean = captions / jnp.maximum(tokens, 1.0)
    result["loss"] = total + caption_weight * number * mean, number
    result["caption_loss"] = captions, tokens
    result["token_accuracy"] = jnp.sum(embeddings["hits"]), tokens
  elif caption_weight:
    raise ConfigError(
      f"config.loss.caption_weight={caption_weight}: expected a model that "
      "writes captions, such as config.model_name='coca'."
    )
  return result


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)


def predict_fns(model: Any) -> dict[str, PredictFn]:
  """Functions for evaluators; captioners also have those of captioning.py.

  "embed" returns {"image": [B, E], "text": [B, E]}, or only one if the batch
  lacks a feature; "labels" [B, n, L] give "text" [B, n, E]. "image" and "text"
  return one embedding alone, "pre_logits" the image tower's features.
  """

  def apply(variables: Variables, **features: Any) -> Any:
    return model.apply(variables, **features, train=False)

  def image(variables: Variables, batch: Batch) -> jax.Array:
    return apply(variables, **image_inputs(batch))[0]

  def text(variables: Variables, batch: Batch) -> jax.Array:
    labels = batch["labels"]
    # Texts rendered as pictures have three axes per example.
    axes = 3 if jnp.issubdtype(labels.dtype, jnp.floating) else 1
    z = apply(variables, text=labels.reshape(-1, *labels.shape[-axes:]))[1]
    return z.reshape(*labels.shape[:-axes], z.shape[-1])

  def embed(variables: Variables, batch: Batch) -> dict[str, jax.Array]:
    result = {}
    if "image" in batch:
      result["image"] = image(variables, batch)
    if "labels" in batch:
      result["text"] = text(variables, batch)
    return result

  fns: dict[str, PredictFn] = {}
  if hasattr(model, "decode"):
    fns |= captioning.predict_fns(model)
  return fns | {
    "embed": embed,
    "image": image,
    "text": text,
    "loss": forward.metrics_fn(loss_fn, model=model),
    "pre_logits": forward.layers_fn(model, image_inputs, "img/pre_logits"),
  }
