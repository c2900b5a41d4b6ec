"""Contrastive training: which images and texts of a batch belong together?

Legend: B batch, H height, W width, L length, E embedding.

A batch has "image" [B, H, W, 3] floats and "labels" int [B, L], the token ids
of the text that belongs to it.

The loss is of the whole batch: each image is held against every text. So this
task has, beside loss_fn, what train_step needs to cut the batch into
microbatches all the same: embed_fn, which is of each example alone, and
embeddings_loss_fn, which is of all embeddings. The model is one that returns
(image embeddings, text embeddings, dict) and keeps the logarithm of the logits'
scale in the parameter "t" [1] and their bias, if it has one, in "b" [1].
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.losses import pairs as pairwise_losses
from bigtrain.settings import ConfigError, did_you_mean

KINDS = ("sigmoid", "softmax")


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The model's arguments."""
  return {"image": _feature(batch, "image"), "text": _feature(batch, "labels")}


def _feature(batch: Mapping[str, Any], name: str) -> jax.Array:
  if name not in batch:
    raise ConfigError(
      f"the preprocessing (pp) leaves no {name!r}, which the task contrastive "
      f"needs.{did_you_mean(name, batch)}"
    )
  return batch[name]


def vocab_sizes(model: Any) -> dict[str, int]:
  """How many ids the model has for the tokens of a batch, if it says so."""
  size = getattr(model, "vocab_size", None)
  return {} if size is None else {"labels": size}


def embed_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
) -> tuple[dict[str, jax.Array], Any]:
  """Embeddings of a batch, or of a part of it: each example's on its own.

  Args:
    variables: "params" and, where the model has them, mutable collections.
    batch: see the head of this file.
    rng: key for dropout; unused when not training.
    model: flax module, see the head of this file.
    train: whether dropout and batch statistics are at work.

  Returns:
    ({"image": [B, E], "text": [B, E]}, new mutable collections).
  """
  mutable = [name for name in variables if name != "params"]
  (image_BE, text_BE, _), new_mutable = model.apply(
    variables,
    **inputs(batch),
    train=train,
    rngs={"dropout": rng} if train else None,
    mutable=mutable if train else [],
  )
  return (
    {"image": image_BE, "text": text_BE},
    new_mutable if train else {name: variables[name] for name in mutable},
  )


def embeddings_loss_fn(
  params: Mapping[str, Any],
  embeddings: Mapping[str, jax.Array],
  batch: Mapping[str, Any],
  *,
  kind: Literal["sigmoid", "softmax"] = "sigmoid",
  chunk: int = 1024,
) -> metrics.Pairs:
  """The loss of the whole global batch, from its embeddings.

  Args:
    params: only "t" and "b" are used.
    embeddings: as embed_fn returns them.
    batch: the whole; "_mask" marks padding with 0.
    kind: "sigmoid" (SigLIP), for each image the sum over all texts of a
      binary cross-entropy; or "softmax" (CLIP), the cross-entropy of an image
      among the texts and the reverse, averaged.
    chunk: pairs of each image at a time, see pairwise_losses.

  Returns:
    Pairs "loss"; "accuracy", how often no other text of the batch fits an
    image better; "temperature" and "bias", the logits' scale and bias.
  """
  if kind not in KINDS:
    hint = did_you_mean(kind, KINDS)
    raise ConfigError(f"config.loss.kind: no loss {kind!r}.{hint}")
  image_BE, text_BE = embeddings["image"], embeddings["text"]
  weight_B = metrics.example_weights(batch, image_BE)
  scale = jnp.exp(params["t"][0])
  found = {"temperature": scale}
  if kind == "sigmoid":
    if "b" not in params:
      raise ConfigError(
        "config.model.bias_init: the sigmoid loss needs a bias, such as -10."
      )
    found["bias"] = params["b"][0]
    loss_B, correct_B = pairwise_losses.sigmoid(
      image_BE, text_BE, scale, found["bias"], weight_B=weight_B, chunk=chunk
    )
  else:
    loss_B, correct_B = pairwise_losses.softmax(
      image_BE, text_BE, scale, weight_B=weight_B, chunk=chunk
    )
  pairs = {
    "loss": metrics.pair(loss_B, weight_B),
    "accuracy": metrics.pair(correct_B, weight_B),
  }
  for name, value in found.items():
    value_B = jnp.broadcast_to(jax.lax.stop_gradient(value), loss_B.shape)
    pairs[name] = metrics.pair(value_B, weight_B)
  return pairs


def loss_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  kind: Literal["sigmoid", "softmax"] = "sigmoid",
  chunk: int = 1024,
) -> tuple[metrics.Pairs, Any]:
  """Loss and metrics of a batch: of all of its pairs.

  Args, returns: see embed_fn and embeddings_loss_fn.
  """
  embeddings, mutable = embed_fn(
    variables, batch, rng, model=model, train=train
  )
  pairs = embeddings_loss_fn(
    variables["params"], embeddings, batch, kind=kind, chunk=chunk
  )
  return pairs, mutable


def predict_fns(model: Any) -> dict[str, Callable[..., Any]]:
  """Functions for evaluators.

  "embed" gives {"image": [B, E], "text": [B, E]} of those of "image" and
  "labels" that a batch has; where "labels" is [B, n, L], several texts for each
  image, "text" is [B, n, E]. "image" and "text" give one of them alone,
  "pre_logits" the features of the image tower before its head, and "loss" the
  loss's pairs.
  """

  def apply(variables: Any, **features: Any) -> Any:
    return model.apply(variables, **features, train=False)

  def image(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return apply(variables, image=_feature(batch, "image"))[0]

  def text(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    labels = _feature(batch, "labels")
    z = apply(variables, text=labels.reshape(-1, labels.shape[-1]))[1]
    return z.reshape(*labels.shape[:-1], z.shape[-1])

  def embed(variables: Any, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    fns = {"image": image, "text": text}
    names = {"image": "image", "text": "labels"}
    return {
      kind: fn(variables, batch)
      for kind, fn in fns.items()
      if names[kind] in batch
    }

  def pre_logits(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    out = apply(variables, image=_feature(batch, "image"))[2]
    return out["img/pre_logits"]

  def loss(
    variables: Any,
    batch: Mapping[str, Any],
    *,
    kind: Literal["sigmoid", "softmax"] = "sigmoid",
    chunk: int = 1024,
  ) -> metrics.Pairs:
    return loss_fn(
      variables,
      batch,
      None,
      model=model,
      train=False,
      kind=kind,
      chunk=chunk,
    )[0]

  return {
    "embed": embed,
    "image": image,
    "text": text,
    "pre_logits": pre_logits,
    "loss": loss,
  }
