"""Token ids of the rows of data/supervised.py, with the ids that have a loss.

`Encoder` turns a plain row, made by row_shapes.py, into ids: it applies a chat
template to a conversation, and joins a prompt and its completion. `encode_all`
does this for all answers of a row of a file, and `checked_rows` reads the rows.
"""

import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_number
from bigtrain.data.formats import documents, files, row_pictures, row_shapes
from bigtrain.data.formats.token_rows import Row
from bigtrain.text import chat, tokenizers
from bigtrain.text import messages as chat_messages
from bigtrain.text import pictures as text_pictures

# Part of the key of cached ids. Increase it when the ids of a row change, here
# or in row_shapes.py.
_VERSION = 3
# Fields that say what a plain row is.
_KINDS = ("messages", "prompt", "text")
# Ids that the message about a row without loss shows.
_NUM_SHOWN = 32


class Encoder:
  """Makes the ids of rows.

  Attributes:
    key: digest of the options that the ids depend on.
    bos: whether the begin token precedes rows without a template.
    has_template: whether there is a chat template.
    ignore_fields: sorted names of the fields that are removed from messages.
  """

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
    ignore_fields: Sequence[str] = (),
    pictures: text_pictures.Pictures | None = None,
  ):
    """See data/supervised.py; `pairs` is for encoder-decoders."""
    self._pictures = pictures
    self._tokenizer = tokenizer
    self._loss: Literal["assistant", "last", "all"] = loss
    self._pairs = pairs
    self._allow_special = allow_special
    # Plain texts spell old special tokens as text, but new ones are there to
    # be written.
    self._new_special = tokenizer.new_special_tokens
    self.ignore_fields = _field_names(ignore_fields)
    self._template_options = {**(variables or {}), "now": _clock(date)}
    self.bos = tokenizer.adds_bos if bos is None else bos
    if pictures is not None and pictures.first:
      self.bos = False  # It follows the pictures.
    if self.bos and tokenizer.bos_id is None:
      raise ConfigError(
        f"supervised: bos: the tokenizer {tokenizer.name!r} has no begin token."
      )
    # Only conversations need a template. If there is none, the error is kept
    # for the first of them.
    self._template: chat.Template | ConfigError
    try:
      self._template = chat.get(template, tokenizer.name)
    except ConfigError as e:
      if template is not None:
        raise
      self._template = e
    texts: Any = None
    self.has_template = isinstance(self._template, chat.Template)
    if isinstance(self._template, chat.Template):
      texts = [*self._template.texts.items(), *self._template.tokens.items()]
    options = texts, variables, date, loss, self.bos, allow_special, pairs
    key: list[Any] = [_VERSION, tokenizer.fingerprint(), options]
    key.append(self.ignore_fields)
    if pictures is not None:
      key.append(pictures.key())
    self.key = files.digest(*key)

  def __call__(self, row: Mapping[str, Any], where: Any) -> Row:
    """Returns the ids of a row; `where` is its place, for messages."""
    try:
      images = row_pictures.of_row(row)
      if images and self._pictures is None:
        raise DataError(
          "the row has pictures; pictures=FOLDER, of a published model that "
          "reads them, says how they are prepared."
        )
      result = self._encode(row, len(images))
      if self._pictures is not None:
        self._pictures.check(result.ids, len(images))
        sized = self._pictures.layout is not None
        kept = [row_pictures.encoded(x, row, sized) for x in images]
        result = self._with_pictures(result, kept)
      weight = 1.0 if row.get("weight") is None else row["weight"]
      check_number("weight", weight, least=0)
    except (ConfigError, ValueError, TypeError) as e:
      raise DataError(f"{where}: {e}") from e
    # A decoder cannot predict the first id, which has no context.
    first_target = result.prompt if self._pairs else 1
    if not result.trained[first_target:].any():
      text = self._tokenizer.spell(result.ids[:_NUM_SHOWN])
      raise DataError(f"{where}: no token has a loss: {text!r}.")
    label = -1 if row.get("label") is None else int(row["label"])
    return result._replace(weight=float(weight), label=label)

  def _with_pictures(self, row: Row, kept: Sequence[bytes]) -> Row:
    """A row with its pictures, and the image tokens for all of them."""
    pictures = self._pictures
    assert pictures is not None
    if pictures.layout is None:
      return row._replace(pictures=kept)
    sizes = [row_pictures.size_of(x) for x in kept]
    ids, origin = pictures.expanded(self._tokenizer, row.ids, sizes)
    trained = row.trained[origin]
    return row._replace(
      ids=ids,
      trained=trained,
      prompt=int(trained.argmax()),
      pictures=kept,
    )

  def _encode(self, row: Mapping[str, Any], num_pictures: int) -> Row:
    kind = next(kind for kind in _KINDS if row.get(kind) is not None)
    if kind == "text":
      return self._encode_texts("", row["text"], num_pictures)
    if kind == "messages":
      return self._encode_messages(row, row["messages"], 0, num_pictures)
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
      return self._encode_texts(prompt, completion, num_pictures)
    if isinstance(prompt, list) and isinstance(completion, list):
      messages = [*prompt, *completion]
      return self._encode_messages(row, messages, len(prompt), num_pictures)
    raise DataError("prompt and completion: expected two texts, or two lists.")

  def _encode_texts(self, prompt: str, answer: Any, num_pictures: int) -> Row:
    tokenizer = self._tokenizer
    if not isinstance(answer, str):
      kind = type(answer).__name__
      raise DataError(f"text: expected a string, got {kind}.")
    if tokenizer.eos_id is None:
      raise DataError(f"the tokenizer {tokenizer.name!r} has no end token.")
    end = tokenizer.eos_id
    special = bool(self._new_special) and self._allow_special
    if not special:
      for text in self._new_special:
        if text in prompt or text in answer:
          raise DataError(
            f"the text spells the special token {text!r}; with "
            "allow_special=True it is that token."
          )
    encode = functools.partial(tokenizer.encode, special=special)
    if self._pictures is not None:
      if not self._allow_special:
        self._check_text(prompt, "prompt")
        self._check_text(answer, "completion")
      prompt = self._pictures.prompt(tokenizer, prompt, num_pictures)
      encode = functools.partial(
        self._pictures.encode, tokenizer, special=special
      )
    prompt_ids = encode(prompt)
    if self._pairs:
      inputs = [*prompt_ids, end]
      ids = [*inputs, *tokenizer.encode(answer, special), end]
    else:
      # Encoded together if possible, because some tokenizers begin each text
      # with an additional id, such as a space.
      both = encode(prompt + answer)
      if np.array_equal(both[: len(prompt_ids)], prompt_ids):
        answer_ids = both[len(prompt_ids) :]
      else:
        answer_ids = tokenizer.encode(answer, special)
      inputs = [tokenizer.bos_id] if self.bos else []
      inputs += prompt_ids.tolist()
      ids = [*inputs, *answer_ids, end]
    if self._loss == "all":
      trained = np.full(len(ids), True)
    else:
      trained = np.arange(len(ids)) >= len(inputs)
    return Row(np.asarray(ids, np.int32), int(trained.argmax()), trained)

  def _encode_messages(
    self,
    row: Mapping[str, Any],
    messages: Any,
    first: int,
    num_pictures: int,
  ) -> Row:
    """Encodes a conversation; answers before message `first` have no loss."""
    if isinstance(self._template, ConfigError):
      raise self._template
    tools = row.get("tools")
    tokenizer: Any = self._tokenizer
    if self._pictures is not None:
      messages = self._pictures.messages(self._template, messages, num_pictures)
      tokenizer = text_pictures.Tokenizer(tokenizer, self._pictures)
    messages = chat_messages.readable(
      self._template,
      messages,
      tools,
      ignore_fields=self.ignore_fields,
      **self._template_options,
    )
    if not self._allow_special:
      self._check_spelling(messages)
    ids, trained = chat.supervised(
      self._template,
      tokenizer,
      messages,
      tools,
      loss="last" if self._pairs else self._loss,
      first=first,
      **self._template_options,
    )
    prompt = int(trained.argmax())
    if self._pairs and trained.any():
      # The targets end with the answer, even if the template adds more text.
      ids = ids[: len(trained) - int(trained[::-1].argmax())]
    return Row(ids, prompt, trained[: len(ids)])

  def _check_spelling(self, messages: Sequence[Mapping[str, Any]]) -> None:
    for i, message in enumerate(messages):
      content = json.dumps(message, ensure_ascii=False)
      self._check_text(content, f"message {i}: its content")

  def _check_text(self, content: str, what: str) -> None:
    if self._pictures is not None:
      content = content.replace(self._pictures.placeholder, "")
    for text in self._tokenizer.spellings:
      if text in content:
        raise DataError(
          f"{what} spells the special token {text!r}, which may end a turn; "
          "with allow_special=True it is that token."
        )


