"""Pictures of two handwritten digits, with captions.

dict(type="digit_pairs", split="train", length=50_000, margin=1)

For data/supervised.py, `questions` yields rows with two pictures each, and
`scenes` rows with one picture of two digits, whose answers may be boxes.

Example i shows the ordered pair of classes i % 100. A hash of i selects the
digits of these classes and their positions in the two halves of the picture.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.data import arrays
from bigtrain.data.formats import files
from bigtrain.text import box_texts

# Number of rows of `questions`, and of `scenes`, in each split.
_NUM_QUESTIONS = {"train": 60_000, "test": 2_000}
# A box has ten times as many tokens as another answer, and would get as much
# more of the training.
_BOX_WEIGHT = 0.15
WORDS = tuple("zero one two three four five six seven eight nine".split())
CAPTIONS = [
  f"{'an' if left == 'eight' else 'a'} {left} left of "
  f"{'an' if right == 'eight' else 'a'} {right}"
  for left in WORDS
  for right in WORDS
]
_TEXTS = [
  f"an {word}".encode() if word == "eight" else f"a {word}".encode()
  for word in WORDS
]
_SIDE = 8


class Source:
  """Pairs of scikit-learn's digits.

  Features: `image` uint8 [8 + 2 m, 16 + 4 m, 1] with values 0 to 16, `text`
  such as "a seven left of a three", `left`, `right` and `label` (10 left +
  right). With `boxes`, also `boxes` float32 [2, 4], which is [top, left,
  bottom, right] of the left and the right digit as shares of the picture, and
  `box_texts` [2], such as "a seven". With `wrong_captions`, also `is_right`,
  which is 1.0 if the text is that of the picture, else 0.0.

  Args:
    split: "train", "test" (with other digits) or "all", optionally with a
      slice, as in arrays.py.
    length: number of examples; far more are possible.
    margin: m, in pixels: how far a digit may be from the centre of its half.
    seed: seed of the pairs.
    split_seed: seed of the digits' splits.
    boxes: whether to add the boxes.
    wrong_captions: share of the examples with the text of another pair of
      classes, as in data from the web.
  """

  def __init__(
    self,
    *,
    split: str = "train",
    length: int = 10_000,
    margin: int = 0,
    seed: int = 0,
    split_seed: int = 0,
    boxes: bool = False,
    wrong_captions: float = 0.0,
  ):
    check_number("digit_pairs: length", length, least=1, whole=True)
    check_number("digit_pairs: margin", margin, least=0, whole=True)
    key = "digit_pairs: wrong_captions"
    check_number(key, wrong_captions, least=0, most=1)
    digits = arrays.Source(name="digits", split=split, split_seed=split_seed)
    data = digits.read(np.arange(len(digits)))
    self._images = data["image"]
    by_class = [np.flatnonzero(data["label"] == c) for c in range(10)]
    self._count = np.array([len(of_class) for of_class in by_class])
    if not self._count.all():
      missing = WORDS[self._count.argmin()]
      raise ConfigError(f"digit_pairs: split={split!r} contains no {missing}.")
    self._by_class = np.concatenate(by_class)
    self._first = np.cumsum(self._count) - self._count
    self._length, self._margin, self._seed = length, margin, seed
    self._name = f"digit pairs {split}"
    parts = [digits.fingerprint(), length, margin, seed]
    if wrong_captions:
      parts.append(wrong_captions)
    self._digest = files.digest("digit_pairs", *parts)
    words = list(WORDS)
    self.class_names = {"left": words, "right": words, "label": CAPTIONS}
    self._boxes = boxes
    cell = _SIDE + 2 * margin
    self.spec: dict[str, Any] = {
      "image": (np.dtype(np.uint8), (cell, 2 * cell, 1)),
      "text": (bytes, ()),
      **dict.fromkeys(self.class_names, (np.dtype(np.int64), ())),
    }
    if boxes:
      self.spec["boxes"] = (np.dtype(np.float32), (2, 4))
      self.spec["box_texts"] = (bytes, (2,))
    self._wrong_captions = wrong_captions
    if wrong_captions:
      self.spec["is_right"] = (np.dtype(np.float32), ())

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    indices = np.asarray(indices, np.int64)
    label = indices % 100
    sides = label // 10, label % 10
    cell = _SIDE + 2 * self._margin
    image = np.zeros((len(indices), cell, 2 * cell, 1), np.uint8)
    corners = []  # Top and left of each side's digit, in pixels.
    for side, digit in enumerate(sides):
      which = self._draw(indices, side, self._count[digit])
      pixels = self._images[self._by_class[self._first[digit] + which]]
      top = self._draw(indices, 2 + side, 2 * self._margin + 1)
      start = self._draw(indices, 4 + side, 2 * self._margin + 1)
      corners.append(np.stack([top, side * cell + start], axis=-1))
      row, column = np.ogrid[:_SIDE, :_SIDE]
      image[
        np.arange(len(indices))[:, None, None],
        top[:, None, None] + row,
        side * cell + start[:, None, None] + column,
      ] = pixels
    is_right = self._draw(indices, 6, 1000) >= 1000 * self._wrong_captions
    other = (label + 1 + self._draw(indices, 7, 99)) % 100
    caption = np.where(is_right, label, other)
    text = np.array([CAPTIONS[c].encode() for c in caption], object)
    result = dict(
      image=image, text=text, left=sides[0], right=sides[1], label=label
    )
    if self._wrong_captions:
      result["is_right"] = is_right.astype(np.float32)
    if self._boxes:
      first_N22 = np.stack(corners, axis=1)
      boxes_N24 = np.concatenate([first_N22, first_N22 + _SIDE], axis=-1)
      size = np.array([cell, 2 * cell] * 2, np.float32)
      result["boxes"] = boxes_N24.astype(np.float32) / size
      result["box_texts"] = np.array(_TEXTS, object)[np.stack(sides, axis=1)]
    return result

  def _draw(self, indices: np.ndarray, number: int, stop: Any) -> np.ndarray:
    words = hashing.fold(hashing.fold(self._seed, indices), number)
    # The modulo bias is below stop / 2**64.
    return (words % np.asarray(stop, np.uint64)).astype(np.int64)

  def where(self, index: int) -> str:
    return f"{self._name}, number {int(index)}"

  def fingerprint(self) -> str:
    return self._digest


def questions(
  split: str, preferences: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (place, row): a question on two pictures of one digit each.

  Digits for training are shifted by up to a pixel in each direction.
  """
  del preferences  # There is no second answer.
  for part in _NUM_QUESTIONS if split == "all" else (split,):
    margin = int(part == "train")
    source = Source(split=part, length=_NUM_QUESTIONS[part], margin=margin)
    pairs = source.read(np.arange(len(source)))
    kinds = hashing.fold(0, np.arange(len(source))) % np.uint64(4)
    for i, kind in enumerate(kinds.tolist()):
      left, right = int(pairs["left"][i]), int(pairs["right"][i])
      question, answer = _on_two(left, right)[kind]
      pictures = [
        half[margin : margin + _SIDE, margin : margin + _SIDE]
        for half in np.split(_gray(pairs["image"][i]), 2, axis=1)
      ]
      row = {"prompt": question + " ", "completion": answer, "images": pictures}
      yield f"digits, question {i}", row


