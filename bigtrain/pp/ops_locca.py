"""Ops for LocCa (arXiv 2403.19596): texts with boxes, as tokens.

A box is [top, left, bottom, right], each a share of the image's side from 0 to
1. As tokens it is four ids, in this order: id first_location + b is the share
b / (num_bins - 1). PaliGemma's `<loc0000>` to `<loc1023>` mean the same.

An image has a caption, and boxes with a text each. It has three sequences, each
of which ends with the end token and is padded to max_len:

  cap    "cap:"   caption
  aref   "aref:"  text of a box, then the box
  gcap   "gcap:"  a box, then its text

Legend: N boxes, T sequences, L length of a sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  check_number,
)
from bigtrain.pp import registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.registry import Op
from bigtrain.text import tokenizers

TASKS = ("cap", "aref", "gcap")
FORMATS = ("yxyx", "xyxy", "xywh")
# {feature: (dtype or "bytes", shape)}.
Results = dict[str, tuple[str, tuple[int, ...]]]


def bins(boxes: np.ndarray, num_bins: int) -> np.ndarray:
  """Numbers of the bins of shares from 0 to 1, as PaliGemma rounds them."""
  scaled = np.asarray(boxes, np.float32) * np.float32(num_bins - 1)
  return np.clip(np.round(scaled), 0, num_bins - 1).astype(np.int32)


class _Writer:
  """Writes sequences of token ids."""

  def __init__(
    self, model: Any, max_len: int, first_location: int, num_bins: int
  ):
    self.tokenizer = tokenizers.get(model)
    if self.tokenizer.eos_id is None or self.tokenizer.pad_id is None:
      raise ConfigError(
        f"the tokenizer {self.tokenizer.name!r} has no end of a text, or no "
        "padding, which LocCa's sequences need."
      )
    check_number("argument 'num_bins'", num_bins, least=2, whole=True)
    self._check_first(first_location)
    self.max_len, self.num_bins = max_len, num_bins
    self._first = first_location
    self._prefixes = {
      task: self.tokenizer.encode(f"{task}:").tolist() for task in TASKS
    }
    longest = max(map(len, self._prefixes.values()))
    least = longest + 6  # A box, a token of text and the end.
    check_number("argument 'max_len'", max_len, least=least, whole=True)
    self.vocab_size = max(self.tokenizer.vocab_size, first_location + num_bins)

  def _check_first(self, first: int) -> None:
    check_number("argument 'first_location'", first, least=0, whole=True)
    size = self.tokenizer.vocab_size
    spelled = self.tokenizer.spellings.get("<loc0000>")
    if first < size and first != spelled:
      instead = f"{size} or more"
      if spelled is not None:
        instead = f"{spelled}, its id of '<loc0000>'"
      raise ConfigError(
        f"argument 'first_location' is {first}, which is the id of a text in "
        f"the tokenizer {self.tokenizer.name!r}; expected {instead}."
      )

  def box(self, box: np.ndarray) -> list[int]:
    return (self._first + bins(box, self.num_bins)).tolist()

  def text(self, text: Any, name: str) -> list[int]:
    """Ids of a text, which must have at least one."""
    if isinstance(text, np.ndarray):  # Of a tensor without dimensions.
      text = text.item()
    try:
      text = text.decode() if isinstance(text, bytes) else str(text)
    except UnicodeDecodeError as e:
      raise DataError(f"locca: {name!r} has a text that is not UTF-8.") from e
    ids = self.tokenizer.encode(text).tolist() if text.strip() else []
    if not ids:
      raise DataError(f"locca: {name!r} has a text without a token: {text!r}.")
    return ids

  def begin(self, task: str, known: Sequence[int] = ()) -> list[int]:
    """The beginning that a question has: the task's prefix, and what is known.

    A text that does not fit is cut, so that a box and the end fit after it.
    """
    prefix = self._prefixes[task]
    return [*prefix, *known[: self.max_len - len(prefix) - 5]]

  def row(
    self, begin: Sequence[int], answer: Sequence[int], given: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """A sequence [L], and 1 for its tokens after the first `given`."""
    ids = [*begin, *answer][: self.max_len - 1]
    ids.append(self.tokenizer.eos_id)  # type: ignore[arg-type]
    labels = np.full(self.max_len, self.tokenizer.pad_id, np.int32)
    labels[: len(ids)] = ids
    masks = np.zeros(self.max_len, np.uint8)
    masks[given : len(ids)] = 1
    return labels, masks

  def nothing(self) -> tuple[np.ndarray, np.ndarray]:
    labels = np.full(self.max_len, self.tokenizer.pad_id, np.int32)
    return labels, np.zeros(self.max_len, np.uint8)


@registry.register("locca")
def locca(
  first_location: int,
  model: str | dict[str, Any] = "bytes",
  max_len: int = 64,
  num_bins: int = 1024,
  tasks: Sequence[str] = TASKS,
  loss_on: Literal["both", "answer"] = "both",
  names: Sequence[str] | None = None,
  text: str = "text",
  boxes: str = "boxes",
  box_texts: str = "box_texts",
  key_result: str = "locca",
) -> Op:
  """Makes LocCa's sequences of an image: int32 [T, L], with masks.

  One box is chosen at random for all sequences. If the image has no box, the
  sequences of boxes are padding. The masks, `<key_result>_masks` uint8 [T, L],
  are 1 where a token is to be predicted, which is after the prefix.

  Args:
    first_location: id of the first location, such as the tokenizer's size.
    model: tokenizer, as for `tokenize`.
    max_len: L. A longer text is cut; a box and the end always fit.
    num_bins: number of locations along a side.
    tasks: the sequences to make, of "cap", "aref" and "gcap".
    loss_on: "both": text and box are predicted, the second given the first;
      "answer": only the second.
    names: texts by number, if `box_texts` has numbers.
    text: name of the caption.
    boxes: name of the boxes [N, 4], see the op `boxes`.
    box_texts: name of their texts [N].
  """
  for task in tasks:
    check_choice("argument 'tasks'", task, TASKS)
  check_choice("argument 'loss_on'", loss_on, ("both", "answer"))
  writer = _Writer(model, max_len, first_location, num_bins)

  def sequences(caption: Any, all_boxes: Any, texts: Any, u: Any) -> Any:
    known = _known(all_boxes, texts, boxes, box_texts)
    box, words = [], []
    if known:
      # The largest float32 below 1, times N, rounds to less than N.
      i = int(np.float32(u[0]) * np.float32(len(known)))
      box = writer.box(known[i][0])
      words = writer.text(_named(known[i][1], names), box_texts)
    rows = []
    for task in tasks:
      prefix = len(writer.begin(task))
      if task == "cap":
        caption_ids = writer.text(caption, text)
        rows.append(writer.row(writer.begin(task), caption_ids, prefix))
      elif not box:
        rows.append(writer.nothing())
      else:
        first, second = (words, box) if task == "aref" else (box, words)
        begin = writer.begin(task, first)
        given = prefix if loss_on == "both" else len(begin)
        rows.append(writer.row(begin, second, given))
    return [np.stack(x) for x in zip(*rows)]

  mask_result = f"{key_result}_masks"
  shape = (len(tasks), max_len)
  op = _op(
    sequences,
    (text, boxes, box_texts),
    {key_result: ("int32", shape), mask_result: ("uint8", shape)},
  )
  return _with_vocabulary(op, writer, key_result)._replace(draws=1)


@registry.register("locca_question")
def locca_question(
  first_location: int,
  task: Literal["cap", "aref", "gcap"],
  model: str | dict[str, Any] = "bytes",
  max_len: int = 64,
  num_bins: int = 1024,
  index: int = 0,
  names: Sequence[str] | None = None,
  boxes: str = "boxes",
  box_texts: str = "box_texts",
) -> Op:
  """Makes a question to LocCa: `prompt` int32 [L], for evaluations.

  "cap" asks for a caption, "aref" for the box of a text, "gcap" for the text
  of a box. The last two also give `box` float32 [4] and `box_text`. If an image
  has too few boxes, they are NaN and empty, and `box_overlap` ignores it.

  Args:
    index: number of the box, from 0.
    first_location, model, max_len, num_bins, names, boxes, box_texts: as of
      `locca`.
  """
  check_choice("argument 'task'", task, TASKS)
  check_number("argument 'index'", index, least=0, whole=True)
  writer = _Writer(model, max_len, first_location, num_bins)

  def padded(ids: Sequence[int]) -> np.ndarray:
    labels, _ = writer.nothing()
    labels[: len(ids)] = ids
    return labels

  def question(all_boxes: Any, texts: Any, u: Any) -> Any:
    known = _known(all_boxes, texts, boxes, box_texts)
    if index >= len(known):
      nowhere = np.full(4, np.nan, np.float32)
      return [padded(writer.begin(task)), nowhere, b""]
    box, name = known[index]
    words = _named(name, names)
    given = writer.text(words, box_texts) if task == "aref" else writer.box(box)
    prompt = padded(writer.begin(task, given))
    raw = words if isinstance(words, bytes) else words.encode()
    return [prompt, np.asarray(box, np.float32), raw]

  results: Results = {"prompt": ("int32", (max_len,))}
  if task == "cap":
    op = _op(lambda u: [padded(writer.begin("cap"))], (), results)
  else:
    results |= {"box": ("float32", (4,)), "box_text": ("bytes", ())}
    op = _op(question, (boxes, box_texts), results)
  return _with_vocabulary(op, writer, "prompt")


@registry.register("boxes")
def boxes(
  format: Literal["yxyx", "xyxy", "xywh"] = "yxyx",
  pixels: bool = True,
  key: str = "boxes",
  key_result: str | None = None,
  image: str = "image",
) -> Op:
  """Converts boxes [N, 4] to [top, left, bottom, right] in shares of the image.

  Must come after `decode` and before the image is resized. Images must not be
  cropped or flipped afterwards.

  Args:
    format: "xyxy" is [left, top, right, bottom]; "xywh", as in COCO's files,
      [left, top, width, height].
    pixels: whether the boxes are in pixels of the image, or in shares already.
    image: name of the image.
  """
  check_choice("argument 'format'", format, FORMATS)
  result = key if key_result is None else key_result

  def convert(x: Any, height: Any, width: Any) -> np.ndarray:
    x = np.asarray(x, np.float32).reshape(-1, 4)
    if format == "xywh":
      x = np.concatenate([x[:, :2], x[:, :2] + x[:, 2:]], axis=1)
    if format != "yxyx":
      x = x[:, [1, 0, 3, 2]]
    if pixels:
      x = x / np.asarray([height, width, height, width], np.float32)
    return x

  def fn(features: dict[str, Any], u: Any) -> dict[str, Any]:
    picture, x = features[image], features[key]
    height, width = xp.image_size(picture)
    if xp.on_host(x) and xp.on_host(picture):
      made = convert(x, height, width)
    else:
      made = tf.numpy_function(convert, [x, height, width], tf.float32)
      made = tf.ensure_shape(made, (None, 4))
    return {**features, result: made}

  return Op(fn, reads=(key, image), origins={result: None})


def _known(
  boxes: Any, texts: Any, boxes_name: str, texts_name: str
) -> list[tuple[np.ndarray, Any]]:
  """The boxes with their texts."""
  boxes = np.asarray(boxes, np.float32).reshape(-1, 4)
  texts = list(np.atleast_1d(np.asarray(texts, object)))
  if len(texts) != len(boxes):
    raise DataError(
      f"locca: {boxes_name!r} has {len(boxes)} boxes, but {texts_name!r} has "
      f"{len(texts)} texts."
    )
  for box in boxes:
    # Pictures are measured in whole pixels, so boxes may end just outside.
    inside = (box >= -0.01).all() and (box <= 1.01).all()
    if not inside or (box[2:] < box[:2]).any():
      raise DataError(
        f"locca: {boxes_name!r} has the box {box.tolist()}; expected [top, "
        "left, bottom, right] in shares of the image, from 0 to 1. The op "
        "'boxes' converts other formats."
      )
  return list(zip(boxes, texts))


def _named(text: Any, names: Sequence[str] | None) -> Any:
  if names is None:
    if not isinstance(text, bytes | str):
      raise ConfigError(
        f"preprocessing op 'locca' expects texts of boxes, got {text!r}; "
        "numbers need the argument names."
      )
    return text
  if isinstance(text, bytes | str) or not 0 <= int(text) < len(names):
    raise DataError(
      f"locca: expected a number below {len(names)}, the number of names, got "
      f"{text!r}."
    )
  return names[int(text)].encode()


def _with_vocabulary(op: Op, writer: _Writer, key: str) -> Op:
  tokenizer = writer.tokenizer
  return op._replace(
    vocab_sizes={key: writer.vocab_size},
    fingerprints={tokenizer.name: tokenizer.fingerprint()},
  )


def _op(
  make: Callable[..., Any],
  reads: tuple[str, ...],
  results: Results,
) -> Op:
  """An op that makes features of each example by `make(*values, u)`."""

  def stacked(column: Sequence[Any], dtype: str) -> np.ndarray:
    if dtype != "bytes":
      return np.stack(column)
    # np.asarray would convert bytes to strings of fixed length.
    result = np.empty(len(column), object)
    result[:] = column
    return result

  def call(*arguments: Any) -> list[Any]:
    # tensorflow would put the traceback of a Python error into its message.
    try:
      return [*make(*arguments), b""]
    except DataError as e:
      empty = [
        b"" if dtype == "bytes" else np.zeros(shape, dtype)
        for dtype, shape in results.values()
      ]
      return [*empty, str(e).encode()]

  def on_tensors(values: Any, u: Any) -> list[Any]:
    kinds = [
      tf.string if dtype == "bytes" else tf.as_dtype(dtype)
      for dtype, _ in results.values()
    ]
    *made, problem = tf.numpy_function(call, [*values, u], [*kinds, tf.string])
    message = "preprocessing op locca"
    return [
      xp.checked(
        tf.ensure_shape(x, shape), tf.equal(problem, b""), message, problem
      )
      for x, (_, shape) in zip(made, results.values())
    ]

  def fn(features: dict[str, Any], u: Any) -> dict[str, Any]:
    values = [features[name] for name in reads]
    if not all(map(xp.on_host, [*values, u])):
      made = on_tensors(values, u)
    elif xp.rank(u) == 1:
      made = make(*values, u)
    else:
      columns = zip(*(make(*each) for each in zip(*values, u)))
      kinds = (dtype for dtype, _ in results.values())
      made = [stacked(column, dtype) for column, dtype in zip(columns, kinds)]
    return {**features, **dict(zip(results, made))}

  return Op(fn, batched=True, reads=reads, origins=dict.fromkeys(results))
