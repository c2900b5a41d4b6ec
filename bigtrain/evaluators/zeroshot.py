"""Classifies images by the embedding of the text that fits them best.

As in CLIP, arXiv 2103.00020: a class is the mean, back on the sphere, of the
embeddings of all that its name makes of a list of prompts.

Legend: B batch, C classes, E embedding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics, sharding
from bigtrain.evaluation import class_names as names_lib
from bigtrain.evaluation import evaluations
from bigtrain.settings import ConfigError, did_you_mean


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for names, prompts or ops that cannot be used."""
  names_lib.check(
    options["class_names"],
    names_lib.read(options.get("prompts", ("{}",)), f"{path}.prompts"),
    options["pp_text"],
    context,
    path=path,
    prompt_key="prompts",
  )


class Evaluator:
  """Accuracy "acc", "top5_acc", ... without a single labelled example.

  Args:
    predict_fn: (variables, batch) -> {"image": [B, E]} of a batch with images,
      {"text": [B, E]} of one with the tokens "labels"; of length 1.
    context: where it runs.
    data: source of the images, as in config.input.data.
    class_names: the names in the order of their numbers, or the path of a text
      file with one a line.
    pp_text: the ops that captions are tokenized by, from "text" to "labels".
    pp: preprocessing of the images; leaves "image" and `label_key`.
    prompts: texts in which {} stands for the name, or the path of a text file
      with one a line.
    label_key: int [B], or multi-hot [B, C] if any of several classes is right;
      examples with a negative label, or none at all, do not count.
    top_k: the example counts as right if its class is among the k that fit
      best. A k larger than C is left out.
    batch_size: that of training unless given; of images and of texts.
    num_examples: only so many images from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], Mapping[str, jax.Array]],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    class_names: Sequence[str] | str,
    pp_text: str,
    pp: str = "",
    prompts: Sequence[str] | str = ("{}",),
    label_key: str = "label",
    top_k: Sequence[int] = (1, 5),
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    path = f"config.evals.{context.name}"
    names = names_lib.read(class_names, f"{path}.class_names")
    self._num_classes = C = len(names)
    texts = [
      text
      for prompt in names_lib.read(prompts, f"{path}.prompts")
      for text in names_lib.fill(prompt, names, f"{path}.prompts")
    ]
    tokens = names_lib.tokens(texts, pp_text, context, key=f"{path}.pp_text")

    self._texts = evaluations.Batches(
      lambda variables, batch: {
        "text": predict_fn(variables, {"labels": batch["labels"]})["text"],
        "weight": batch["_mask"],
      },
      context,
      data=dict(type="arrays", arrays={"labels": tokens}),
      pp="",
      batch_size=_fitting(
        len(tokens), batch_size or context.batch_size, context.mesh.size
      ),
    )

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      if label_key not in batch:
        raise ConfigError(
          f"{path}.label_key: the batch has no {label_key!r}."
          f"{did_you_mean(label_key, batch)}"
        )
      return {
        "image": predict_fn(variables, {"image": batch["image"]})["image"],
        "labels": batch[label_key],
        "weight": batch["_mask"],
      }

    self._images = evaluations.Batches(
      outputs,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )
    replicated = sharding.replicated(context.mesh)
    self._pairs = jax.jit(
      functools.partial(_pairs, top_k=[k for k in top_k if k <= C]),
      in_shardings=replicated,
      out_shardings=replicated,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {"acc", "top5_acc"}."""
    found = self._texts.map(variables)
    real = np.concatenate([part["weight"] for part in found]) > 0
    text_TE = np.concatenate([part["text"] for part in found])[real]
    # Texts are ordered by prompt, then by class.
    class_CE = np.float32(text_TE).reshape(
      -1, self._num_classes, text_TE.shape[-1]
    )
    class_CE = class_CE.mean(0)
    class_CE /= np.linalg.norm(class_CE, axis=-1, keepdims=True) + 1e-8
    return metrics.host_means(
      jax.device_get(self._pairs(class_CE, part))
      for part in self._images.map(variables)
    )


def _fitting(number: int, batch_size: int, devices: int) -> int:
  """A batch size for so few examples that most of a batch would be padding."""
  return min(batch_size, -(-number // devices) * devices)


def _pairs(
  class_CE: jax.Array, found: Mapping[str, jax.Array], top_k: Sequence[int]
) -> metrics.Pairs:
  labels, weight = found["labels"], found["weight"]
  scores_BC = jnp.einsum(
    "be,ce->bc",
    found["image"].astype(jnp.float32),
    class_CE,
    precision=jax.lax.Precision.HIGHEST,
  )
  if labels.ndim == 1:
    weight = weight * (labels >= 0)
    # A number beyond the names would count as wrong, and nobody would see.
    weight = jnp.where(labels < len(class_CE), weight, jnp.nan)
  else:
    weight = weight * jnp.any(labels > 0, axis=-1)
  return {
    "acc" if k == 1 else f"top{k}_acc": metrics.pair(
      metrics.top_k_hits(scores_BC, labels, k), weight
    )
    for k in top_k
  }