def scenes(
  split: str, preferences: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (place, row): a question on a picture of two digits.

  The digits are at random places in their halves of the picture, uint8 [10,
  20]. A third of the questions asks for the box around a digit's ink, as
  "<loc0307><loc0051><loc0921><loc0358> seven": the top, left, bottom and right
  edges, as in text/box_texts.py.
  """
  del preferences
  for part in _NUM_QUESTIONS if split == "all" else (split,):
    source = Source(split=part, length=_NUM_QUESTIONS[part], margin=1)
    pairs = source.read(np.arange(len(source)))
    indices = np.arange(len(source))
    kinds = hashing.fold(1, indices) % np.uint64(9)
    numbers = hashing.fold(2, indices) % np.uint64(10)
    for i, (kind, number) in enumerate(zip(kinds.tolist(), numbers.tolist())):
      left, right = int(pairs["left"][i]), int(pairs["right"][i])
      pixels = pairs["image"][i, :, :, 0]
      weight = 1.0
      if kind < 4:
        question, answer = _on_two(left, right)[kind]
      elif kind < 6:
        # About a digit that is there, mostly.
        shown = (left, right, number)[i % 3]
        plural = WORDS[shown] + ("es" if shown == 6 else "s")
        question = f"How many {plural}?"
        answer = str((left == shown) + (right == shown))
      else:
        weight = _BOX_WEIGHT
        shown = (left, right)[i % 2]
        question = f"detect {WORDS[shown]}"
        answer = " ; ".join(
          f"{_box(pixels, side)} {WORDS[shown]}"
          for side, digit in enumerate((left, right))
          if digit == shown
        )
      picture = _gray(pairs["image"][i])
      row = {
        "prompt": question + " ",
        "completion": answer,
        "images": [picture],
        "weight": weight,
      }
      yield f"digit scenes, question {i}", row


def _on_two(left: int, right: int) -> list[tuple[str, str]]:
  """Questions on two digits, with their answers."""
  return [
    (f"What is left of the {WORDS[right]}?", WORDS[left]),
    (f"What is right of the {WORDS[left]}?", WORDS[right]),
    ("What is the sum?", str(left + right)),
    ("Which one is larger?", WORDS[max(left, right)]),
  ]


def _gray(pixels: np.ndarray) -> np.ndarray:
  """Pixels of 0 to 16, [height, width, 1], as uint8 [height, width]."""
  brighter = pixels[:, :, 0].astype(np.int32) * 16
  return np.minimum(brighter, 255).astype(np.uint8)


def _box(pixels: np.ndarray, side: int) -> str:
  """The box around the ink in one half of a picture, in PaliGemma's format."""
  height, width = pixels.shape
  half = width // 2
  ink = pixels[:, side * half : (side + 1) * half] > 0
  (rows,), (columns,) = np.nonzero(ink.any(1)), np.nonzero(ink.any(0))
  return box_texts.spell(
    (
      rows[0] / height,
      (side * half + columns[0]) / width,
      (rows[-1] + 1) / height,
      (side * half + columns[-1] + 1) / width,
    )
  )
