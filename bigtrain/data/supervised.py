"""Texts with the answers that a model learns to write.

  dict(type="supervised", path="chats.jsonl", tokenizer="models/Qwen3-0.6B",
       length=2048, pack=True)

Rows of .jsonl and .parquet files, also as .gz and .zst, have one of

- `messages`: a list of dict(role=..., content=...), with `tools` beside it if
  there are any, written by a chat template (bigtrain/text/chat.py).
- `prompt` and `completion`: two texts, or two lists of messages.
- `text`: a text, all of which has a loss.
- `chosen` and `rejected`, with `preferences=True`: two completions, after
  `prompt` or as conversations of their own.

and may have `weight`, the weight of their loss. All rows are read and checked
before the first step, and their tokens are kept in the user's cache folder.
Features, L = `length`:

- `tokens` int32 [L], `targets` int32 [L], the next token of each, and
  `loss_mask` float32 [L], the weight of each target; with `preferences=True`
  [2, L], of the chosen answer first: see tasks/preference.py.
- `segments` and `positions` int32 [L] if packed, as in data/tokens.py.
- `prefix` int32, number of tokens of the prompt, of prefix language models.

Those of encoder-decoders, S, L = `length`, are `inputs` int32 [S], `targets`
int32 [L] and `loss_mask` float32 [L]; if packed also `inputs_segments` int32
[S] and `targets_segments` int32 [L].
"""

import datetime
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from absl import logging

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  check_number,
  did_you_mean,
)
from bigtrain.data.formats import (
  arithmetic,
  documents,
  files,
  packing,
  pydoc_questions,
  splits,
  token_rows,
)
from bigtrain.data.formats.token_rows import Row
from bigtrain.text import chat, tokenizers

# Increase it when the tokens of a row change.
_VERSION = 2
_KEYS = ("messages", "prompt", "text")
# Fields of a row that hold texts.
_FIELDS = (*_KEYS, "completion", "chosen", "rejected", "tools")
_SHOWN_TOKENS = 1000
_NUM_SAMPLED = 1000
_NAMED = {"pydoc": pydoc_questions.rows, "arithmetic": arithmetic.rows}
# Yields (place, row) of an input.
_RowsOf = Callable[[str], Iterator[tuple[Any, Any]]]


