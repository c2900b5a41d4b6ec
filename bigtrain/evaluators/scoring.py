"""Classifies images by how likely each class name is as the caption.

Legend: B batch, C classes, L length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import metrics
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
  evaluations.check_classes(options, context, [options.get("prompt", "{}")])


class Evaluator:
  """Accuracy "acc", "top5_acc", ... of a generative classifier.

  Args:
    predict_fn: (variables, batch) -> log-likelihoods [B, C]; the batch has the
      class names as "class_tokens" int [C, L].
    class_names: as for the evaluator `zeroshot`.
    pp_text: ops that tokenize captions, from "text" to "labels".
    prompt: text with a {} for the name.
    label_key: name of the labels, int [B]; negative ones do not count.
    top_k: values of k; a prediction is right if the class is among the k most
      likely ones.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    class_names: Sequence[str] | str,
    pp_text: str,
    prompt: str = "{}",
    label_key: str = "label",
    top_k: Sequence[int] = (1, 5),
  ):
    path = batches.context.path
    names = labels.read(class_names, f"{path}.class_names")
    texts = labels.fill(prompt, names, f"{path}.prompt")
    tokens_CL = evaluations.class_tokens(texts, pp_text, batches.context)

    def accuracies(variables: Variables, batch: Batch) -> Metrics:
      scores_BC = predict_fn(variables, {**batch, "class_tokens": tokens_CL})
      label_B = batch[label_key]
      weight_B = metrics.labelled_weights(batch, label_B)
      return metrics.top_k_accuracies(scores_BC, label_B, weight_B, top_k)

    num_classes = ClassCount(len(names), f"{path}.class_names")
    self._accuracies = batches.labelled(label_key, num_classes).map(accuracies)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    return metrics.host_values(self._accuracies(variables))
