"""Prompts and conversations, with the answers that a model learns to write.

  dict(type="supervised", path="chats.jsonl", tokenizer="models/Qwen3-0.6B",
       length=2048, pack=True)

A row of a .jsonl or .parquet file, also as .gz or .zst, has one of

- `messages`: a list of dict(role=..., content=...), which a chat template
  writes (bigtrain/text/chat.py); with `tools` beside it if there are any.
- `prompt` and `completion`: two texts, or two lists of messages.
- `text`: a text, all of which has a loss.
- `images`, the pictures of these, or parts {"type": "image", "path": ...} of
  messages, with `pictures=`: see formats/row_pictures.py.
- `chosen` and `rejected`, with `preferences=True`: two completions, after
  `prompt` or as conversations of their own.

and may have `weight`, the weight of its loss. All rows are read and checked
before the first step, and their tokens are kept in the user's cache folder.

The features of an example, with L = `length`:

- `tokens` int32 [L], `targets` int32 [L], the next token of each, and
  `loss_mask` float32 [L], the weight of each target. With `preferences=True`
  they are [2, L], the chosen answer first: see tasks/preference.py.
- `segments` and `positions` int32 [L] if packed, as in data/tokens.py.
- `prefix` int32, the number of tokens of the prompt, for prefix language
  models; if packed, int32 [L], 1 for these tokens.
- `references=True`: `tokens` int32 [L], the prompt, and `references` int32 [L],
  the answer, padded with 0, in place of tokens, targets and loss_mask.
- `image` float32 [N, height, width, 3] with `pictures`: those of its rows in
  their order, and zeros up to the largest number N of an example.

For encoder-decoders, with S, L = `length`: `inputs` int32 [S], `targets` int32
[L] and `loss_mask` float32 [L]; if packed, also `inputs_segments` int32 [S] and
`targets_segments` int32 [L].

How a row becomes an example: `row_encoder.Encoder` makes its ids, `token_rows`
keeps them in a file, `Source._plan` cuts long rows and decides which rows share
an example, and `read` copies their ids into the arrays of a batch.
"""

import functools
import os
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
from bigtrain.data import digit_pairs
from bigtrain.data.formats import (
  arithmetic,
  documents,
  files,
  packing,
  pydoc_questions,
  row_encoder,
  row_pictures,
  splits,
  token_rows,
)
from bigtrain.pp import pixels
from bigtrain.text import pictures as text_pictures
from bigtrain.text import tokenizers

# Tokens of the first row that `first_example` shows.
_SHOWN_TOKENS = 1000
# Rows in which `_find_ends` looks for the tokens that end an answer.
_NUM_SAMPLED = 1000
_TOO_LONG = ("error", "drop", "left", "right")
_NAMED = {
  "pydoc": pydoc_questions.rows,
  "arithmetic": arithmetic.rows,
  "digits": digit_pairs.questions,
}
# rows_of(input) yields (place, row); an input is a file or one of _NAMED.
_RowsOf = Callable[[str], Iterator[tuple[Any, Any]]]


