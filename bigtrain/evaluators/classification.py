"""Top-k accuracy and loss of a classifier, exact for any number of hosts.

Legend: B batch, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.evaluation import evaluations
from bigtrain.losses import cross_entropy
from bigtrain.settings import ConfigError, did_you_mean

_LOSSES = {
  "softmax_xent": cross_entropy.softmax_xent,
  "sigmoid_xent": cross_entropy.sigmoid_xent,
}


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for a `loss` that is none; see `Evaluator`."""
  loss = options.get("loss", "softmax_xent")
  if loss not in _LOSSES:
    raise ConfigError(
      f"{path}.loss: no loss {loss!r}.{did_you_mean(loss, _LOSSES)}"
    )


class Evaluator:
  """Accuracy "acc", "top5_acc", ..., and "loss" over a data set.

  Args:
    predict_fn: (variables, batch) -> logits [B, C].
    context: where it runs.
    data: source, as in config.input.data.
    pp: preprocessing string; leaves `label_key` and the model's inputs.
    loss: "softmax_xent" or "sigmoid_xent".
    label_key: int [B] labels, or one-hot or multi-hot [B, C]; examples with a
      negative label, or none at all, do not count.
    top_k: the example counts as right if any of its labels is among the k
      classes with the largest logits; ties go to the lower class. A k larger
      than C is left out.
    batch_size: that of training unless given.
    num_examples: only so many from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], jax.Array],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    pp: str = "",
    loss: str = "softmax_xent",
    label_key: str = "labels",
    top_k: Sequence[int] = (1, 5),
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    check({"loss": loss}, context, f"config.evals.{context.name}")

    def pairs(variables: Any, batch: Mapping[str, Any]) -> metrics.Pairs:
      logits_BC = predict_fn(variables, batch).astype(jnp.float32)
      if label_key not in batch:
        raise ConfigError(
          f"config.evals.{context.name}.label_key: the batch has no "
          f"{label_key!r}.{did_you_mean(label_key, batch)}"
        )
      labels = batch[label_key]
      weight_B = metrics.example_weights(batch, logits_BC)
      # Some sets have images without a label (ImageNet ReaL): nobody can be
      # right or wrong about them.
      labelled = labels >= 0 if labels.ndim == 1 else jnp.any(labels > 0, -1)
      weight_B = weight_B * labelled
      loss_B = _LOSSES[loss](logits_BC, labels)
      result = {"loss": metrics.pair(loss_B, weight_B)}
      for k in top_k:
        if k <= logits_BC.shape[-1]:
          name = "acc" if k == 1 else f"top{k}_acc"
          hit_B = metrics.top_k_hits(logits_BC, labels, k)
          result[name] = metrics.pair(hit_B, weight_B)
      return result

    self._batches = evaluations.Batches(
      pairs,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {"acc", "top5_acc", "loss"}."""
    return metrics.host_means(self._batches.map(variables))
