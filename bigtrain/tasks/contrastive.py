"""Contrastive training: matches the images and texts of a batch.

Legend: B batch, H height, W width, L length, E embedding.

A batch has "image" [B, H, W, 3] floats and "labels" int [B, L], the token ids
of the image's text.

The loss compares each image with every text of the whole batch. The task
therefore also has the two halves of loss_fn, which step/gradients.py needs for
microbatches: embed_fn, which treats examples independently, and
embeddings_loss_fn, which takes all embeddings of the batch.

The model returns (image embeddings, text embeddings, dict). Its parameter "t"
[1] is the logarithm of the logits' scale, and "b" [1], if it has one, their
bias.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.losses import pairwise
from bigtrain.settings import ConfigError, did_you_mean

KINDS = ("sigmoid", "softmax")


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the model's arguments."""
  return {"image": batch["image"], "text": batch["labels"]}


def vocab_sizes(model: Any) -> dict[str, int]:
  """Returns the model's number of token ids by feature, if it has the field."""
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
  """Embeds a batch or a microbatch, each example independently.

  Args:
    variables: "params" and, where the model has them, mutable collections.
    batch: see the module docstring.
    rng: key for dropout; unused in evaluation.
    model: flax module, see the module docstring.
    train: whether dropout and updates of batch statistics are on.

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
) -> metrics.Metrics:
  """Computes the loss of the whole global batch from its embeddings.

  Args:
    params: the model's parameters, of which "t" and "b" are used.
    embeddings: embeddings that embed_fn returns.
    batch: the global batch; "_mask" is 0 for padding.
    kind: "sigmoid" (SigLIP): for each image, the binary cross-entropy summed
      over all texts. "softmax" (CLIP): the mean of the cross-entropies of an
      image among the texts and of its text among the images.
    chunk: pairs of each image at a time, see losses/pairwise.py.

  Returns:
    Pairs "loss"; "accuracy", the share of images that no other text of the
    batch scores higher with; "temperature" and, for the sigmoid loss, "bias",
    the logits' scale and bias.

  Raises:
    ConfigError: unknown kind, or a sigmoid loss without a bias.
  """
  if kind not in KINDS:
    hint = did_you_mean(kind, KINDS)
    raise ConfigError(f"config.loss.kind: unknown {kind!r}.{hint}")
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
  pairs = {
    "loss": metrics.pair(loss_B, weight_B),
    "accuracy": metrics.pair(correct_B, weight_B),
  }
  for name, value in scalars.items():
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
) -> tuple[metrics.Metrics, Any]:
  """Computes loss and metrics over all pairs of a batch.

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
  """Returns functions for evaluators, by name.

  "embed" returns {"image": [B, E], "text": [B, E]} for the features "image" and
  "labels", or for the one that the batch has. For "labels" [B, n, L], several
  texts an image, "text" is [B, n, E]. "image" and "text" return one embedding
  alone, "pre_logits" the image tower's features before its head, and "loss" the
  pairs of loss_fn.
  """

  def apply(variables: Any, **features: Any) -> Any:
    return model.apply(variables, **features, train=False)

  def image(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return apply(variables, image=batch["image"])[0]

  def text(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    labels = batch["labels"]
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
    out = apply(variables, image=batch["image"])[2]
    return out["img/pre_logits"]

  def loss(
    variables: Any,
    batch: Mapping[str, Any],
    *,
    kind: Literal["sigmoid", "softmax"] = "sigmoid",
    chunk: int = 1024,
  ) -> metrics.Metrics:
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
