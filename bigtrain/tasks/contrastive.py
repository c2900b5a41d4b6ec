"""Contrastive training: matches the images and texts of a batch.

Legend: B batch, H height, W width, L length, E embedding.

A batch has "image" [B, H, W, 3] floats and "labels" int [B, L], the token ids
of the image's text, or [B, H, W, 3] floats, a picture of it. With "shapes"
[B, 2], "image" has ready patches, see models.vit. The loss compares each image
with every text of the global batch, so microbatches (step/gradients.py) need
the halves of loss_fn: embed_fn, which treats examples independently, and
embeddings_loss_fn.

The model returns (image embeddings, text embeddings, dict). Its parameter "t"
[1] is the logarithm of the logits' scale, and "b" [1], if any, their bias.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from bigtrain import metrics, trees
from bigtrain.losses import forward, pairwise
from bigtrain.settings import ConfigError, check_choice
from bigtrain.types import Batch, Metrics, Params, PredictFn, Variables

KINDS = ("sigmoid", "softmax")


def inputs(batch: Batch) -> Batch:
  return {**image_inputs(batch), "text": batch["labels"]}


def image_inputs(batch: Batch) -> Batch:
  optional = {"shapes": batch["shapes"]} if "shapes" in batch else {}
  return {"image": batch["image"], **optional}


def vocab_sizes(model: Any) -> dict[str, int]:
  size = getattr(model, "vocab_size", None)
  return {} if size is None else {"labels": size}


def embed_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
) -> tuple[dict[str, jax.Array], Any]:
  """Returns {"image": [B, E], "text": [B, E]}, and new mutable collections."""
  (image_BE, text_BE, _), mutable = forward.apply(
    model, variables, rng, train, **inputs(batch)
  )
  return {"image": image_BE, "text": text_BE}, mutable


def embeddings_loss_fn(
  params: Params,
  embeddings: dict[str, jax.Array],
  batch: Batch,
  *,
  kind: Literal["sigmoid", "softmax"] = "sigmoid",
  chunk: int = 1024,
) -> Metrics:
  """Computes the loss of the whole global batch from its embeddings.

  Args:
    kind: "sigmoid" (SigLIP): for each image, the binary cross-entropy summed
      over all texts. "softmax" (CLIP): the mean of the cross-entropies of an
      image among the texts and of its text among the images.
    chunk: pairs of each image at a time, see losses/pairwise.py.

  Returns:
    Metrics "loss"; "accuracy", the share of images that no other text scores
    higher with; the logits' "temperature" and, if sigmoid, "bias".
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
  of_examples = {"loss": loss_B, "accuracy": correct_B}
  result = {n: metrics.pair(x_B, weight_B) for n, x_B in of_examples.items()}
  for name, value in scalars.items():
    value_B = jnp.broadcast_to(jax.lax.stop_gradient(value), loss_B.shape)
    result[name] = metrics.pair(value_B, weight_B)
  return result


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  kind: Literal["sigmoid", "softmax"] = "sigmoid",
  chunk: int = 1024,
) -> tuple[Metrics, Variables]:
  z, mutable = embed_fn(variables, batch, rng, model=model, train=train)
  params = trees.merge(variables["params"], variables.get("base", {}))
  return embeddings_loss_fn(params, z, batch, kind=kind, chunk=chunk), mutable


def predict_fns(model: Any) -> dict[str, PredictFn]:
  """Returns functions for evaluators, by name.

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
    # Of a picture of text, three axes belong to an example.
    axes = 3 if jnp.issubdtype(labels.dtype, jnp.floating) else 1
    z = apply(variables, text=labels.reshape(-1, *labels.shape[-axes:]))[1]
    return z.reshape(*labels.shape[:-axes], z.shape[-1])

  def embed(variables: Variables, batch: Batch) -> dict[str, jax.Array]:
    fns = (("image", "image", image), ("text", "labels", text))
    present = [(kind, fn) for kind, name, fn in fns if name in batch]
    return {kind: fn(variables, batch) for kind, fn in present}

  loss = forward.metrics_fn(loss_fn, model=model)
  pre_logits = forward.layers_fn(model, image_inputs, "img/pre_logits")
  fns: tuple[PredictFn, ...] = (embed, image, text, loss)
  return {fn.__name__: fn for fn in fns} | {"pre_logits": pre_logits}
