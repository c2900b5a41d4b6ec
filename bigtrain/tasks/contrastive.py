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

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bigtrain import metrics, sharding
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import Batch, Metrics, Params, PredictFn, Variables
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_number,
  nearest_divisors,
)
from bigtrain.losses import forward, joint_selection, pairwise
from bigtrain.tasks import captioning

KINDS = ("sigmoid", "softmax")
# Options that may follow a schedule, with limits of their values.
LIMITS = dict(distill_weight=dict(least=0), caption_weight=dict(least=0))


def inputs(batch: Batch) -> Batch:
  return {**picture_features.needed(batch), "text": batch["labels"]}


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
  distill_weight: float = 0.0,
) -> Metrics:
  """Computes the loss of the whole global batch from its embeddings.

  Args:
    kind: "sigmoid" (SigLIP): for each image, the binary cross-entropy summed
      over all texts. "softmax" (CLIP): the mean of the cross-entropies of an
      image among the texts and of its text among the images.
    chunk: pairs of each image at a time, see losses/pairwise.py.
    caption_weight: weight of the mean cross-entropy of captions' tokens, which
      is added. CoCa has 2, with "softmax".
    distill_weight: weight of the distance from the reference of config.select,
      which is added (ACED, https://arxiv.org/abs/2411.18674).

  Returns:
    Metrics "loss"; "accuracy", the share of images that no other text scores
    higher with; the logits' "temperature" and, if sigmoid, "bias"; of captions
    "token_accuracy"; and each term of a sum, "contrastive_loss",
    "caption_loss", "distill_loss".
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

  if "captions" in embeddings or "reference_image" in batch:
    result["contrastive_loss"] = result["loss"]
  if "reference_image" in batch:
    distance_B = pairwise.distance(
      scale * image_BE,
      text_BE,
      batch["reference_image"],
      batch["reference_text"],
      weight_B=weight_B,
      chunk=chunk,
    )
    result["distill_loss"] = metrics.pair(distance_B, weight_B)
    total, number = result["loss"]
    result["loss"] = total + distill_weight * result["distill_loss"][0], number
  elif isinstance(distill_weight, int | float) and distill_weight:
    raise ConfigError(
      f"config.loss.distill_weight={distill_weight}: expected config.select, "
      "whose reference is the teacher."
    )
  _add_captions(result, embeddings, batch, caption_weight)
  return result


def _add_captions(
  result: Metrics,
  embeddings: dict[str, jax.Array],
  batch: Batch,
  caption_weight: Any,
) -> None:
  """Adds a captioner's second term to the loss in `result`."""
  if "captions" in embeddings:
    total, number = result["loss"]
    tokens = jnp.sum(captioning.token_weights(batch, batch["labels"], 0))
    captions = jnp.sum(embeddings["captions"])
    mean = captions / jnp.maximum(tokens, 1.0)
    result["loss"] = total + caption_weight * number * mean, number
    result["caption_loss"] = captions, tokens
    result["token_accuracy"] = jnp.sum(embeddings["hits"]), tokens
  elif isinstance(caption_weight, jax.Array) or caption_weight:
    raise ConfigError(
      f"config.loss.caption_weight={caption_weight}: expected a model that "
      "writes captions, such as config.model_name='coca'."
    )


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)


def select(
  learner: Callable[[], tuple[Params, Any]],
  reference: Callable[[], tuple[Params, Any]],
  batch: Batch,
  key: jax.Array,
  *,
  number: int,
  kind: Literal["sigmoid", "softmax"] = "sigmoid",
  distill_weight: Any = 0.0,
  score: Literal["learnability", "easy_reference"] = "learnability",
  chunks: int = 16,
) -> tuple[jax.Array, Batch, Metrics]:
  """Chooses the pairs to learn from, by JEST; see objective/selection.py.

  Args:
    learner, reference: return the parameters of a model, and what "embed" of
      `predict_fns` makes of the batch.
    number: number of pairs to choose.
    kind, distill_weight: those of the loss.
    score: what to choose by, see losses/joint_selection.py.
    chunks: number of chunks in which the chosen pairs are drawn.

  Returns:
    The sorted numbers of the chosen pairs; features [B, ...] that the loss
      needs besides those of the batch; and metrics: "score", the mean score of
      a pair alone, "selected_score", that of the chosen ones, and
      "reference_loss", the reference's loss of the chosen pairs.
  """
  if kind != "sigmoid":
    raise ConfigError(
      "config.select: expected config.loss.kind='sigmoid', a sum over pairs, "
      f"got {kind!r}."
    )
  check_choice("config.select.score", score, joint_selection.SCORES)
  check_number("config.select.chunks", chunks, least=1, whole=True)
  if number % chunks:
    raise ConfigError(
      f"config.select.chunks={chunks} does not divide the {number} chosen "
      f"pairs; the nearest sizes that do: {nearest_divisors(chunks, number)}."
    )
  of_reference = _pairs(*reference(), "config.teacher.model")
  of_learner = None
  if score == "learnability":
    of_learner = _pairs(*learner(), "config.model")
  weight_B = metrics.example_weights(batch, of_reference.image_BE)
  chosen_n, score_B = joint_selection.select(
    of_reference, of_learner, weight_B, key, number=number, chunks=chunks
  )
  image_nE, text_nE, weight_n, score_n = sharding.take(
    (of_reference.image_BE, of_reference.text_BE, weight_B, score_B), chosen_n
  )
  loss_n, _ = pairwise.sigmoid(
    image_nE,
    text_nE,
    of_reference.scale,
    of_reference.bias,
    weight_B=weight_n,
  )
  features = {}
  if distill_weight:
    features["reference_image"] = of_reference.scale * of_reference.image_BE
    features["reference_text"] = of_reference.text_BE
  result = {
    "score": metrics.pair(score_B, weight_B),
    "selected_score": metrics.pair(score_n, weight_n),
    "reference_loss": metrics.pair(loss_n, weight_n),
  }
  return chosen_n, features, result


def _pairs(
  params: Params, embeddings: dict[str, jax.Array], key: str
) -> joint_selection.Pairs:
  if "b" not in params:
    raise ConfigError(
      f"{key}.bias_init: config.select needs the sigmoid loss's bias, such as "
      "-10."
    )
  return joint_selection.Pairs(
    embeddings["image"],
    embeddings["text"],
    jnp.exp(params["t"][0]),
    params["b"][0],
  )


def predict_fns(model: Any) -> dict[str, PredictFn]:
  """Functions for evaluators; captioners also have those of captioning.py.

  "embed" returns {"image": [B, E], "text": [B, E]}, or only one if the batch
  lacks a feature; "labels" [B, n, L] give "text" [B, n, E]. "image" and "text"
  return one embedding alone, "pre_logits" the image tower's features.
  """

  def apply(variables: Variables, **features: Any) -> Any:
    return model.apply(variables, **features, train=False)

  def image(variables: Variables, batch: Batch) -> jax.Array:
    return apply(variables, **picture_features.needed(batch))[0]

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
    "pre_logits": forward.layers_fn(
      model, picture_features.needed, "img/pre_logits"
    ),
  }