class Source:
  """The rows of one or more files; if packed, several make an example.

  Args:
    tokenizer: "bytes" or a path, such as the folder of a published model.
    length: tokens of an example; for encoder-decoders (inputs, targets).
    path: a file, a pattern, or a list of these.
    name: "pydoc", what the functions of Python's library are for;
      "arithmetic", additions of numbers below 100; or "digits", questions on
      two pictures of digits.
    split: split of these: "train", "test" (every tenth question) or "all".
    template: chat template, by default the one beside the tokenizer: a name
      (`chat.NAMES`), a file or a folder.
    variables: values for the template, such as dict(enable_thinking=False).
    date: date for templates that print today's, such as "2026-01-31".
    loss: which tokens of a conversation have a loss: the answers of the
      "assistant", the "last" of them, or "all".
    allow_special: whether messages may spell special tokens, such as "</s>",
      which then become these tokens.
    ignore_fields: fields of messages that are left out, such as ["name",
      "tool_calls.id"]. Others that the template does not write are refused.
    bos: whether the begin token precedes rows without a template; by default if
      the tokenizer adds it.
    pack: whether rows share examples (best fit, planned from their lengths).
    prefix: whether all tokens attend to the whole prompt, up to the first
      token with a loss; with pack, only models.vision_language does.
    pictures: folder of a published model whose processor prepares pictures, or
      a dict of text/pictures.py, such as dict(tokens=64, pp="resize(64)").
    references: whether examples are prompts, with their answers as references
      for evaluators.generate.
    preferences: whether rows have two answers. In pydoc, the rejected answer is
      a later sentence of the same documentation.
    too_long: what happens to rows longer than `length`: "error", "drop", or cut
      at the "left" or the "right".
    slice: slice of the rows, such as "[:99%]".
  """

  # Tokens of a decoder's row beyond `length`: the last one is only a target.
  _extra = 1

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
    ignore_fields: Sequence[str] = (),
    bos: bool | None = None,
    pack: bool = False,
    prefix: bool = False,
    pictures: str | Mapping[str, Any] | None = None,
    references: bool = False,
    preferences: bool = False,
    too_long: Literal["error", "drop", "left", "right"] = "error",
    slice: str = "",
  ):
    sizes = [length] if isinstance(length, int) else [*length]
    _check_length(length, sizes, loss == "all")
    flags = pack, prefix, pictures is not None, references, preferences
    _check_options(len(sizes) == 2, *flags)
    check_choice("supervised: loss", loss, ("assistant", "last", "all"))
    check_choice("supervised: too_long", too_long, _TOO_LONG)
    self._coder = tokenizers.get(tokenizer)
    self._pictures: text_pictures.Pictures | None = None
    if pictures is not None:
      key = "supervised: pictures"
      self._pictures = text_pictures.get(pictures, self._coder, key)
    encoder = row_encoder.Encoder(
      self._coder,
      template,
      variables,
      date,
      loss,
      bos,
      allow_special=allow_special,
      pairs=len(sizes) == 2,
      ignore_fields=ignore_fields,
      pictures=self._pictures,
    )
    self._sizes = sizes
    self._pairs = len(sizes) == 2  # For an encoder-decoder.
    self._pack, self._references = pack, references
    self._answers = 2 if preferences else 1
    inputs, rows_of, form = self._find_rows(path, name, split, preferences)
    if self._pictures is not None:
      rows_of = functools.partial(_with_folder, rows_of)
    key = files.digest(encoder.key, form) if form else encoder.key
    self._rows = token_rows.cached(encoder, key, inputs, rows_of)
    # The slice is one of pairs if rows have two answers.
    number = len(self._rows) // self._answers
    start, stop = splits.bounds(slice, number, "supervised: slice")
    self._plan(self._answers * start, self._answers * stop, too_long)
    self.tokenizer = tokenizer, self._coder.fingerprint()
    # Saved with the run: later prompts are written, and answers end, as here.
    self.prompts = {
      "bos": encoder.bos,
      "prefix": prefix,
      "template": template,
      "variables": dict(variables or {}),
      "ignore_fields": encoder.ignore_fields,
    }
    self.end_ids = self._find_ends()
    if self._pictures is not None:
      self.prompts["pictures"] = self._pictures._asdict()
    self._set_spec(prefix)
    options: list[Any] = [encoder.key, sizes, pack, too_long, slice, prefix]
    if references:
      options.append("references")
    self._digest = files.digest("supervised", self._rows.digest, *options)

  def _set_spec(self, prefix: bool) -> None:
    sizes, pack = self._sizes, self._pack
    names = ("inputs", "targets") if self._pairs else ("tokens", "targets")
    num_ids = self._coder.vocab_size
    if self._pictures is not None:
      num_ids = max(num_ids, self._pictures.token + 1)
    self.vocab_sizes = dict.fromkeys(names, num_ids)
    self.spec = _spec(sizes, pack)
    if self._references:
      self.spec = dict.fromkeys(("tokens", "references"), self.spec["tokens"])
    if prefix:
      self.spec["prefix"] = (np.dtype(np.int32), tuple(sizes) if pack else ())
    if self._pictures is not None:
      self._pixels = pixels.Pixels(self._pictures.pp)
      self.spec["image"] = (np.dtype(np.float32), self._image_shape())
    if self._answers == 2:
      self.spec = {k: (t, (2, *shape)) for k, (t, shape) in self.spec.items()}

  def _find_rows(self, *args: Any) -> tuple[list[str], _RowsOf, str]:
    """Returns `inputs` and `rows_of` of `token_rows.cached`.

    Also returns the form in which rows are used, if it is not the plain one.
    """
    inputs, rows_of = _inputs(*args)
    if self._answers == 1:
      return inputs, rows_of, ""
    # The two answers become two rows, one after the other.
    return inputs, functools.partial(_both_answers, rows_of), "two answers"

  def _spans_of(self, rows: np.ndarray) -> np.ndarray:
    """Returns [rows, 2 (parts), 2 (start, stop)]; decoders have one part."""
    return self._rows.spans(rows, self._pairs)

  def _plan(self, start: int, stop: int, too_long: str) -> None:
    """Cuts or drops long rows, and decides which rows an example has.

    Sets `_kept`, the numbers of the rows that are left, `_spans`, where their
    ids are, and `_items` and `_first`: example e has the kept rows
    _items[_first[e] : _first[e + 1]].
    """
    rows = np.arange(start, stop)
    spans = self._spans_of(rows)
    extra = 0 if self._pairs else self._extra
    room = np.asarray(self._sizes) + extra
    is_long = (np.diff(spans, axis=2)[..., 0] > room).any(axis=1)
    if is_long.any() and too_long == "error":
      first = int(np.flatnonzero(is_long)[0])
      sizes = np.diff(spans[first], axis=1)[:, 0] - extra
      raise DataError(
        f"{self._rows.where(rows[first])}: {' and '.join(map(str, sizes))} "
        f"tokens do not fit into length={self._sizes}, as in {is_long.sum()} "
        f"of {len(rows)} rows; give a larger length, or too_long='left', "
        "'right' (which cut there) or 'drop'."
      )
    if too_long == "left":
      spans[..., 0] = np.maximum(spans[..., 0], spans[..., 1] - room)
    else:
      spans[..., 1] = np.minimum(spans[..., 1], spans[..., 0] + room)
    keep = np.full(len(rows), True)
    if too_long == "drop":
      keep[is_long] = False
    for i in np.flatnonzero(is_long & keep):
      # A row is also left out if no token with a loss is left.
      first, last = spans[i, -1].tolist()
      first_target = first if self._pairs else first + 1
      _, trained = self._rows.read(first_target, last)
      keep[i] = trained.any()
      self._check_cut(rows[i], first, last)
    # Both answers of a pair stay, or none.
    keep = keep.reshape(-1, self._answers).all(axis=1).repeat(self._answers)
    if is_long.any():
      cut = ""
      if too_long != "drop":
        cut = f"{(is_long & keep).sum()} are cut at the {too_long}, "
      logging.warning(
        "supervised: %d of %d rows are longer than length=%s: %s%d left out.",
        is_long.sum(),
        len(rows),
        self._sizes,
        cut,
        (~keep).sum(),
      )
    self._kept, self._spans = rows[keep], spans[keep]
    if not len(self._kept):
      raise DataError("supervised: no row is left.")
    lengths = np.diff(self._spans, axis=2)[..., 0] - (not self._pairs)
    if self._pack:
      self._items, self._first = packing.best_fit(lengths, self._sizes)
      logging.info(
        "Packed %d rows into %d examples, %.1f%% full.",
        len(self._kept),
        len(self),
        100 * lengths.sum() / (len(self) * sum(self._sizes)),
      )
    else:
      self._items = np.arange(len(self._kept))
      self._first = np.arange(len(self._kept) + 1)

  def _image_shape(self) -> tuple[int, ...]:
    """Shape of the pictures of an example: as many as any example has."""
    counts = self._rows.num_pictures(self._kept)[self._items]
    most = int(np.add.reduceat(counts, self._first[:-1]).max())
    if not most:
      raise DataError("supervised: pictures: no row has any.")
    item = int(self._items[np.flatnonzero(counts)[0]])
    return (most, *self._pictures_of(item)[0].shape)

  def _pictures_of(self, item: int) -> list[np.ndarray]:
    """The pixels of a row's pictures, float32 [height, width, 3] each."""
    row = int(self._kept[item])
    try:
      kept = self._rows.pictures(row)
      return self._pixels([row_pictures.decoded(x) for x in kept])
    except DataError as e:
      raise DataError(f"{self._rows.where(row)}: {e}") from e

  def _check_cut(self, row: int, start: int, stop: int) -> None:
    """Refuses a row whose pictures are cut off."""
    if self._pictures is None:
      return
    try:
      # The last id of a row is only a target.
      ids, _ = self._rows.read(start, stop - 1)
      self._pictures.check(ids, len(self._rows.pictures(row)))
    except DataError as e:
      raise DataError(
        f"{self._rows.where(row)}: length={self._sizes} cuts off a picture, "
        f"which leaves {e} Give a larger length, or too_long='drop'."
      ) from e

  def __len__(self) -> int:
    return (len(self._first) - 1) // self._answers

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    if self._answers == 1:
      return self._examples(indices)
    # Pair i has examples 2 i and 2 i + 1.
    pairs = np.asarray(indices)[:, None] * 2 + np.arange(2)
    batch = self._examples(pairs.reshape(-1))
    return {name: x.reshape(len(pairs), 2, -1) for name, x in batch.items()}

  def _examples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    shapes = {name: (dtype, x[-1:]) for name, (dtype, x) in self.spec.items()}
    if "image" in self.spec:
      shapes["image"] = self.spec["image"]
    batch = {
      name: np.zeros((len(indices), *shape), dtype)
      for name, (dtype, shape) in shapes.items()
    }
    for b, index in enumerate(np.asarray(indices).tolist()):
      example = {
        name: array[b]
        for name, array in batch.items()
        if array.ndim > 1 and name != "image"
      }
      ends = [0] * len(self._sizes)  # Tokens so far, in each part.
      items = self._items[self._first[index] : self._first[index + 1]]
      for segment, item in enumerate(items.tolist(), start=1):
        self._fill(example, ends, segment, item)
      if "image" in batch:
        own = [x for item in items.tolist() for x in self._pictures_of(item)]
        for n, picture in enumerate(own):
          batch["image"][b, n] = picture
    if "prefix" in batch and not self._pack and not self._references:
      batch["prefix"][:] = (batch["loss_mask"] != 0).argmax(axis=1) + 1
    return batch

  def _fill(
    self,
    example: dict[str, np.ndarray],
    ends: list[int],
    segment: int,
    item: int,
  ) -> None:
    """Writes a row into an example, behind its `ends`, which move on."""
    parts = [self._rows.read(*span) for span in self._spans[item].tolist()]
    if self._references:
      ((ids, trained),) = parts
      prompt = int(trained.argmax())
      example["tokens"][:prompt] = ids[:prompt]
      example["references"][: len(ids) - prompt] = ids[prompt:]
      return
    weight = self._rows.weight[self._kept[item]]
    features: list[dict[str, Any]]
    if self._pairs:
      (inputs, _), (targets, trained) = parts
      features = [
        {"inputs": inputs, "inputs_segments": segment},
        {
          "targets": targets,
          "targets_segments": segment,
          "loss_mask": trained * weight,
        },
      ]
      lengths = [len(inputs), len(targets)]
    else:
      ((ids, trained),) = parts
      features = [
        {
          "tokens": ids[:-1],
          "targets": ids[1:],
          "loss_mask": trained[1:] * weight,
          "segments": segment,
          "positions": np.arange(len(ids) - 1),
          "prefix": np.arange(len(ids) - 1) < trained.argmax(),
        }
      ]
      lengths = [len(ids) - 1]
    for part, values in enumerate(features):
      start = ends[part]
      ends[part] += lengths[part]
      for name, value in values.items():
        if name in example:
          example[name][start : ends[part]] = value

  def _find_ends(self) -> list[int]:
    """Returns the special ids that end the answers of the first rows."""
    ends = set[int]()
    special = sorted(self._coder.special_ids)
    spans = self._rows.spans(self._kept[:_NUM_SAMPLED], self._pairs)
    for start, stop in spans[:, -1].tolist():
      ids, trained = self._rows.read(start, stop)
      specials = ids[trained & np.isin(ids, special)]
      ends.update(specials[-1:].tolist())
    return sorted(ends)

  def first_example(self) -> list[tuple[str, bool]]:
    """Returns the pieces of the first row's text: (text, has a loss)."""
    start, stop = self._spans[0].min(), self._spans[0].max()
    ids, trained = self._rows.read(start, min(stop, start + _SHOWN_TOKENS))
    if not self._pairs:
      trained[:1] = False  # The first token has no context to predict it from.
    cuts = np.flatnonzero(np.diff(trained)) + 1
    return [
      (self._coder.spell(piece), bool(has_loss[0]))
      for piece, has_loss in zip(np.split(ids, cuts), np.split(trained, cuts))
    ]

  def where(self, index: int) -> str:
    item = self._items[self._first[index * self._answers]]
    return self._rows.where(self._kept[item])

  def fingerprint(self) -> str:
    return self._digest


