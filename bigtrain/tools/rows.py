"""Shows what training makes of files with texts, before it begins.

  python -m bigtrain.tools.rows chats.jsonl --tokenizer=models/SmolLM2 \\
      --length=1024 --html=chats.html

It reads the rows as the source `supervised` does, and prints their shapes, the
rows that training would refuse, a histogram of their lengths, the share that
`--length` would cut, equal rows, pairs whose answers are equal, and examples,
in which what has a loss is in [[ ]]. --html writes the same as a page.

Exit codes: 0; 2 for wrong arguments, or if no row can be read; 1 otherwise.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data.formats import (
  documents,
  row_encoder,
  row_shapes,
  token_rows,
)
from bigtrain.files import paths
from bigtrain.text import pictures as text_pictures
from bigtrain.text import tokenizers
from bigtrain.tools import arguments, exits

# Refused rows, and pairs of equal rows, that are listed.
_NUM_LISTED = 5
# Tokens of a text that an example shows.
_SHOWN_TOKENS = 600
# Lengths that models are often trained with.
_USUAL_LENGTHS = tuple(1 << n for n in range(7, 18))
# Columns of the longest bar.
_BAR_WIDTH = 40

_NONE: Any = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))


class Text(NamedTuple):
  """A text of an example."""

  name: str  # Of the answer, such as "chosen"; "" if there is one.
  num_tokens: int
  num_trained: int  # Of those, tokens with a loss.
  pieces: list[tuple[str, bool]]  # Its beginning, see `row_encoder.pieces`.
  num_hidden: int  # Tokens after the beginning.


class Example(NamedTuple):
  """A row as it is trained."""

  where: str
  texts: list[Text]


@dataclasses.dataclass
class Survey:
  """Statistics of the rows of files."""

  files: list[str]
  settings: dict[str, Any]  # Arguments of the source.
  length: int | None
  num_rows: int = 0  # Those that can be read.
  num_refused: int = 0
  refused: list[str] = dataclasses.field(default_factory=list)
  shapes: str = ""
  is_limited: bool = False  # Whether rows were left unread.
  # Of each text, of which a pair has two.
  lengths: np.ndarray = _NONE
  row_of_text: np.ndarray = _NONE
  trained: np.ndarray = _NONE
  trained_within: np.ndarray = _NONE
  num_duplicates: int = 0
  duplicates: list[str] = dataclasses.field(default_factory=list)
  num_equal_answers: int = 0
  equal_answers: list[str] = dataclasses.field(default_factory=list)
  is_pairs: bool = False
  wanted: int = 0
  unwanted: int = 0
  examples: list[Example] = dataclasses.field(default_factory=list)


def survey(
  path: str | Sequence[str],
  tokenizer: str,
  *,
  length: int | None = None,
  rows: str | None = None,
  preferences: bool = False,
  limit: int | None = None,
  num_examples: int = 3,
  template: str | None = None,
  variables: dict[str, Any] | None = None,
  loss: Any = "assistant",
  ignore_fields: Sequence[str] = (),
  allow_special: bool = False,
  pictures: str | None = None,
  bos: bool | None = None,
) -> Survey:
  """Reads the rows of files, or the first `limit` of them.

  data/supervised.py describes the other arguments. Pairs are recognised
  without `preferences`.
  """
  coder = tokenizers.get(tokenizer)
  prepared = None
  if pictures is not None:
    prepared = text_pictures.get(pictures, coder, "--pictures")
  encoder = row_encoder.Encoder(
    coder,
    template,
    variables,
    None,
    loss,
    bos,
    allow_special=allow_special,
    pairs=False,
    ignore_fields=ignore_fields,
    pictures=prepared,
  )
  files = documents.find(path, "FILE")
  rows_of: Any = row_encoder.checked_rows
  if prepared is not None:
    rows_of = functools.partial(row_encoder.with_folder, rows_of)
  contents = itertools.chain.from_iterable(map(rows_of, files))
  first = next(contents, None)
  if first is None:
    raise DataError(f"{', '.join(files[:_NUM_LISTED])}: no rows.")
  contents = itertools.chain([first], contents)
  if rows is None and row_shapes.is_pair(first[1]):
    preferences = True
  shapes = row_shapes.Reader(
    rows, preferences=preferences, has_template=encoder.has_template
  )
  given = dict(
    path=path if isinstance(path, str) or len(path) > 1 else path[0],
    tokenizer=tokenizer,
    length=length,
    rows=rows,
    preferences=shapes.preferences or None,
    template=template,
    variables=variables,
    loss=None if loss == "assistant" else loss,
    ignore_fields=list(ignore_fields) or None,
    allow_special=allow_special or None,
    pictures=pictures,
    bos=bos,
  )
  settings = {key: x for key, x in given.items() if x is not None}
  result = Survey(files, settings, length)
  counter = _Counter(result, coder, num_examples)
  for where, content in itertools.islice(contents, limit):
    try:
      counter.add(
        where, row_encoder.encode_all(shapes, encoder, content, where)
      )
    except DataError as e:
      counter.refuse(str(e))
  counter.finish(shapes)
  result.is_limited = next(contents, None) is not None
  return result


class _Counter:
  """Adds rows to a survey."""

  def __init__(
    self, result: Survey, coder: tokenizers.Tokenizer, num_examples: int
  ):
    self._result, self._coder = result, coder
    self._num_examples = num_examples
    self._texts: list[tuple[int, int, int, int]] = []
    self._seen: dict[
      bytes, Any
    ] = {}  # Places of rows by a digest of their ids.

  def refuse(self, message: str) -> None:
    self._result.num_refused += 1
    if len(self._result.refused) < _NUM_LISTED:
      self._result.refused.append(message)

  def add(self, where: Any, texts: Sequence[token_rows.Row]) -> None:
    result = self._result
    room = result.length
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
      # A decoder's first id is no target, and its last one is only a target.
      targets = text.trained[1:]
      within = int(targets[:room].sum())
      number = int(targets.sum())
      self._texts.append((result.num_rows, len(targets), number, within))
      digest.update(text.ids.tobytes() + bytes([text.label + 1, 0]))
      digest.update(repr(text.pictures).encode())
    is_pair = result.settings.get("preferences") and len(texts) == 2
    if is_pair and np.array_equal(texts[0].ids, texts[1].ids):
      result.num_equal_answers += 1
      if len(result.equal_answers) < _NUM_LISTED:
        result.equal_answers.append(str(where))
    earlier = self._seen.setdefault(digest.digest(), where)
    if earlier is not where:
      result.num_duplicates += 1
      if len(result.duplicates) < _NUM_LISTED:
        result.duplicates.append(f"{where} equals {earlier}")
    if len(result.examples) < self._num_examples:
      names = ("chosen", "rejected") if is_pair else [""] * len(texts)
      if texts[0].label >= 0:
        names = ["wanted" if texts[0].label else "not wanted"]
      result.examples.append(
        Example(str(where), [*map(self._text, names, texts)])
      )
    result.wanted += texts[0].label == 1
    result.unwanted += texts[0].label == 0
    result.is_pairs |= bool(is_pair)
    result.num_rows += 1

  def _text(self, name: str, text: token_rows.Row) -> Text:
    trained = text.trained.copy()
    trained[0] = False  # It has no context to predict it from.
    shown = slice(0, _SHOWN_TOKENS)
    return Text(
      name,
      len(text.ids) - 1,
      int(trained.sum()),
      row_encoder.pieces(self._coder, text.ids[shown], trained[shown]),
      max(0, len(text.ids) - _SHOWN_TOKENS),
    )

  def finish(self, shapes: row_shapes.Reader) -> None:
    result = self._result
    columns = np.asarray(self._texts, np.int64).reshape(-1, 4).T
    result.row_of_text, result.lengths = columns[0], columns[1]
    result.trained, result.trained_within = columns[2], columns[3]
    result.shapes = shapes.summary()


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
  """Returns (from, to, number of lengths), both bounds included.

  Bounds are powers of two and the numbers in the middle between them.
  """
  if not len(lengths):
    return []
  bounds = [0, 1]
  while bounds[-1] <= lengths.max():
    power = 1 << (len(bounds) // 2)
    bounds.append(power if len(bounds) % 2 == 0 else power + power // 2)
  bounds = sorted(set(bounds))
  counts = np.histogram(lengths, bounds)[0].tolist()
  bins = [
    (low, high - 1, count)
    for low, high, count in zip(bounds[:-1], bounds[1:], counts)
  ]
  filled = [i for i, (_, _, count) in enumerate(bins) if count]
  return bins[filled[0] : filled[-1] + 1]


def facts(found: Survey) -> list[tuple[str, str]]:
  """Returns what was found as (name, text)."""
  lengths = found.lengths
  result = [
    ("Rows", f"{found.num_rows:,}" + " (the first)" * found.is_limited),
    ("Shapes", found.shapes or "none"),
    ("Refused", _number_of(found.num_refused, "row")),
  ]
  if not found.num_rows:
    return result
  total = int(lengths.sum())
  result += [
    (
      "Tokens",
      f"{total:,}, of which {found.trained.sum() / total:.1%} have a loss",
    ),
    (
      "Lengths",
      f"{lengths.min():,} to {lengths.max():,} tokens; half of the texts have "
      f"at most {int(np.median(lengths)):,}, and 95% at most "
      f"{int(np.quantile(lengths, 0.95, method='higher')):,}",
    ),
    ("Cut", " ".join(_cuts(found))),
    ("Equal to an earlier row", _number_of(found.num_duplicates, "row")),
  ]
  if found.is_pairs:
    equal = _number_of(found.num_equal_answers, "pair")
    result.append(("Answers that are equal", equal))
  if found.wanted + found.unwanted:
    labels = f"{found.wanted:,} wanted, {found.unwanted:,} unwanted"
    if not (found.wanted and found.unwanted):
      labels += "; a model learns nothing of the other kind"
    result.append(("Labels", labels))
  return result


def _cuts(found: Survey) -> Iterator[str]:
  """Yields sentences about what a length would cut."""
  if found.length is not None:
    share = _share_cut(found, found.length)
    yield f"--length={found.length:,} is too short for {share} of the rows."
    lost = int((found.trained - found.trained_within).sum())
    if lost:
      lost_share = lost / found.trained.sum()
      yield (
        f"too_long='right' would lose {lost:,} tokens with a loss "
        f"({lost_share:.1%})."
      )
    return
  longest = found.lengths.max()
  for length in _USUAL_LENGTHS:
    if found.lengths.min() < length < longest:
      yield f"A length of {length:,} cuts {_share_cut(found, length)}."
  yield f"A length of {longest:,} cuts none."


def _share_cut(found: Survey, length: int) -> str:
  is_long = found.lengths > length
  number = len(np.unique(found.row_of_text[is_long]))
  return f"{number / found.num_rows:.1%} ({number:,})"


def _number_of(number: int, noun: str) -> str:
  return f"{number:,} {noun}{'s' * (number != 1)}" if number else "none"


def config_of(found: Survey) -> str:
  """Returns the source of a config that reads the rows."""
  settings = {"length": int(found.lengths.max(initial=1))} | found.settings
  if (found.lengths > settings["length"]).any():
    settings["too_long"] = "right"
  if found.num_refused and found.num_rows:
    settings["skip_errors"] = found.num_refused
  ordered = ["path", "tokenizer", "length"]
  ordered += [name for name in settings if name not in ordered]
  words = ", ".join(f"{name}={settings[name]!r}" for name in ordered)
  return f'dict(type="supervised", {words})'


def as_text(found: Survey) -> str:
  """Returns the survey for a terminal."""
  lines = [f"{', '.join(found.files[:_NUM_LISTED])}"]
  known = facts(found)
  width = max(len(name) for name, _ in known) + 1
  lines += [f"{name + ':':<{width}} {text}" for name, text in known]
  for title, listed in _lists(found):
    lines += ["", f"{title}:", *(f"  {line}" for line in listed)]
  bins = histogram(found.lengths)
  if bins:
    most = max(count for _, _, count in bins)
    lines += ["", "Texts by their number of tokens:"]
    for low, high, count in bins:
      bar = "#" * -(-_BAR_WIDTH * count // most)
      lines.append(f"{low:>9,} - {high:<9,} {bar} {count:,}")
  for example in found.examples:
    for text in example.texts:
      title = f"{example.where}{', ' + text.name if text.name else ''}"
      lines.append("")
      lines.append(
        f"{title}: {text.num_tokens:,} tokens, {text.num_trained:,} with a loss"
      )
      lines.append(
        "".join(f"[[{x}]]" if loss else x for x, loss in text.pieces)
      )
      if text.num_hidden:
        lines.append(f"... and {text.num_hidden:,} more tokens")
  if found.num_rows:
    lines += ["", "In a config:", f"  config.input.data = {config_of(found)}"]
  return "\n".join(lines)


def _lists(found: Survey) -> list[tuple[str, list[str]]]:
  """Returns (title, lines) of rows that deserve a look."""
  lists = [
    ("Refused rows", found.refused, found.num_refused),
    ("Equal rows", found.duplicates, found.num_duplicates),
    ("Equal answers", found.equal_answers, found.num_equal_answers),
  ]
  return [
    (title if total == len(listed) else f"{title}, the first", listed)
    for title, listed, total in lists
    if listed
  ]


def as_page(found: Survey) -> str:
  """Returns the survey as an HTML page that needs no other file."""
  # Imports jinja2, which not every environment has.
  from bigtrain.tools.report import markup

  bins = histogram(found.lengths)
  return markup.render(
    "rows.jinja",
    title=", ".join(found.files[:_NUM_LISTED]),
    facts=facts(found),
    lists=_lists(found),
    bins=bins,
    most=max((count for _, _, count in bins), default=1),
    length=found.length,
    examples=found.examples,
    config=config_of(found) if found.num_rows else "",
    style=markup.read("page.css"),
  )


def _parser() -> arguments.Parser:
  parser = arguments.Parser("rows", __doc__)
  parser.add_argument(
    "file",
    nargs="+",
    help="files, patterns or folders: .jsonl, .json, .parquet, .txt",
  )
  parser.add_argument(
    "--tokenizer",
    required=True,
    help='"bytes", or a path such as the folder of a published model',
  )
  parser.add_argument(
    "--length", type=int, help="tokens of an example, to see what is cut"
  )
  parser.add_argument(
    "--rows",
    help="shape of the rows (default: recognised): "
    + ", ".join(row_shapes.SHAPES),
  )
  parser.add_argument(
    "--preferences",
    action="store_true",
    help="rows have two answers, or one answer with a label",
  )
  parser.add_argument(
    "--template",
    help="chat template: a name, a file or a folder (default: the one in "
    "the tokenizer's folder)",
  )
  parser.add_argument(
    "--variables",
    help="values for the template, in JSON: '{\"enable_thinking\": false}'",
  )
  parser.add_argument(
    "--loss",
    default="assistant",
    choices=("assistant", "last", "all"),
    help="tokens of a conversation with a loss (default: %(default)s)",
  )
  parser.add_argument(
    "--ignore_fields",
    default="",
    help="fields of messages that are left out, separated by commas",
  )
  parser.add_argument(
    "--allow_special",
    action="store_true",
    help="messages may spell special tokens",
  )
  parser.add_argument(
    "--pictures",
    help="folder of a published model whose processor prepares the pictures of "
    "rows",
  )
  parser.add_argument(
    "--bos",
    action=argparse.BooleanOptionalAction,
    help="begin token before rows without a template (default: as the "
    "tokenizer has it)",
  )
  parser.add_argument("--limit", type=int, help="rows to read (default: all)")
  parser.add_argument(
    "--examples",
    type=int,
    default=3,
    help="rows that are shown (default: %(default)s)",
  )
  parser.add_argument("--html", help="file for the page")
  return parser


def _variables(text: str | None) -> dict[str, Any] | None:
  if text is None:
    return None
  try:
    values = json.loads(text)
  except ValueError as e:
    raise ConfigError(f"--variables: not valid JSON: {e}.") from e
  if not isinstance(values, dict):
    raise ConfigError(f"--variables={text}: expected an object in JSON.")
  return values


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  parser = _parser()
  args = parser.parse_args(argv)
  for name, least in (("length", 1), ("limit", 1), ("examples", 0)):
    value = getattr(args, name)
    if value is not None and value < least:
      parser.error(f"--{name}: expected a whole number of at least {least}")
  found = survey(
    args.file,
    args.tokenizer,
    length=args.length,
    rows=args.rows,
    preferences=args.preferences,
    limit=args.limit,
    num_examples=args.examples,
    template=args.template,
    variables=_variables(args.variables),
    loss=args.loss,
    ignore_fields=[name for name in args.ignore_fields.split(",") if name],
    allow_special=args.allow_special,
    pictures=args.pictures,
    bos=args.bos,
  )
  print(as_text(found))
  if args.html:
    page = paths.absolute(args.html)
    with paths.replacing(page) as file:
      file.write(as_page(found))
    print(f"\n{page}")
  if not found.num_rows:
    raise ConfigError(f"no row can be read: {found.refused[0]}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
