"""Multiple choice: which answer does a language model find most likely?

Legend: B batch, L tokens of a window.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.evaluation import evaluations, text_metrics
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.inputs import checks, sources
from bigtrain.inputs.named_features import Features
from bigtrain.text import tokenizers


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  tokenizer = evaluations.tokenizer(options.get("tokenizer", "bytes"), context)
  sizes = dict.fromkeys(("tokens", "inputs"), tokenizer.vocab_size)
  checks.check_sizes(sizes, context.vocab_sizes, f"{path}.tokenizer")
  text_metrics.check(f"{path}.metrics", options.get("metrics", ()))


class Evaluator:
  """Accuracy of the most likely choices, as in the lm-evaluation-harness.

  Compares the log-likelihoods of the choices after the context: their sums
  ("acc"), divided by characters ("acc_norm") and by bytes ("acc_bytes"). The
  first of equal choices wins. An encoder-decoder gets the context as inputs and
  a choice as targets; both end with the end token, as in training.

  Args:
    predict_fn: (variables, batch) -> {"log_likelihood": float [B], ...}, the
      sum over the `targets` [B, L] where `loss_mask` [B, L] is 1.
    data: source of questions, such as dict(type="jsonl", path="arc.jsonl").
    length: number of tokens in a window. Of a longer context, only the end is
      used.
    tokenizer: tokenizer of the model, see text/tokenizers.py.
    context_key, choices_key: names of the text and of the choices after it.
    answer_key: name of the number of the right choice, counted from 0.
    delimiter: text between context and choice.
    bos: whether each context, not only an empty one, starts with the begin
      token (the end token, if the tokenizer has none).
    batch_size: number of choices per batch; as in training by default.
    num_examples: number of questions, from the start; all by default.
    metrics: more metrics, which compare the texts of the most likely choices
      with the right ones; see evaluation/text_metrics.py.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    context: Context,
    *,
    data: Mapping[str, Any],
    length: int,
    tokenizer: tokenizers.Spec = "bytes",
    context_key: str = "context",
    choices_key: str = "choices",
    answer_key: str = "answer",
    delimiter: str = " ",
    bos: bool = False,
    batch_size: int | None = None,
    num_examples: int | None = None,
    metrics: Sequence[str] = (),
  ):
    path = context.path
    coder = evaluations.tokenizer(tokenizer, context)
    if bos and _begin_id(coder) is None:
      raise ConfigError(
        f"{path}.bos: the tokenizer {coder.name!r} has no begin token."
      )
    keys = context_key, choices_key, answer_key
    source = sources.make_source(data, f"{path}.data")
    spec = Features(source.spec, path)
    for key in keys:
      spec[key]  # Raises ConfigError if the feature is missing.
    self._metrics = metrics
    make_window: Any
    if "inputs" in context.vocab_sizes:  # An encoder-decoder.
      make_window = functools.partial(pair_window, coder, length)
    else:
      make_window = functools.partial(window, coder, length, delimiter, bos)
    # A window for each choice of each question, in order.
    rows: list[dict[str, np.ndarray]] = []
    self._choices: list[list[str]] = []
    self._answers: list[int] = []
    for i in range(min(num_examples or len(source), len(source))):
      example = source.read(np.asarray([i]))
      try:
        text, choices, answer = _question(*[example[key][0] for key in keys])
        rows += [make_window(text, choice) for choice in choices]
      except ValueError as e:
        raise DataError(f"{source.where(i)}: {e}.") from e
      self._choices.append(choices)
      self._answers.append(answer)
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def log_likelihood(variables: Variables, batch: Batch) -> jax.Array:
      result = predict_fn(variables, batch)
      if not isinstance(result, Mapping) or "log_likelihood" not in result:
        raise ConfigError(
          f"{path}.pred: expected a predict function that returns "
          "'log_likelihood', such as score of the task language_modeling."
        )
      return result["log_likelihood"]

    batches = Batches(
      context, dict(type="arrays", arrays=arrays), batch_size=batch_size
    )
    self._scores = batches.collect(log_likelihood)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    all_scores = self._scores(variables).astype(np.float64)
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    num_nonfinite, start = 0, 0
    chosen: list[str] = []
    right: list[list[str]] = []
    for choices, answer in zip(self._choices, self._answers):
      scores = all_scores[start : start + len(choices)]
      start += len(choices)
      lengths = {
        "acc": 1,
        "acc_norm": [len(choice) for choice in choices],
        "acc_bytes": [len(choice.encode()) for choice in choices],
      }
      # No choice is right if a score is NaN.
      is_ordered = bool(metrics.has_order(scores))
      num_nonfinite += not is_ordered
      for name, length in lengths.items():
        best = np.argmax(scores / length)
        hits[name].append(is_ordered and best == answer)
      chosen.append(choices[np.argmax(scores)])
      right.append([choices[answer]])
    results = {name: float(np.mean(values)) for name, values in hits.items()}
    results |= text_metrics.compute(self._metrics, chosen, right)
    if num_nonfinite:
      results["nonfinite"] = float(num_nonfinite)
    return results