class Source:
  """Rows, or packed rows, of one or more files.

  Args:
    tokenizer: "bytes" or a path, such as the folder of a published model.
    length: tokens of an example; for encoder-decoders (inputs, targets).
    path: a file, a pattern, or a list of these.
    name: "pydoc", what the functions of Python's library are for, or
      "arithmetic", additions of numbers below 100.
    split: split of these: "train", "test" (every tenth question) or "all".
    template: chat template, by default the one beside the tokenizer: a name
      (`chat.NAMES`), a file or a folder.
    variables: values for the template, such as dict(enable_thinking=False).
    date: date for templates that print the present one, such as "2026-01-31".
    loss: which tokens of a conversation have a loss: the answers of the
      "assistant", the "last" of them, or "all".
    allow_special: whether messages may spell special tokens, such as "</s>",
      which then are these tokens.
    bos: whether the begin token precedes rows without a template; by default if
      the tokenizer adds it.
    pack: whether rows share examples (best fit, planned from their lengths).
    prefix: whether all tokens see the whole prompt, up to the first loss; not
      with pack.
    preferences: whether rows have two answers. In pydoc, the rejected answer is
      a later sentence of the same documentation.
    too_long: for rows beyond `length`: "error", "drop", or cut them at the
      "left" or the "right".
    slice: slice of the rows, such as "[:99%]".
  """

  _extra = 1  # Tokens of a row beyond `length`: the last is only a target.

  def __init__(
    self,
    tokenizer: str,
    length: int | Sequence[int],
    path: str | Sequence[str] | None = None,
    *,
    name: str | None = None,
    split: str | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    date: str | None = None,
    loss: Literal["assistant", "last", "all"] = "assistant",
    allow_special: bool = False,
    bos: bool | None = None,
    pack: bool = False,
    prefix: bool = False,
    preferences: bool = False,
    too_long: Literal["error", "drop", "left", "right"] = "error",
    slice: str = "",
  ):
    sizes = [length] if isinstance(length, int) else [*length]
    _check_length(length, sizes, loss == "all")
    if (prefix or preferences) and (pack or len(sizes) == 2):
      field = "prefix" if prefix else "preferences"
      raise ConfigError(
        f"supervised: {field}=True: expected pack=False and one length, of a "
        "decoder."
      )
    check_choice("supervised: loss", loss, ("assistant", "last", "all"))
    ways = ("error", "drop", "left", "right")
    check_choice("supervised: too_long", too_long, ways)
    self._coder = tokenizers.get(tokenizer)
    encoder = Encoder(
      self._coder,
      template,
      variables,
      date,
      loss,
      bos,
      allow_special=allow_special,
      pairs=len(sizes) == 2,
    )
    self._answers = 2 if preferences else 1
    inputs, rows_of, form = self._find_rows(path, name, split, preferences)
    key = files.digest(encoder.key, form) if form else encoder.key
    self._rows = token_rows.cached(encoder, key, inputs, rows_of)
    self._sizes, self._pairs, self._pack = sizes, len(sizes) == 2, pack
    number = len(self._rows) // self._answers
    start, stop = splits.bounds(slice, number, "supervised: slice")
    rows = np.arange(start * self._answers, stop * self._answers)
    self._plan(rows, too_long)
    size = self._coder.vocab_size
    self.tokenizer = tokenizer, self._coder.fingerprint()
    # New prompts are made, and answers end, as in these texts.
    self.prompts = {
      "bos": encoder.bos,
      "prefix": prefix,
      "template": template,
      "variables": dict(variables or {}),
    }
    self.end_ids = self._find_ends()
    names = ("inputs", "targets") if self._pairs else ("tokens", "targets")
    self.vocab_sizes = dict.fromkeys(names, size)
    self.spec = _spec(sizes, pack)
    if prefix:
      self.spec["prefix"] = (np.dtype(np.int32), ())
    if preferences:
      self.spec = {k: (t, (2, *shape)) for k, (t, shape) in self.spec.items()}
    options = encoder.key, sizes, pack, too_long, slice, prefix
    self._digest = files.digest("supervised", self._rows.digest, *options)

  def _find_rows(self, *args: Any) -> tuple[list[str], _RowsOf, str]:
    """Returns inputs and rows_of of `token_rows.cached`, and a name of both."""
    inputs, rows_of = _inputs(*args)
    if self._answers == 1:
      return inputs, rows_of, ""
    # Both answers of a pair are rows of their own, one after the other.
    return inputs, functools.partial(_both_answers, rows_of), "two answers"

  def _spans_of(self, rows: np.ndarray) -> np.ndarray:
    """Returns [rows, 2 (parts), 2 (start, stop)]; decoders have one part."""
    return self._rows.spans(rows, self._pairs)

  def _plan(self, rows: np.ndarray, too_long: str) -> None:
    """Cuts or drops long rows, and packs: row, span and example of each."""
    spans, extra = self._spans_of(rows), 0 if self._pairs else self._extra
    room = np.asarray(self._sizes) + extra
    over = np.diff(spans, axis=2)[..., 0] > room
    long = over.any(axis=1)
    if long.any() and too_long == "error":
      row = int(np.flatnonzero(long)[0])
      sizes = np.diff(spans[row], axis=1)[:, 0] - extra
      raise DataError(
        f"{self._rows.where(rows[row])}: {' and '.join(map(str, sizes))} "
        f"tokens do not fit into length={self._sizes}, as of {long.sum()} of "
        f"{len(rows)} rows; give a larger length, or too_long='left', 'right' "
        "(which cut there) or 'drop'."
      )
    if too_long == "left":
      spans[..., 0] = np.maximum(spans[..., 0], spans[..., 1] - room)
    else:
      spans[..., 1] = np.minimum(spans[..., 1], spans[..., 0] + room)
    keep = np.full(len(rows), True)
    if too_long == "drop":
      keep[long] = False
    for i in np.flatnonzero(long & keep):
      start, stop = spans[i, -1]
      keep[i] = self._rows.read(start + (not self._pairs), stop)[1].any()
    # Both answers of a pair, or none.
    whole = keep.reshape(-1, self._answers).all(axis=1)
    keep = np.repeat(whole, self._answers)
    if long.any():
      cut = f"{(long & keep).sum()} are cut at the {too_long}"
      logging.warning(
        "supervised: %d of %d rows are longer than length=%s: %s%d left out.",
        long.sum(),
        len(rows),
        self._sizes,
        "" if too_long == "drop" else f"{cut}, ",
        (~keep).sum(),
      )
    self._row, self._spans = rows[keep], spans[keep]
    if not len(self._row):
      raise DataError("supervised: no row is left.")
    lengths = np.diff(self._spans, axis=2)[..., 0] - (not self._pairs)
    if self._pack:
      self._items, self._first = packing.best_fit(lengths, self._sizes)
      logging.info(
        "Packed %d rows into %d examples, %.1f%% full.",
        len(self._row),
        len(self),
        100 * lengths.sum() / (len(self) * sum(self._sizes)),
      )
    else:
      self._items = np.arange(len(self._row))
      self._first = np.arange(len(self._row) + 1)

  def __len__(self) -> int:
    return (len(self._first) - 1) // self._answers

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    if self._answers == 1:
      return self._examples(indices)
    both = np.asarray(indices)[:, None] * 2 + np.arange(2)
    batch = self._examples(both.reshape(-1))
    return {name: x.reshape(len(both), 2, -1) for name, x in batch.items()}

  def _examples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    batch = {
      name: np.zeros((len(indices), *shape[-1:]), dtype)
      for name, (dtype, shape) in self.spec.items()
    }
    for b, index in enumerate(np.asarray(indices).tolist()):
      example = {
        name: array[b] for name, array in batch.items() if array.ndim > 1
      }
      ends = [0] * len(self._sizes)
      items = self._items[self._first[index] : self._first[index + 1]]
      for number, item in enumerate(items.tolist()):
        self._fill(example, ends, number + 1, item)
    if "prefix" in batch:
      batch["prefix"][:] = (batch["loss_mask"] != 0).argmax(axis=1) + 1
    return batch

  def _fill(
    self, example: dict[str, np.ndarray], ends: list[int], number: int, i: int
  ) -> None:
    parts = [self._rows.read(*span) for span in self._spans[i].tolist()]
    weight = self._rows.weight[self._row[i]]
    features: list[dict[str, Any]] = []
    if self._pairs:
      (inputs, _), (targets, trained) = parts
      features.append({"inputs": inputs, "inputs_segments": number})
      features.append({"targets": targets, "targets_segments": number})
    else:
      ((ids, trained),) = parts
      features.append({"tokens": ids[:-1], "targets": ids[1:]})
      trained, positions = trained[1:], np.arange(len(ids) - 1)
      features[0] |= {"segments": number, "positions": positions}
    features[-1]["loss_mask"] = trained * weight
    for k, of_part in enumerate(features):
      start = ends[k]
      ends[k] += len(next(iter(of_part.values())))
      for name, value in of_part.items():
        if name in example:
          example[name][start : ends[k]] = value

  def _find_ends(self) -> list[int]:
    """Returns the special ids that end the answers of the first rows."""
    ends = set[int]()
    special = sorted(self._coder.special_ids)
    spans = self._rows.spans(self._row[:_NUM_SAMPLED], self._pairs)
    for start, stop in spans[:, -1].tolist():
      ids, trained = self._rows.read(start, stop)
      ends |= {*ids[trained & np.isin(ids, special)][-1:].tolist()}
    return sorted(ends)

  def first_example(self) -> list[tuple[str, bool]]:
    """Returns the pieces of the first row's text: (text, has a loss)."""
    pieces: list[tuple[str, bool]] = []
    begin, stop = self._spans[0].min(), self._spans[0].max()
    ids, trained = self._rows.read(begin, min(stop, begin + _SHOWN_TOKENS))
    trained[:1] &= self._pairs  # Without context, the first is no target.
    cuts = np.flatnonzero(np.diff(trained)) + 1
    for piece, has in zip(np.split(ids, cuts), np.split(trained, cuts)):
      pieces.append((self._coder.spell(piece), bool(has[0])))
    return pieces

  def where(self, index: int) -> str:
    item = self._items[self._first[index * self._answers]]
    return self._rows.where(self._row[item])

  def fingerprint(self) -> str:
    return self._digest


