"""Image-text retrieval: finds the texts of an image, and the image of a text.

Legend: B batch, n texts of an image, Q queries, A answers, E embedding.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.evaluation import evaluations, features
from bigtrain.evaluation.evaluations import Batches

LIMITS = {"at": evaluations.COUNT}


class Evaluator:
  """Recall at k, "img2txt_recall@1", "txt2img_recall@1", ...

  The fraction of images with one of their texts among the k best texts, and of
  texts with their image among the k best images. A wrong answer that ties with
  a right one ranks before it. An answer whose score is not finite counts as
  wrong.

  Args:
    predict_fn: (variables, batch) -> {"image": [B, E], "text": [B, E]}; "text"
      is [B, n, E] for several texts per image.
    batches: "image", and tokens "labels", [B, L] or [B, n, L], with zeros for
      no text.
    at: values of k.
    id_key: name of the images' numbers, int [B], if several examples may have
      the same image.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    at: Sequence[int] = (1, 5, 10),
    id_key: str | None = None,
  ):
    self._at = at

    def outputs(variables: Variables, batch: Batch) -> dict[str, Any]:
      has_text = jnp.any(batch["labels"] != 0, axis=-1)
      result = {**predict_fn(variables, batch), "has_text": has_text}
      if id_key:
        result["id"] = batch[id_key]
      return result

    self._outputs = batches.collect(outputs)
    self._ranks = features.in_chunks(_ranks, batches.context.mesh)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    examples = self._outputs(variables)
    num_examples = len(examples["image"])
    id_N = examples.get("id", np.arange(num_examples, dtype=np.int32))
    # Each image once, and each text with the number of its image.
    image_id, first = np.unique(id_N, return_index=True)
    images = examples["image"][first], image_id
    has_text = examples["has_text"]  # bool [N] or [N, n].
    example_of_text = np.nonzero(has_text)[0]
    texts = examples["text"][has_text], id_N[example_of_text]
    ranks = {
      "img2txt": self._ranks(images, *texts),
      "txt2img": self._ranks(texts, *images),
    }
    results = {
      f"{direction}_recall@{k}": float(np.mean(rank < k))
      for direction, rank in ranks.items()
      for k in self._at
    }
    return results | metrics.nonfinite(images[0], texts[0])


def _ranks(
  queries: tuple[jax.Array, jax.Array],
  answer_AE: jax.Array,
  answer_id: jax.Array,
) -> jax.Array:
  """Number of wrong answers before the first right one, int [Q]."""
  query_QE, query_id = queries
  score_QA = jnp.einsum(
    "qe,ae->qa",
    query_QE.astype(jnp.float32),
    answer_AE.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  right_QA = query_id[:, None] == answer_id
  best_Q1 = jnp.max(
    score_QA, axis=1, where=right_QA, initial=-jnp.inf, keepdims=True
  )
  # Not `score_QA >= best_Q1`, so that a score of NaN ranks before right ones.
  better_QA = ~right_QA & ~(score_QA < best_Q1)
  ranks_Q = jnp.sum(better_QA, axis=1)
  # Even the largest k does not find an answer whose score is not finite.
  last = jnp.iinfo(ranks_Q.dtype).max
  return jnp.where(jnp.isfinite(best_Q1[:, 0]), ranks_Q, last)