def _question(
  text: Any, choices: Any, answer: Any
) -> tuple[str, list[str], int]:
  """Checks one question of the data, whose values are numpy's or bytes."""
  if isinstance(choices, bytes | str) or np.ndim(choices) != 1:
    raise ValueError("expected a list of choices")
  texts = [_text(choice) for choice in choices]
  if len(texts) < 2 or not all(texts):
    raise ValueError(
      f"expected at least two choices, none empty, got {json.dumps(texts)}"
    )
  if not np.issubdtype(np.asarray(answer).dtype, np.integer):
    raise ValueError(f"expected the number of a choice, got {answer!r}")
  if not 0 <= answer < len(texts):
    raise ValueError(
      f"expected an answer from 0 to {len(texts) - 1}, got {answer}"
    )
  return _text(text), texts, int(answer)


def _text(raw: Any) -> str:
  return raw.decode() if isinstance(raw, bytes) else str(raw)


def _begin_id(tokenizer: tokenizers.Tokenizer) -> int | None:
  return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def window(
  tokenizer: tokenizers.Tokenizer,
  length: int,
  delimiter: str,
  bos: bool,
  text: str,
  choice: str,
) -> dict[str, np.ndarray]:
  """`tokens` and `targets`, int32 [L], and `loss_mask`, float32 [L].

  The mask is 1 where a target is a token of the choice. As in the harness,
  space at the end of the context belongs to the choice.
  """
  stripped = text.rstrip()
  tail = text[len(stripped) :] + delimiter + choice
  # Encoded together, since tokens can depend on their neighbours.
  ids = tokenizer.encode(stripped + tail)
  num_context_ids = len(tokenizer.encode(stripped)) if stripped else 0
  size = len(ids) - num_context_ids
  if bos or not stripped:
    begin_id = _begin_id(tokenizer)
    if begin_id is None:
      raise ValueError(
        "the context is empty and the tokenizer has no begin token"
      )
    ids = np.concatenate([[begin_id], ids])
  if not 0 < size <= length:
    raise ValueError(
      f"a choice of {size} tokens does not fit into length={length}"
    )
  ids = ids[-(length + 1) :]
  padding = (0, length - len(ids) + 1)
  is_choice = np.arange(1, len(ids)) >= len(ids) - size
  return {
    "tokens": np.pad(ids[:-1], padding).astype(np.int32),
    "targets": np.pad(ids[1:], padding).astype(np.int32),
    "loss_mask": np.pad(is_choice, padding).astype(np.float32),
  }


def pair_window(
  tokenizer: tokenizers.Tokenizer, length: int, text: str, choice: str
) -> dict[str, np.ndarray]:
  """`inputs` and `targets` int32 [L] of an encoder-decoder, padded with 0."""
  end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
  inputs = np.append(tokenizer.encode(text), end).astype(np.int32)
  targets = np.append(tokenizer.encode(choice), end).astype(np.int32)
  size = len(targets)
  if size > length:
    raise ValueError(
      f"a choice of {size} tokens does not fit into length={length}"
    )

  def padded(ids: np.ndarray) -> np.ndarray:
    return np.pad(ids[-length:], (0, max(length - len(ids), 0)))

  return {"inputs": padded(inputs), "targets": padded(targets)}