def _check_length(length: Any, sizes: Sequence[int], loss_of_all: bool) -> None:
  for size in sizes:
    check_number("supervised: length", size, least=1, whole=True)
  if len(sizes) > 2 or (len(sizes) == 2 and loss_of_all):
    raise ConfigError(
      f"supervised: length={length!r}: expected one number, or those of "
      "inputs and targets, of which only targets have a loss."
    )


def _both_answers(rows_of: _RowsOf, name: str) -> Iterator[tuple[Any, Any]]:
  for where, row in rows_of(name):
    for key in ("chosen", "rejected"):
      answer = row.get(key)
      if answer is None:
        hint = did_you_mean(key, row)
        raise DataError(
          f"{where}: expected chosen and rejected, with preferences=True.{hint}"
        )
      rest = {k: row[k] for k in ("tools", "weight") if k in row}
      if row.get("prompt") is not None:
        yield where, {"prompt": row["prompt"], "completion": answer, **rest}
      else:
        shape = "messages" if isinstance(answer, list) else "text"
        yield where, {shape: answer, **rest}


def _inputs(
  path: str | Sequence[str] | None,
  name: str | None,
  split: str | None,
  preferences: bool,
) -> tuple[list[str], _RowsOf]:
  """Returns files, or a name, and the function that yields their rows."""
  if (path is None) == (name is None):
    raise ConfigError("supervised: expected either path or name.")
  if name is None and split is not None:
    raise ConfigError(
      f"supervised: split={split!r} requires a name; for files use slice."
    )
  if name is None:
    return files.find(path, "supervised: path"), _rows_of_file
  rows = _NAMED[check_choice("supervised: name", name, _NAMED)]
  part = split or "train"
  check_choice("supervised: split", part, pydoc_questions.SPLITS)
  return [f"{name} {part}"], lambda _: rows(part, preferences)


