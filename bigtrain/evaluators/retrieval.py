"""Finds the texts of an image among those of all images, and the reverse.

Legend: B batch, n texts of an image, Q queries, A answers, E embedding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.evaluation import evaluations
from bigtrain.settings import ConfigError, did_you_mean


class Evaluator:
  """Recall at k, "img2txt_recall@1", "txt2img_recall@1", ...

  The share of images one of whose texts is among the k that fit it best, out
  of all texts; and of texts whose image is among the k that fit best. A wrong
  answer that scores as a right one does counts as better: who embeds
  everything alike finds nothing.

  Args:
    predict_fn: (variables, batch) -> {"image": [B, E], "text": [B, E]}, or
      [B, n, E] where the batch has several texts for each image.
    context: where it runs.
    data: source, as in config.input.data.
    pp: preprocessing string; leaves "image" and "labels" [L] or [n, L]. Of n
      texts those that are all zeros do not count, so that images may have
      different numbers of them.
    at: the numbers k.
    id_key: int [B], which image a row shows, where rows repeat images: one
      with each of its texts. Unless given, each row shows another.
    batch_size: that of training unless given.
    num_examples: only so many rows from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], Mapping[str, jax.Array]],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    pp: str = "",
    at: Sequence[int] = (1, 5, 10),
    id_key: str | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    path = f"config.evals.{context.name}"
    if not at or not all(isinstance(k, int) and k > 0 for k in at):
      raise ConfigError(f"{path}.at: expected positive numbers, got {at!r}.")
    self._at = at

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      for key in ("labels", *([id_key] if id_key else [])):
        if key not in batch:
          raise ConfigError(
            f"{path}.pp leaves no {key!r}.{did_you_mean(key, batch)}"
          )
      result = {
        **predict_fn(variables, batch),
        "real": batch["_mask"] > 0,
        "written": jnp.any(batch["labels"] != 0, axis=-1),
      }
      if id_key:
        result["id"] = batch[id_key]
      return result

    self._batches = evaluations.Batches(
      outputs,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )
    self._rows = sharding.batch(context.mesh)
    self._step = context.mesh.size * max(1, 1024 // context.mesh.size)
    self._replicated = sharding.replicated(context.mesh)
    self._better = jax.jit(
      self._count_better,
      in_shardings=self._replicated,
      out_shardings=self._replicated,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {"img2txt_recall@1", ..., "txt2img_recall@1", ...}."""
    found = self._batches.map(variables)
    real = np.concatenate([part["real"] for part in found])
    rows = {
      name: np.concatenate([part[name] for part in found])[real]
      for name in found[0]
    }
    row_id = rows.get("id", np.arange(real.sum(), dtype=np.int32))
    image_id, first = np.unique(row_id, return_index=True)
    images = rows["image"][first], image_id
    # [N] or [N, n]: which texts there are, and whose they are.
    written = rows["written"]
    row_of_text = np.nonzero(written)[0]
    texts = rows["text"][written], row_id[row_of_text]
    ranks = {
      "img2txt": self._ranks(images, texts),
      "txt2img": self._ranks(texts, images),
    }
    return {
      f"{way}_recall@{k}": float(np.mean(rank < k))
      for way, rank in ranks.items()
      for k in self._at
    }

  def _ranks(
    self,
    queries: tuple[np.ndarray, np.ndarray],
    answers: tuple[np.ndarray, np.ndarray],
  ) -> np.ndarray:
    """For each query, how many wrong answers precede the first right one.

    Both are (embeddings, ids of the images they belong to).
    """
    query_QE, query_id = queries
    answers = jax.device_put(answers, self._replicated)
    ranks = []
    for start in range(0, len(query_QE), self._step):
      rows = slice(start, start + self._step)
      missing = self._step - len(query_QE[rows])
      ranks.append(
        self._better(
          np.pad(query_QE[rows], [(0, missing), (0, 0)]),
          np.pad(query_id[rows], [(0, missing)]),
          *answers,
        )
      )
    return np.concatenate(jax.device_get(ranks))[: len(query_QE)]

  def _count_better(
    self,
    query_QE: jax.Array,
    query_id: jax.Array,
    answer_AE: jax.Array,
    answer_id: jax.Array,
  ) -> jax.Array:
    query_QE = jax.lax.with_sharding_constraint(query_QE, self._rows)
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
    # Not "at least": where a score is not a number, no answer is found.
    better_QA = ~right_QA & ~(score_QA < best_Q1)
    return jnp.sum(better_QA, axis=1)
