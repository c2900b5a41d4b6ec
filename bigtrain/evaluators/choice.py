"""Multiple choice: which answer a language model finds most likely.

Legend: N pairs of a question and a choice, L tokens of a window.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bigtrain.evaluation import evaluations
from bigtrain.inputs import pipeline
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError, DataError


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for a tokenizer that is none, or not the model's."""
  found = evaluations.tokenizer(options.get("tokenizer", "bytes"), context)
  pipeline.check_vocab_sizes(
    {"tokens": found.vocab_size}, context.vocab_sizes, f"{path}.tokenizer"
  )


class Evaluator:
  """Accuracy by likelihood, scored as the lm-evaluation-harness does.

  Of each question, every choice is put behind the context, and the sums of the
  log-likelihoods of the choices' tokens are compared: as they are ("acc"), by
  the choice's length in characters ("acc_norm", as there) and in bytes
  ("acc_bytes"). The first of equal ones counts.

  Args:
    predict_fn: (variables, batch) -> {"log_likelihood": float [B], ...}: of the
      `targets` [B, L] where `loss_mask` [B, L] is 1, summed over an example.
    context: where it runs.
    data: source with a text, a list of texts and a number for each question,
      such as dict(type="jsonl", path="arc.jsonl").
    length: tokens of a window; of a longer context the end is used. One length
      means one compilation.
    tokenizer: that of the model, see pp/tokenizers.py.
    context_key: the text before the choices.
    choices_key: the choices.
    answer_key: the number of the right one, from 0.
    delimiter: between context and choice. What a context ends in of spaces
      belongs to the choice's tokens, as there.
    bos: whether a begin token (where there is none, the end token) is put
      before each context. Before an empty one it always is.
    batch_size: of pairs; that of training unless given.
    num_examples: only so many questions from the start.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], Mapping[str, jax.Array]],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    length: int,
    tokenizer: str = "bytes",
    context_key: str = "context",
    choices_key: str = "choices",
    answer_key: str = "answer",
    delimiter: str = " ",
    bos: bool = False,
    batch_size: int | None = None,
    num_examples: int | None = None,
  ):
    path = f"config.evals.{context.name}"
    check(dict(tokenizer=tokenizer), context, path)
    found = evaluations.tokenizer(tokenizer, context)
    maker = _Maker(found, length, delimiter, bos, path)
    keys = (context_key, choices_key, answer_key)
    source = pipeline.make_source(data, f"{path}.data")
    for key in keys:
      if key not in source.spec:
        raise ConfigError(
          f"{path}: the data has no feature {key!r}. There are: "
          f"{', '.join(sorted(source.spec))}."
        )
    rows: list[dict[str, np.ndarray]] = []
    self._choices: list[list[str]] = []
    self._answers: list[int] = []
    for i in range(min(num_examples or len(source), len(source))):
      example = source.read(np.asarray([i]))
      try:
        text, choices, answer = _question(*(example[key][0] for key in keys))
        rows += [maker.row(text, choice) for choice in choices]
      except ValueError as e:
        raise DataError(f"{source.where(i)}: {e}.") from e
      self._choices.append(choices)
      self._answers.append(answer)
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def outputs(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
      found = predict_fn(variables, batch)
      if not isinstance(found, Mapping) or "log_likelihood" not in found:
        raise ConfigError(
          f"{path}.pred: expected a predict function that returns "
          "'log_likelihood', as score of the task language_modeling does."
        )
      return found["log_likelihood"]

    self._batches = evaluations.Batches(
      outputs,
      context,
      data=dict(type="arrays", arrays=arrays),
      pp="",
      batch_size=batch_size,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {"acc", "acc_norm", "acc_bytes"}."""
    scores = np.concatenate(self._batches.map(variables)).astype(np.float64)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    at = 0
    for choices, answer in zip(self._choices, self._answers):
      own = scores[at : at + len(choices)]
      at += len(choices)
      lengths = {
        "acc": np.ones(len(choices)),
        "acc_norm": np.asarray([len(c) for c in choices]),
        "acc_bytes": np.asarray([len(c.encode()) for c in choices]),
      }
      for name, length in lengths.items():
        right[name].append(bool(np.argmax(own / length) == answer))
    return {name: float(np.mean(hits)) for name, hits in right.items()}


def _question(
  text: Any, choices: Any, answer: Any
) -> tuple[str, list[str], int]:
  """The features of a question as Python's own types; ValueError if wrong."""
  if isinstance(choices, bytes | str) or np.ndim(choices) != 1:
    raise ValueError("expected a list of choices")
  found = [_text(choice) for choice in choices]
  if len(found) < 2 or not all(found):
    told = json.dumps(found)
    raise ValueError(f"expected two choices or more, none empty, got {told}")
  if not np.issubdtype(np.asarray(answer).dtype, np.integer):
    raise ValueError(f"expected the number of a choice, got {answer!r}")
  if not 0 <= answer < len(found):
    raise ValueError(f"answer {answer} is none of {len(found)} choices")
  return _text(text), found, int(answer)


def _text(raw: Any) -> str:
  return raw.decode() if isinstance(raw, bytes) else str(raw)


class _Maker:
  """Makes the window of a context and a choice."""

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    length: int,
    delimiter: str,
    bos: bool,
    path: str,
  ):
    self._tokenizer, self._delimiter = tokenizer, delimiter
    self._length, self._bos = length, bos
    begin = (
      tokenizer.bos_id if tokenizer.bos_id is not None else (tokenizer.eos_id)
    )
    if begin is None and bos:
      raise ConfigError(
        f"{path}.bos: the tokenizer {tokenizer.name!r} has no token to begin "
        "with."
      )
    self._begin = begin

  def row(self, text: str, choice: str) -> dict[str, np.ndarray]:
    """`tokens`, `targets` int32 [L] and `loss_mask` float32 [L]."""
    stripped = text.rstrip()
    tail = text[len(stripped) :] + self._delimiter + choice
    # Encoded together: tokens may depend on what is beside them.
    whole = self._tokenizer.encode(stripped + tail)
    before = self._tokenizer.encode(stripped) if stripped else whole[:0]
    size = len(whole) - len(before)
    if self._bos or not len(before):
      if self._begin is None:
        raise ValueError(
          "an empty context, and the tokenizer has no token to begin with"
        )
      whole = np.concatenate([[self._begin], whole])
    if not 0 < size <= self._length:
      raise ValueError(
        f"a choice of {size} tokens does not fit into length={self._length}"
      )
    whole = whole[-(self._length + 1) :]
    used = len(whole) - 1
    row = {
      "tokens": np.zeros(self._length, np.int32),
      "targets": np.zeros(self._length, np.int32),
      "loss_mask": np.zeros(self._length, np.float32),
    }
    row["tokens"][:used] = whole[:-1]
    row["targets"][:used] = whole[1:]
    row["loss_mask"][used - size : used] = 1
    return row
