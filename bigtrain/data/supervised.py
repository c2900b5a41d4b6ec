"""Prompts and conversations, with the answers that a model learns to write.

  dict(type="supervised", path="chats.jsonl", tokenizer="models/Qwen3-0.6B",
       length=2048, pack=True)

A file is .jsonl, .json (an array or lines), .parquet or .txt (one text), also
as .gz or .zst. The shape of a row is recognised by its fields, or given by
`rows`:

- "messages": `messages`, a list of dict(role=..., content=...), which a chat
  template writes (bigtrain/text/chat.py); with `tools` if there are any.
- "sharegpt": `conversations`, a list of dict(from=..., value=...).
- "prompt_completion": `prompt` and `completion`, two texts or two lists of
  messages; or several right completions, which together count as one example.
- "alpaca": `instruction`, `input` and `output`, which become Alpaca's published
  prompt and its answer; with "alpaca_chat", a question and an answer.
- "text": `text`, all of which has a loss.
- With the option `pictures`, rows may also have pictures: `images`, or parts
  {"type": "image", "path": ...} of messages; see formats/row_pictures.py.

With `preferences=True`:

- "preference": `chosen` and `rejected`, two completions of `prompt` or two
  whole conversations.
- "unpaired": `label`, whether a `completion` of `prompt` is wanted.

Any row may have `weight`, the weight of its loss, and a conversation may have
`system`, a system prompt. data/formats/row_shapes.py has the details. All rows
are read and checked before the first step, and their tokens are kept in the
user's cache folder.

The features of an example, with L = `length`:

- `tokens` int32 [L], `targets` int32 [L], the next token of each, and
  `loss_mask` float32 [L], the weight of each target. With `preferences=True`
  they are [2, L], the chosen answer first; or [1, L] with `label` int32, 1 if
  the answer is wanted: see tasks/preference.py.
- `segments` and `positions` int32 [L] if packed, as in data/tokens.py.
- `prefix` int32, the number of tokens of the prompt, for prefix language
  models; if packed, int32 [L], 1 for these tokens.
- `references=True`: `tokens` int32 [L], the prompt, and `references` int32 [L],
  the answer, padded with 0, in place of tokens, targets and loss_mask;
  `references=R`: `references` int32 [R, L], all answers of a row.
- `masks=True`: `mask_runs` int32 [R] and `mask_size` int32 [2], the right mask
  of a data set's row, see text/coco_masks.py.
- `image` float32 [N, height, width, 3] with `pictures`: the pictures of
  its rows in order, and zeros up to the largest number N of an example. For
  models that see a picture in roughly its own size, `image` is [N, P, values],
  patches followed by zeros, and `shapes` int32 [N, 2] has their numbers of rows
  and columns.

For encoder-decoders, with S, L = `length`: `inputs` int32 [S], `targets` int32
[L] and `loss_mask` float32 [L]; if packed, also `inputs_segments` int32 [S] and
`targets_segments` int32 [L].

How a row becomes an example: `row_encoder.Encoder` makes its ids, `token_rows`
keeps them in a file, `Source._plan` cuts long rows and decides which rows share
an example, and `read` copies their ids into the arrays of a batch.
`example_pictures` adds the pictures.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from absl import logging

from bigtrain.arrays import picture_features
from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  check_number,
)
from bigtrain.data import digit_pairs
from bigtrain.data.formats import (
  arithmetic,
  documents,
  example_pictures,
  files,
  packing,
  picture_sets,
  pydoc_questions,
  row_encoder,
  row_shapes,
  splits,
  token_rows,
)
from bigtrain.pp import mask_codes, pixels
from bigtrain.text import coco_masks, tokenizers
from bigtrain.text import pictures as text_pictures

# Tokens of the first row that `first_example` shows.
_SHOWN_TOKENS = 1000
# Rows in which `_find_ends` looks for the tokens that end an answer.
_NUM_SAMPLED = 1000
_TOO_LONG = ("error", "drop", "left", "right")
_NAMED = {
  "pydoc": pydoc_questions.rows,
  "arithmetic": arithmetic.rows,
  "digits": digit_pairs.questions,
  "digit_scenes": digit_pairs.scenes,
}
# rows_of(input) yields (place, row); an input is a file or one of _NAMED.
_RowsOf = Callable[[str], Iterator[tuple[Any, Any]]]


class Source:
  """The rows of one or more files. With `pack`, rows share examples.

  Args:
    tokenizer: "bytes" or a path, such as the folder of a published model; or
      dict(path=..., new_tokens=[...], new_special_tokens=[...]).
    length: tokens of an example; for encoder-decoders (inputs, targets).
    path: a file, a pattern, a folder of files of one kind, or a list of these.
    name: built-in data: "pydoc", questions about functions of Python's library;
      "arithmetic", additions of numbers below 100; "digits", questions on two
      pictures of digits; or "digit_scenes", questions on one picture of two
      digits, some of which ask for boxes.
    split: split of built-in data: "train", "test" (every tenth question) or
      "all".
    dataset: a published data set of pictures, in its original files:
      dict(name=...) and arguments of formats/picture_sets.py.
    template: chat template, by default the one in the tokenizer's folder: a
      name (`chat.NAMES`), a file or a folder.
    variables: values for the template, such as dict(enable_thinking=False).
    date: date for templates that print today's, such as "2026-01-31".
    loss: which tokens of a conversation have a loss: the answers of the
      "assistant", the "last" of them, or "all".
    allow_special: whether messages may contain special tokens, such as "</s>",
      which then become these tokens. In plain texts they remain text, except
      for the tokenizer's new_special_tokens.
    ignore_fields: fields of messages that are left out, such as ["name",
      "tool_calls.id"]. Others that the template does not write are refused.
    bos: whether the begin token precedes rows without a template; by default it
      does if the tokenizer adds it.
    pack: whether rows share examples (best fit, planned from their lengths).
    prefix: whether all tokens attend to the whole prompt, up to the first token
      with a loss; with pack, only models.vision_language does.
    rows: shape of the rows, as above; by default recognised by a row's fields.
    pictures: folder of a published model whose processor prepares pictures, or
      a dict of text/pictures.py, such as dict(tokens=64, pp="resize(64)").
    references: whether examples are prompts, with their answers as references
      for evaluators.generate. With True, a row with several answers becomes
      several examples; with a number, it becomes one example with at most that
      many references.
    masks: whether the reference masks of "coco_segmentation" are features.
    preferences: whether rows have two answers, or a judgement of one answer. In
      pydoc, the rejected answer is a later sentence of the same docstring.
    too_long: what happens to rows longer than `length`: "error", "drop", or cut
      at the "left" or the "right".
    skip_errors: number of rows that may be refused and left out; the log counts
      them.
    slice: slice of the rows, such as "[:99%]".
  """

  # Tokens of a decoder's row beyond `length`: the last one is only a target.
  _extra = 1
  # Whether a question of a data set is one row, whoever answered it.
  _one_row_per_prompt = False

  def __init__(
    self,
    tokenizer: tokenizers.Spec,
    length: int | Sequence[int],
    path: str | Sequence[str] | None = None,
    *,
    name: str | None = None,
    split: str | None = None,
    dataset: Mapping[str, Any] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    date: str | None = None,
    loss: Literal["assistant", "last", "all"] = "assistant",
    allow_special: bool = False,
    ignore_fields: Sequence[str] = (),
    bos: bool | None = None,
    pack: bool = False,
    prefix: bool = False,
    rows: str | None = None,
    pictures: str | Mapping[str, Any] | None = None,
    references: bool | int = False,
    masks: bool = False,
    preferences: bool = False,
    too_long: Literal["error", "drop", "left", "right"] = "error",
    skip_errors: int = 0,
    slice: str = "",
  ):
    sizes = _checked_sizes(length, loss, too_long, skip_errors)
    self._coder = tokenizers.get(tokenizer)
    self._pictures = self._find_pictures(pictures)
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
    # Number of answers that an example has together; 0 if they are apart.
    self._together = 0 if isinstance(references, bool) else references
    self._picture_set = self._find_set(dataset, masks)
    shapes = row_shapes.Reader(
      rows,
      preferences=preferences,
      has_template=encoder.has_template,
      repeats=self._together > 0,
    )
    preferences = shapes.preferences
    flags = pack, prefix, preferences, bool(references), pictures is not None
    _check_together(sizes, *flags)
    self._sizes = sizes
    self._pairs = len(sizes) == 2  # For an encoder-decoder.
    self._pack, self._references = pack, bool(references)
    found = self._find_rows(path, name, split, preferences, shapes.key)
    self._rows = self._encoded(shapes, encoder, skip_errors, *found)
    self._log_rows()
    self._images = self._image_features()
    self._is_judged = bool((self._rows.label >= 0).all())
    self._answers = 2 if preferences and not self._is_judged else 1
    self._plan(self._chosen_by(slice), too_long)
    self._log_labels()
    self.tokenizer = self._coder.name, self._coder.fingerprint()
    # Saved with the run, so that prompts are written later as in training, and
    # answers end at the same tokens.
    self.prompts = self._prompt_options(encoder, prefix, template, variables)
    self.end_ids = self._find_ends()
    self.vocab_sizes = self._numbers_of_ids()
    self.spec = self._spec(prefix, preferences, masks)
    options = encoder.key, sizes, pack, too_long, slice, prefix
    self._digest = self._digest_of(*options)

  def _find_pictures(self, spec: Any) -> text_pictures.Pictures | None:
    if spec is None:
      return None
    return text_pictures.get(spec, self._coder, "supervised: pictures")

  def _find_set(
    self, dataset: Mapping[str, Any] | None, masks: bool
  ) -> picture_sets.Set | None:
    if dataset is None:
      if masks:
        raise ConfigError("supervised: masks=True: expected dataset=dict(...).")
      return None
    if self._pictures is None:
      raise ConfigError("supervised: dataset: expected pictures=FOLDER.")
    together = self._one_row_per_prompt or self._together > 0
    found = picture_sets.open_set(
      dataset,
      first=self._pictures.first,
      together=together,
      mask_coder=mask_codes.load,
    )
    if masks and found.masks_of is None:
      raise ConfigError(
        f"supervised: masks=True: expected the data set 'coco_segmentation', "
        f"got {dataset['name']!r}."
      )
    return found

  def _find_rows(
    self,
    path: str | Sequence[str] | None,
    name: str | None,
    split: str | None,
    preferences: bool,
    form: str,
  ) -> tuple[list[str], _RowsOf, str]:
    """Returns `inputs` and `rows_of` of `token_rows.cached`, and a form.

    The form in which rows are used is "" for the plain one.
    """
    if self._picture_set is None:
      return *_inputs(path, name, split, preferences), form
    if path is not None or name is not None:
      raise ConfigError("supervised: expected path, name or dataset, got two.")
    inputs, rows_of, key, _ = self._picture_set
    rows_of = functools.partial(row_encoder.checked_rows, rows_of=rows_of)
    return inputs, rows_of, f"{form} {key}"

  def _encoded(
    self,
    shapes: row_shapes.Reader,
    encoder: row_encoder.Encoder,
    skip_errors: int,
    inputs: list[str],
    rows_of: _RowsOf,
    form: str,
  ) -> token_rows.Rows:
    """Returns the ids of all rows, made now or for an earlier run."""
    encode = functools.partial(row_encoder.encode_all, shapes, encoder)
    if self._pictures is not None:
      rows_of = functools.partial(row_encoder.with_folder, rows_of)
    key = files.digest(encoder.key, form) if form else encoder.key
    return token_rows.cached(
      encode, key, inputs, rows_of, shapes.counts, skip_errors
    )

  def _log_rows(self) -> None:
    counts = self._rows.counts
    logging.info("supervised: rows: %s", counts["summary"])
    if counts["num_refused"]:
      logging.warning(
        "supervised: refused rows are left out (%d): %s",
        counts["num_refused"],
        " ".join(counts["refused"]),
      )

  def _image_features(self) -> example_pictures.ExamplePictures | None:
    if self._pictures is None:
      return None
    prepare = pixels.Pixels(self._pictures.pp, self._pictures.pp_several)
    return example_pictures.ExamplePictures(
      self._pictures, self._rows, prepare, pixels.fill
    )

  def _chosen_by(self, slice: str) -> np.ndarray:
    """Returns the numbers of the rows of a slice; a pair is one example."""
    key = "supervised: slice"
    if self._together:
      all_rows = np.arange(len(self._rows))
      begins = [*self._rows.first_of_each(all_rows), len(all_rows)]
      start, stop = splits.bounds(slice, len(begins) - 1, key)
      return all_rows[begins[start] : begins[stop]]
    number = len(self._rows) // self._answers
    start, stop = splits.bounds(slice, number, key)
    return np.arange(start * self._answers, stop * self._answers)

  def _plan(self, rows: np.ndarray, too_long: str) -> None:
    """Cuts or drops long rows, and decides which rows an example has.

    Sets `_kept`, the numbers of the rows that are left, `_spans`, where their
    ids are, and `_items` and `_first`: example e has the kept rows
    _items[_first[e] : _first[e + 1]].
    """
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
      raise DataError(
        f"supervised: no row is left: {is_long.sum()} of {len(rows)} rows are "
        f"longer than length={self._sizes}; others have no token with a loss."
      )
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
      if self._together:
        begins = self._rows.first_of_each(self._kept)
        self._first = np.append(begins, len(self._kept))

  def _spans_of(self, rows: np.ndarray) -> np.ndarray:
    """Returns [rows, parts, 2 (start and stop)]: 2 parts, or 1 for decoders."""
    return self._rows.spans(rows, self._pairs)

  def _check_cut(self, row: int, start: int, stop: int) -> None:
    """Refuses a row whose pictures are cut off."""
    if self._images is None:
      return
    # The last id of a row is only a target, where there are targets.
    ids, _ = self._rows.read(start, stop - self._extra)
    try:
      self._images.check_whole(row, ids, self._coder)
    except DataError as e:
      raise DataError(
        f"{self._rows.where(row)}: length={self._sizes} cuts off a picture, "
        f"which leaves {e} Give a larger length, or too_long='drop'."
      ) from e

  def _log_labels(self) -> None:
    """Warns if KTO's default weights do not suit the judgements."""
    if not self._is_judged:
      return
    labels = self._rows.label[self._kept]
    wanted, unwanted = int(labels.sum()), int((labels == 0).sum())
    if not (wanted and unwanted):
      kind = "wanted" if wanted else "unwanted"
      logging.warning(
        "supervised: all %d answers are %s: a model learns nothing of the "
        "others.",
        len(labels),
        kind,
      )
      return
    # arXiv 2402.01306, equation 8: weight x number of the wanted answers should
    # be 1 to 4/3 times the same product for the others.
    ratio = wanted / unwanted
    if not 1 <= ratio <= 4 / 3:
      logging.warning(
        "supervised: %d answers are wanted and %d are not; for KTO, give "
        "config.loss.undesirable from %.3g to %.3g, or desirable from %.3g to "
        "%.3g.",
        wanted,
        unwanted,
        ratio * 3 / 4,
        ratio,
        1 / ratio,
        4 / 3 / ratio,
      )

  def _prompt_options(
    self,
    encoder: row_encoder.Encoder,
    prefix: bool,
    template: str | None,
    variables: Mapping[str, Any] | None,
  ) -> dict[str, Any]:
    options = {
      "bos": encoder.bos,
      "prefix": prefix,
      "template": template,
      "variables": dict(variables or {}),
      "ignore_fields": encoder.ignore_fields,
    }
    if self._pictures is not None:
      options["pictures"] = self._pictures._asdict()
    return options

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

  def _numbers_of_ids(self) -> dict[str, int]:
    names = ("inputs", "targets") if self._pairs else ("tokens", "targets")
    number = self._coder.vocab_size
    if self._pictures is not None:
      number = max(number, self._pictures.token + 1)
    return dict.fromkeys(names, number)

  def _spec(
    self, prefix: bool, preferences: bool, masks: bool
  ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    answers = self._answers if preferences else None
    result = _spec_of_tokens(self._sizes, self._pack, answers)
    if self._references:
      result = dict.fromkeys(("tokens", "references"), result["tokens"])
      if self._together:
        dtype, shape = result["references"]
        result["references"] = dtype, (self._together, *shape)
    int32 = np.dtype(np.int32)
    if prefix:
      shape = tuple(self._sizes) if self._pack else ()
      result["prefix"] = (int32, shape if answers is None else (answers,))
    if self._is_judged:
      result["label"] = (int32, ())
    self._masks = self._find_masks() if masks else {}
    if self._masks:
      longest = max(len(runs) for runs, _ in self._masks.values())
      result["mask_runs"] = (int32, (longest,))
      result["mask_size"] = (int32, (2,))
    if self._images is not None:
      items, first = self._items, self._first
      if self._together:  # Answers to a prompt share the pictures of the first.
        items, first = items[first[:-1]], np.arange(len(first))
      result |= self._images.spec(self._kept, items, first)
    return result

  def _find_masks(self) -> dict[tuple[str, int], tuple[np.ndarray, Any]]:
    """{(file, number of the row): (run lengths of its mask, its size)}."""
    assert self._picture_set is not None
    masks_of = self._picture_set.masks_of
    assert masks_of is not None
    if self._pack or self._answers == 2:
      raise ConfigError("supervised: masks=True: expected pack=False.")
    needed: dict[str, set[int]] = {}
    for row in self._kept.tolist():
      file, number = self._rows.entry(row)
      needed.setdefault(file, set()).add(number)
    result = {}
    for file, numbers in needed.items():
      first = itertools.islice(masks_of(file), max(numbers) + 1)
      for number, mask in enumerate(first):
        if number in numbers:
          result[file, number] = coco_masks.runs(mask), mask.shape
    return result

  def _digest_of(self, *options: Any) -> str:
    # Newer options count only if they are used, so that older runs can be
    # continued.
    new_options: list[Any] = row_shapes.new_forms(self._rows.counts)
    new_options += ["references"] * self._references
    new_options += [self._together] * (self._together > 0)
    return files.digest("supervised", self._rows.digest, *options, *new_options)

  def __len__(self) -> int:
    return (len(self._first) - 1) // self._answers

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    if self._answers == 2:
      # Pair i has examples 2 i and 2 i + 1, of a row each.
      indices = np.asarray(indices)[:, None] * 2 + np.arange(2)
      batch = self._examples(indices.reshape(-1))
      pairs = {
        name: x.reshape(len(indices), 2, *x.shape[1:])
        for name, x in batch.items()
      }
      items = self._items[self._first[indices]].tolist()
      if self._images is not None:
        for pair in items:
          self._images.check_same(self._kept[pair].tolist())
      return pairs | self.pictures_of_examples([pair[:1] for pair in items])
    batch = self._examples(indices)
    if self._is_judged:
      batch = {name: x[:, None] for name, x in batch.items()}
      rows = self._kept[self._items[self._first[np.asarray(indices)]]]
      batch["label"] = self._rows.label[rows].astype(np.int32)
    items = [
      self._items[self._first[i] : self._first[i + 1]].tolist()
      for i in np.asarray(indices).tolist()
    ]
    if self._together:
      items = [own[:1] for own in items]
    if self._masks:
      found = [
        self._masks[self._rows.entry(self._kept[own[0]])] for own in items
      ]
      for b, (runs, size) in enumerate(found):
        batch["mask_runs"][b, : len(runs)] = runs
        batch["mask_size"][b] = size
    return batch | self.pictures_of_examples(items)

  def _examples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    shapes = {name: (dtype, x[-1:]) for name, (dtype, x) in self.spec.items()}
    if self._together:
      shapes["references"] = self.spec["references"]
    if self._answers == 2 or self._is_judged:
      shapes.pop("label", None)
      if "prefix" in shapes:  # Of each answer.
        shapes["prefix"] = self.spec["prefix"][0], ()
    batch = {
      name: np.zeros((len(indices), *shape), dtype)
      for name, (dtype, shape) in shapes.items()
      if name not in picture_features.NAMES
    }
    for b, index in enumerate(np.asarray(indices).tolist()):
      example = {name: x[b] for name, x in batch.items() if x.ndim > 1}
      ends = [0] * len(self._sizes)  # Tokens so far, in each part.
      items = self._items[self._first[index] : self._first[index + 1]]
      for segment, item in enumerate(items.tolist(), start=1):
        self._fill(example, ends, segment, item)
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
    """Writes a row into an example at `ends`, and moves these on."""
    parts = [self._rows.read(*span) for span in self._spans[item].tolist()]
    if self._references:
      ((ids, trained),) = parts
      prompt = int(trained.argmax())
      example["tokens"][:prompt] = ids[:prompt]
      if not self._together:
        example["references"][: len(ids) - prompt] = ids[prompt:]
      elif segment <= self._together:
        answer = example["references"][segment - 1]
        answer[: len(ids) - prompt] = ids[prompt:]
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

  def pictures_of_examples(
    self, items: Sequence[Sequence[int]]
  ) -> dict[str, np.ndarray]:
    """Returns the features of pictures, given the kept rows of each example."""
    if self._images is None:
      return {}
    rows = [self._kept[[*own]].tolist() for own in items]
    return self._images.read(rows, picture_features.of(self.spec))

  def first_example(self) -> list[tuple[str, bool]]:
    """Returns the pieces of the first row's text: (text, has a loss)."""
    start, stop = self._spans[0].min(), self._spans[0].max()
    ids, trained = self._rows.read(start, min(stop, start + _SHOWN_TOKENS))
    if not self._pairs:
      trained[:1] = False  # The first token has no context to predict it from.
    return row_encoder.pieces(self._coder, ids, trained)

  def where(self, index: int) -> str:
    item = self._items[self._first[index * self._answers]]
    return self._rows.where(self._kept[item])

  def fingerprint(self) -> str:
    return self._digest


def _checked_sizes(
  length: Any, loss: str, too_long: str, skip_errors: int
) -> list[int]:
  """Checks `length` and some other options; returns `length` as a list."""
  sizes = [length] if isinstance(length, int) else [*length]
  for size in sizes:
    check_number("supervised: length", size, least=1, whole=True)
  if len(sizes) > 2 or (len(sizes) == 2 and loss == "all"):
    raise ConfigError(
      f"supervised: length={length!r}: expected one number, or those of "
      "inputs and targets, of which only targets have a loss."
    )
  check_number("supervised: skip_errors", skip_errors, least=0, whole=True)
  check_choice("supervised: loss", loss, ("assistant", "last", "all"))
  check_choice("supervised: too_long", too_long, _TOO_LONG)
  return sizes


def _check_together(
  sizes: Sequence[int],
  pack: bool,
  prefix: bool,
  preferences: bool,
  references: bool,
  has_pictures: bool,
) -> None:
  """Refuses options that do not go together."""
  is_pair = len(sizes) == 2
  if has_pictures and is_pair:
    raise ConfigError(
      "supervised: pictures: expected one length, of a decoder."
    )
  wrong = {
    # With pictures, vision_language reads packed prefixes.
    "prefix": prefix and (is_pair or (pack and not has_pictures)),
    "preferences": preferences and (is_pair or pack),
    "references": references and (is_pair or pack or preferences),
  }
  for field, is_wrong in wrong.items():
    if is_wrong:
      raise ConfigError(
        f"supervised: {field}=True: expected pack=False and one length, of a "
        "decoder."
      )


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
    found = documents.find(path, "supervised: path")
    return found, row_encoder.checked_rows
  rows = _NAMED[check_choice("supervised: name", name, _NAMED)]
  part = split or "train"
  check_choice("supervised: split", part, pydoc_questions.SPLITS)
  return [f"{name} {part}"], lambda _: rows(part, preferences)


def _spec_of_tokens(
  sizes: Sequence[int], pack: bool, answers: int | None
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
  outer = () if answers is None else (answers,)
  spec = {name: (int32, (*outer, length)) for name, length in lengths.items()}
  return {**spec, "loss_mask": (float32, (*outer, sizes[-1]))}
