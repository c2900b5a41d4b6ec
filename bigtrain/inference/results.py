"""From one or many inputs to one or many results.

Legend: B batch, C classes.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bigtrain import settings


def one_or_many(
  inputs: Any,
  call: Callable[[Sequence[Any]], list[Any]],
  *,
  one: bool,
  batch_size: int,
) -> Any:
  """Calls a function on inputs, a batch at a time.

  Args:
    one: whether it is one input; then there is one result.
  """
  if one:
    return call([inputs])[0]
  items, results = list(inputs), []
  for start in range(0, len(items), batch_size):
    results += call(items[start : start + batch_size])
  return results


def is_one(inputs: Any) -> bool:
  """Whether this is one picture or text, not several."""
  if isinstance(inputs, np.ndarray):
    return inputs.ndim < 4
  return not isinstance(inputs, list | tuple) and (
    isinstance(inputs, str | bytes | bytearray | os.PathLike)
    or hasattr(inputs, "__array__")
    or not hasattr(inputs, "__iter__")
  )


def is_one_text(inputs: Any) -> bool:
  """Whether this is one text or the ids of one, not several."""
  if isinstance(inputs, str):
    return True
  items = list(inputs)
  return bool(items) and isinstance(items[0], int | np.integer)


def ranked(
  scores_BC: np.ndarray, names: Sequence[str], top_k: int
) -> list[dict[str, Any]]:
  """Returns the best class, and a list of the best ones, for each row."""
  settings.check_number("top_k", top_k, least=1, whole=True)
  results = []
  for row in scores_BC:
    best = np.argsort(-row, kind="stable")[:top_k]
    top = [
      {"label": names[i], "index": int(i), "score": float(row[i])} for i in best
    ]
    results.append({**top[0], "top": top})
  return results


def probabilities(logits_BC: np.ndarray, kind: str) -> np.ndarray:
  """Returns float64 [B, C], the probabilities that a loss gives to logits.

  Args:
    kind: kind of the loss. "sigmoid..." judges each class by itself, any other
      makes the probabilities of a row add up to 1.
  """
  logits_BC = logits_BC.astype(np.float64)
  if kind.startswith("sigmoid"):
    return 1 / (1 + np.exp(-logits_BC))
  shifted = np.exp(logits_BC - logits_BC.max(axis=-1, keepdims=True))
  return shifted / shifted.sum(axis=-1, keepdims=True)
