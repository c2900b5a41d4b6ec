"""Classifies by the likelihood of each class's name as the image's caption.

Legend: B batch, C classes, L length.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.evaluation import class_names as names_lib
from bigtrain.evaluation import evaluations
from bigtrain.settings import ConfigError, did_you_mean


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for names, a prompt or ops that cannot be used."""
  names_lib.check(
    options["class_names"],
    (options.get("prompt", "{}"),),
    options["pp_text"],
    context,
    path=path,
    prompt_key="prompt",
  )


class Evaluator:
  """Accuracy "acc", "top5_acc", ... of a generative classifier.

  Args:
    predict_fn: (variables, batch) -> log-likelihoods [B, C]; the batch has the
      names as "class_tokens" int [C, L].
    context: where it runs.
    data: source, as in config.input.data.
    class_names: the names in the order of their numbers, or the path of a text
      file with one a line.
    pp_text: the ops that captions are tokenized by, from "text" to "labels".
    pp: preprocessing string; leaves `label_key` and the image.
    prompt: the text that a name stands in, in place of {}.
    label_key: int [B], the numbers of the right classes; examples with a
      negative one do not count.
    top_k: the example counts as right if its class is among the k likeliest.
      A k larger than C is left out.
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
    class_names: Sequence[str] | str,
    pp_text: str,
    pp: str = "",
    prompt: str = "{}",
    label_key: str = "label",
    top_k: Sequence[int] = (1, 5),
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    path = f"config.evals.{context.name}"
    names = names_lib.read(class_names, f"{path}.class_names")
    texts = names_lib.fill(prompt, names, f"{path}.prompt")
    tokens_CL = names_lib.tokens(texts, pp_text, context, key=f"{path}.pp_text")

    def pairs(variables: Any, batch: Mapping[str, Any]) -> metrics.Pairs:
      scores_BC = predict_fn(variables, {**batch, "class_tokens": tokens_CL})
      if label_key not in batch:
        raise ConfigError(
          f"{path}.label_key: the batch has no {label_key!r}."
          f"{did_you_mean(label_key, batch)}"
        )
      label_B = batch[label_key]
      weight_B = metrics.example_weights(batch, scores_BC) * (label_B >= 0)
      # A number beyond the names would count as wrong, and nobody would see.
      weight_B = jnp.where(label_B < len(names), weight_B, jnp.nan)
      result = {}
      for k in top_k:
        if k <= len(names):
          name = "acc" if k == 1 else f"top{k}_acc"
          hit_B = metrics.top_k_hits(scores_BC, label_B, k)
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
    """Returns {"acc", "top5_acc"}."""
    return metrics.host_means(self._batches.map(variables))
