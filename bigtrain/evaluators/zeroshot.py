"""Classifies images by the class name whose embedding is most similar.

As in CLIP (arXiv 2103.00020), the embedding of a class is the mean over several
prompts with its name.

Legend: B batch, T texts, C classes, E embedding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics, sharding
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import (
  Batch,
  ClassCount,
  Metrics,
  PredictFn,
  Variables,
)
from bigtrain.evaluation import evaluations
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.inputs import labels


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  prompts = options.get("prompts", ("{}",))
  prompts = labels.read(prompts, f"{path}.prompts", "prompts")
  evaluations.check_classes(options, context, prompts, "prompts")


class Evaluator:
  """Accuracy "acc", "top5_acc", ... of a classifier without labelled examples.

  Args:
    predict_fn: (variables, batch) -> embeddings of length 1: {"image": [B, E]}
      of a batch with "image", and "shapes" if the data has them; {"text":
      [B, E]} of a batch with tokens "labels".
    class_names: names in the order of their numbers, a text file of them, or
      "imagenet", "cifar100" or "pets", see inputs/class_names.json.
    pp_text: ops that tokenize captions, from "text" to "labels".
    prompts: texts with a {} for the name, the path of a text file, or "clip",
      "clip_best", "clip_cifar100" or "clip_pets", see inputs/prompts.json.
    label_key: name of the labels: int [B], or multi-hot [B, C] if several
      classes are right. Examples without a label do not count.
    top_k: values of k; a prediction is right if the class is among the k most
      similar ones.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    context: Context,
    *,
    class_names: Sequence[str] | str,
    pp_text: str,
    prompts: Sequence[str] | str = ("{}",),
    label_key: str = "label",
    top_k: Sequence[int] = (1, 5),
  ):
    path = context.path
    names = labels.read(class_names, f"{path}.class_names")
    self._num_classes = len(names)
    texts = [
      text
      for prompt in labels.read(prompts, f"{path}.prompts", "prompts")
      for text in labels.fill(prompt, names, f"{path}.prompts")
    ]
    tokens_TL = evaluations.class_tokens(texts, pp_text, context)

    def text_embeddings(variables: Variables, batch: Batch) -> jax.Array:
      return predict_fn(variables, {"labels": batch["labels"]})["text"]

    def image_embeddings(variables: Variables, batch: Batch) -> dict[str, Any]:
      # Without "labels", which would count as texts.
      features = picture_features.of(batch)
      return {
        "image": predict_fn(variables, features)["image"],
        "labels": batch[label_key],
        "weight": metrics.labelled_weights(batch, batch[label_key]),
      }

    def accuracies(class_CE: jax.Array, images: Mapping[str, Any]) -> Metrics:
      scores_BC = jnp.einsum(
        "be,ce->bc",
        images["image"].astype(jnp.float32),
        class_CE,
        precision=jax.lax.Precision.HIGHEST,
      )
      return metrics.top_k_accuracies(
        scores_BC, images["labels"], images["weight"], top_k
      )

    # If there are fewer texts than a batch has examples, the batch is smaller.
    ways = sharding.batch_ways(context.mesh)
    all_texts = -(-len(tokens_TL) // ways) * ways
    text_batches = Batches(
      context,
      data=dict(type="arrays", arrays={"labels": tokens_TL}),
      batch_size=min(batches.batch_size or context.batch_size, all_texts),
    )
    self._texts = text_batches.collect(text_embeddings)
    num_classes = ClassCount(len(names), f"{path}.class_names")
    image_batches = batches.labelled(label_key, num_classes)
    self._images = image_batches.map(image_embeddings)
    replicated = sharding.replicated(context.mesh)
    self._accuracies = jax.jit(
      accuracies, in_shardings=replicated, out_shardings=replicated
    )

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    text_TE = self._texts(variables).astype(np.float32)
    # Texts are ordered by prompt, then by class.
    class_CE = text_TE.reshape(-1, self._num_classes, text_TE.shape[-1]).mean(0)
    class_CE /= np.linalg.norm(class_CE, axis=-1, keepdims=True) + 1e-8
    return metrics.host_values(
      jax.device_get(self._accuracies(class_CE, images))
      for images in self._images(variables)
    )