def encode_all(
  shapes: row_shapes.Reader, encoder: Encoder, row: Any, where: Any
) -> list[Row]:
  """Returns the ids of a row: one row, or one for each of its answers."""
  if isinstance(row, DataError):
    raise row
  try:
    shaped = shapes.read(row)
  except DataError as e:
    raise DataError(f"{where}: {e}") from e
  result = [encoder(each, where) for each in shaped.rows]
  shapes.count(shaped)
  return result


def checked_rows(
  path: str,
  rows_of: Callable[[str], Iterator[tuple[Any, Any]]] = documents.rows,
) -> Iterator[tuple[Any, Any]]:
  """Yields (place, row) of a file; an error in the place of an invalid row."""
  for where, row in rows_of(path):
    try:
      if not isinstance(row, DataError):
        _check_texts(row, where)
    except DataError as e:
      row = e
    yield where, row


def with_folder(
  rows_of: Callable[[str], Iterator[tuple[Any, Any]]], name: str
) -> Iterator[tuple[Any, Any]]:
  """Yields (place, row) with the folder of the file, for paths of pictures."""
  return row_pictures.with_folder(rows_of(name), os.path.dirname(name))


def pieces(
  tokenizer: tokenizers.Tokenizer, ids: np.ndarray, trained: np.ndarray
) -> list[tuple[str, bool]]:
  """Returns a text as a list of pieces (text, whether it has a loss)."""
  cuts = np.flatnonzero(np.diff(trained)) + 1
  return [
    (tokenizer.spell(piece), bool(has_loss[0]))
    for piece, has_loss in zip(np.split(ids, cuts), np.split(trained, cuts))
  ]


def _check_texts(row: Mapping[str, Any], where: Any) -> None:
  """Raises DataError if a text of a row contains half a character.

  JSON can spell one, "\\ud83d", and Python reads it, but UTF-8 has no bytes for
  it, and tokenizers refuse it.
  """
  for field in row_shapes.TEXT_FIELDS:
    _check_text(row.get(field), field, where)


def _check_text(value: Any, field: str, where: Any) -> None:
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


def _field_names(names: Any) -> list[str]:
  is_list = isinstance(names, list | tuple)
  if not is_list or not all(isinstance(name, str) for name in names):
    raise ConfigError(
      f"supervised: ignore_fields={names!r}: expected a list of fields of "
      "messages, such as ['name']."
    )
  if needed := {"role", "content"} & set(names):
    raise ConfigError(
      f"supervised: ignore_fields: {sorted(needed)[0]!r} cannot be ignored."
    )
  return sorted(names)


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
