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
  """Raises ConfigError for a wrong `loss`, `top_k` or other classes."""
  loss = options.get("loss", "softmax_xent")
  if loss not in _LOSSES:
    raise ConfigError(
      f"{path}.loss: no loss {loss!r}.{did_you_mean(loss, _LOSSES)}"
    )
  top_k = options.get("top_k", (1, 5))
  evaluations.check_numbers(f"{path}.top_k", top_k, least=1, whole=True)
  label_key = options.get("label_key", "labels")
  evaluations.check_class_names(options, context, label_key)


class Evaluator:
  """Accuracy "acc", "top5_acc", ..., and "loss" over a data set.

  Args:
    predict_fn: (variables, batch) -> logits [B, C].
    batches: the evaluation set, with the features `label_key` and the model's
      inputs.
    loss: "softmax_xent" or "sigmoid_xent".
    label_key: name of the labels: int [B], or one-hot or multi-hot [B, C].
      Examples with a negative label, or without a label, do not count.
    top_k: numbers k: an example is right if any of its labels is among the k
      classes with the largest logits. Of equal logits the lower class comes
      first. A k larger than C is ignored.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], jax.Array],
    batches: evaluations.Batches,
    *,
    loss: str = "softmax_xent",
    label_key: str = "labels",
    top_k: Sequence[int] = (1, 5),
  ):
    def pairs(variables: Any, batch: Mapping[str, Any]) -> metrics.Pairs:
      logits_BC = predict_fn(variables, batch).astype(jnp.float32)
      labels = batch[label_key]
      weight_B = metrics.example_weights(batch, logits_BC)
      # Some sets have images without a label (ImageNet ReaL).
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

    sizes = batches.context.vocab_sizes
    num_classes = sizes.get(label_key, sizes.get("labels"))
    self._pairs = batches.labelled(label_key, num_classes).map(pairs)

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {"acc", "top5_acc", "loss"}."""
    return metrics.host_values(self._pairs(variables))
