"""Retrieves the texts of an image from all texts, and images of a text.

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
  texts with their image among the k best images. A wrong answer with the score
  of a right one ranks before it, and a score that is not finite is never right.

  Args:
    predict_fn: (variables, batch) -> {"image": [B, E], "text": [B, E]}; "text"
      is [B, n, E] for several texts per image.
    batches: "image" and "labels" [B, L] or [B, n, L], zeros for no text.
    at: the numbers k.
    id_key: name of the images' numbers, int [B], if rows repeat an image.
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
      written = jnp.any(batch["labels"] != 0, axis=-1)
      result = {**predict_fn(variables, batch), "written": written}
      if id_key:
        result["id"] = batch[id_key]
      return result

    self._outputs = batches.collect(outputs)
    self._ranks = features.by_rows(_ranks, batches.context.mesh)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    rows = self._outputs(variables)
    row_id = rows.get("id", np.arange(len(rows["image"]), dtype=np.int32))
    image_id, first = np.unique(row_id, return_index=True)
    images = rows["image"][first], image_id
    written = rows["written"]  # bool [N] or [N, n]: whether there is a text.
    row_of_text = np.nonzero(written)[0]
    texts = rows["text"][written], row_id[row_of_text]
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
  # Not `score_QA >= best_Q1`: a score that is NaN is before the right ones.
  better_QA = ~right_QA & ~(score_QA < best_Q1)
  ranks_Q = jnp.sum(better_QA, axis=1)
  # A large k finds every answer, but none of a query with such scores.
  last = jnp.iinfo(ranks_Q.dtype).max
  return jnp.where(jnp.isfinite(best_Q1[:, 0]), ranks_Q, last)