def _rows_of_file(path: str) -> Iterator[tuple[Any, dict[str, Any]]]:
  for where, row in documents.rows(path):
    for field in _FIELDS:
      _check_text(row.get(field), field, where)
    yield where, row


def _check_text(value: Any, field: str, where: Any) -> None:
  """Raises DataError for half a character, as JSON can spell: "\\ud83d"."""
  if isinstance(value, str):
    try:
      value.encode()
    except UnicodeEncodeError as e:
      raise DataError(
        f"{where}: {field} contains the lone surrogate {value[e.start]!a}, "
        "which is half a character."
      ) from e
  elif isinstance(value, Mapping):
    for key, each in value.items():
      _check_text(each, f"{field}.{key}", where)
  elif isinstance(value, list):
    for i, each in enumerate(value):
      _check_text(each, f"{field}[{i}]", where)


def _spec(
  sizes: Sequence[int], pack: bool
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  names = [["inputs"], ["targets"]]
  segments = [["inputs_segments"], ["targets_segments"]]
  if len(sizes) == 1:
    names, segments = [["tokens", "targets"]], [["segments", "positions"]]
  result = {}
  for k, size in enumerate(sizes):
    for name in names[k] + segments[k] * pack:
      result[name] = (np.dtype(np.int32), (size,))
  return {**result, "loss_mask": (np.dtype(np.float32), (sizes[-1],))}


class Encoder:
  """Makes ids of rows; `key` are the options that they depend on."""

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    template: str | None,
    variables: Mapping[str, Any] | None,
    date: str | None,
    loss: Literal["assistant", "last", "all"],
    bos: bool | None,
    *,
    allow_special: bool,
    pairs: bool,
  ):
    self._tokenizer, self._loss, self._pairs = tokenizer, loss, pairs
    self._allow_special = allow_special
    self._options = {**(variables or {}), "now": _clock(date)}
    self.bos = tokenizer.adds_bos if bos is None else bos
    if self.bos and tokenizer.bos_id is None:
      raise ConfigError(
        f"supervised: bos: the tokenizer {tokenizer.name!r} has no begin token."
      )
    # Only rows with messages need one.
    self._template: chat.Template | ConfigError
    try:
      self._template = chat.get(template, tokenizer.name)
    except ConfigError as e:
      if template is not None:
        raise
      self._template = e
    texts: Any = None
    if isinstance(self._template, chat.Template):
      texts = [*self._template.texts.items(), *self._template.tokens.items()]
    options = texts, variables, date, loss, self.bos, allow_special, pairs
    self.key = files.digest(_VERSION, tokenizer.fingerprint(), options)

  def __call__(self, row: Mapping[str, Any], where: Any) -> Row:
    try:
      result = self._encode(row)
      weight = 1.0 if row.get("weight") is None else row["weight"]
      check_number("weight", weight, least=0)
    except (ConfigError, ValueError, TypeError) as e:
      raise DataError(f"{where}: {e}") from e
    first = result.prompt if self._pairs else 1
    if not result.trained[first:].any():
      text = self._tokenizer.spell(result.ids[:32])
      raise DataError(f"{where}: no token has a loss: {text!r}.")
    return result._replace(weight=float(weight))

  def _encode(self, row: Mapping[str, Any]) -> Row:
    kind = next((key for key in _KEYS if row.get(key) is not None), None)
    if kind is None:
      hint = did_you_mean("messages", row)
      raise DataError(
        f"expected messages, prompt and completion, or text.{hint}"
      )
    if kind == "text":
      return self._texts("", row["text"])
    if kind == "messages":
      return self._messages(row, row["messages"], 0)
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
      return self._texts(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
      return self._messages(row, [*prompt, *completion], len(prompt))
    raise DataError("prompt and completion: expected two texts, or two lists.")

  def _texts(self, prompt: str, answer: Any) -> Row:
    coder = self._tokenizer
    if not isinstance(answer, str):
      kind = type(answer).__name__
      raise DataError(f"text: expected a string, got {kind}.")
    if coder.eos_id is None:
      raise DataError(f"the tokenizer {coder.name!r} has no end token.")
    begin, end = [coder.bos_id] * self.bos, [coder.eos_id]
    before = coder.encode(prompt)
    if self._pairs:
      inputs = [*before, *end]
      ids = [*inputs, *coder.encode(answer), *end]
    else:
      # Some tokenizers begin each text in a way of their own.
      both = coder.encode(prompt + answer)
      if np.array_equal(both[: len(before)], before):
        after = both[len(before) :]
      else:
        after = coder.encode(answer)
      inputs = [*begin, *before]
      ids = [*inputs, *after, *end]
    trained = (np.arange(len(ids)) >= len(inputs)) | (self._loss == "all")
    return Row(np.asarray(ids, np.int32), int(trained.argmax()), trained)

  def _messages(self, row: Mapping[str, Any], messages: Any, first: int) -> Row:
    if isinstance(self._template, ConfigError):
      raise self._template
    _check_messages(messages)
    if not self._allow_special:
      self._check_spelling(messages)
    tools = row.get("tools")
    ids, trained = chat.supervised(
      self._template,
      self._tokenizer,
      messages,
      json.loads(tools) if isinstance(tools, str) else tools,
      loss="last" if self._pairs else self._loss,
      first=first,
      **self._options,
    )
    prompt = int(trained.argmax())
    if self._pairs and trained.any():
      ids = ids[: len(trained) - int(trained[::-1].argmax())]
    return Row(ids, prompt, trained[: len(ids)])

  def _check_spelling(self, messages: Sequence[Mapping[str, Any]]) -> None:
    for i, message in enumerate(messages):
      content = json.dumps(message, ensure_ascii=False)
      for text in self._tokenizer.spellings:
        if text in content:
          raise DataError(
            f"message {i}: its content spells the special token {text!r}, "
            "which may end a turn; allow_special=True takes it for one."
          )


def _check_messages(messages: Any) -> None:
  if not isinstance(messages, list) or not messages:
    raise DataError("messages: expected a list of dict(role=..., content=...).")
  for i, message in enumerate(messages):
    if not isinstance(message, dict) or "role" not in message:
      raise DataError(f"message {i}: expected dict(role=..., content=...).")


def _clock(date: str | None) -> chat.Now | None:
  if date is None:
    return None
  try:
    parsed = datetime.datetime.fromisoformat(date)
  except (TypeError, ValueError) as e:
    raise ConfigError(
      f"supervised: date={date!r}: expected a date such as '2026-01-31'."
    ) from e
  return lambda: parsed