def _check_options(
  pairs: bool,
  pack: bool,
  prefix: bool,
  pictures: bool,
  references: bool,
  preferences: bool,
) -> None:
  wrong = {
    "prefix": prefix and (pairs or (pack and not pictures)),
    "preferences": preferences and (pairs or pack),
    "references": references and (pairs or pack or preferences),
  }
  for field, is_wrong in wrong.items():
    if is_wrong:
      raise ConfigError(
        f"supervised: {field}=True: expected pack=False and one length, of a "
        "decoder."
      )
  if pictures and (pairs or preferences):
    raise ConfigError(
      "supervised: pictures: expected one length, of a decoder, and "
      "preferences=False."
    )


def _check_length(length: Any, sizes: Sequence[int], loss_of_all: bool) -> None:
  for size in sizes:
    check_number("supervised: length", size, least=1, whole=True)
  if len(sizes) > 2 or (len(sizes) == 2 and loss_of_all):
    raise ConfigError(
      f"supervised: length={length!r}: expected one number, or those of "
      "inputs and targets, of which only targets have a loss."
    )


def _both_answers(rows_of: _RowsOf, name: str) -> Iterator[tuple[Any, Any]]:
  """Yields two rows for each pair: with the chosen and the rejected answer."""
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
      elif isinstance(answer, list):
        yield where, {"messages": answer, **rest}
      else:
        yield where, {"text": answer, **rest}


def _inputs(
  path: str | Sequence[str] | None,
  name: str | None,
  split: str | None,
  preferences: bool,
) -> tuple[list[str], _RowsOf]:
  """Returns the inputs, files or a name, and what yields their rows."""
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


def _spec(
  sizes: Sequence[int], pack: bool
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  if len(sizes) == 1:
    (length,) = sizes
    lengths = {"tokens": length, "targets": length}
    if pack:
      lengths |= {"segments": length, "positions": length}
  else:
    num_inputs, num_targets = sizes
    lengths = {"inputs": num_inputs, "targets": num_targets}
    if pack:
      lengths["inputs_segments"] = num_inputs
      lengths["targets_segments"] = num_targets
  int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
  spec = {name: (int32, (length,)) for name, length in lengths.items()}
  return {**spec, "loss_mask": (float32, (sizes[-1],))}


def _rows_of_file(path: str) -> Iterator[tuple[Any, dict[str, Any]]]:
  for where, row in documents.rows(path):
    row_encoder.check_texts(row, where)
    yield where, row


def _with_folder(rows_of: _RowsOf, name: str) -> Iterator[tuple[Any, Any]]:
  for where, row in rows_of(name):
    yield where, {**row, row_pictures.FOLDER: os.path.dirname(name)}
