"""Reads published data sets of pictures, from their own files, as rows.

  dict(type="supervised", dataset=dict(name="coco_captions",
       path="coco/annotations/captions_train2017.json",
       images="coco/train2017"), ...)

Prompts and answers are in PaliGemma's formats (Beyer et al. 2024, arXiv
2407.07726), or in a user's own words:

- "coco_captions": "caption en" and a caption.
- "coco_detection": "detect cat ; dog", and boxes as in text/box_texts.py.
- "coco_segmentation": "segment cat", and boxes with masks as in
  text/mask_texts.py.
- "vqa_v2": "answer en is it raining?" and an answer.
- "questions": the same from a table, JSON or Parquet, such as the tables of
  DocVQA, InfographicVQA, TextVQA and ChartQA.

Where people answered a question differently, each answer becomes a row,
weighted by the share of people who gave it; or one row has all answers.
"""

import collections
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  check_kwargs,
)
from bigtrain.data.formats import documents, files
from bigtrain.text import box_texts, coco_masks, mask_texts

# (place, row); a row is as in row_shapes.py.
_Rows = Iterator[tuple[Any, dict[str, Any]]]
# Names that tables have for a question, its answers and its picture.
_QUESTIONS = ("question", "query")
_ANSWERS = ("answers", "answer", "label")
_IMAGES = (
  "image",
  "images",
  "img",
  "imgname",
  "image_local_name",
  "image_path",
  "file_name",
  "image_id",
)
_SEPARATOR = " ; "


class Set(NamedTuple):
  """A data set, in the form that `token_rows.cached` needs."""

  inputs: list[str]  # Files.
  rows_of: Callable[[str], _Rows]
  key: str = ""  # Identifies the options.
  # Yields the mask of each row of a file; None for data without masks.
  masks_of: Callable[[str], Iterator[np.ndarray]] | None = None


class MaskCoder(Protocol):
  """pp/mask_codes.Coder."""

  def encode(self, mask_HW: np.ndarray, box: box_texts.Box) -> list[int]: ...


class _Style(NamedTuple):
  """Options of how a data set's entries become rows."""

  chat: bool  # As a conversation.
  end: str  # Text after a prompt that is not a conversation.
  together: bool  # Whether a row has all answers to its prompt.
  # mask_coder(file of weights, key).
  mask_coder: Callable[[str, str], MaskCoder]

  def rows(
    self, prompt: str, answers: Sequence[str], image: Any
  ) -> Iterator[dict[str, Any]]:
    asked: Any = prompt + self.end
    if self.chat:
      asked = [{"role": "user", "content": prompt}]
    row = {"prompt": asked, "images": [image]}
    if self.together:
      yield row | {"completion": list(answers)}
      return
    for answer, number in collections.Counter(answers).items():
      weight = number / len(answers)
      yield row | {"completion": [answer], "weight": weight}


def open_set(
  spec: Any,
  *,
  first: bool,
  together: bool,
  mask_coder: Callable[[str, str], MaskCoder],
  key: str = "dataset",
) -> Set:
  """Returns the data set that a config describes.

  Args:
    spec: its name, and arguments of the function in _SETS that reads it.
    first: whether the model itself ends prompts with a line break, like
      PaliGemma.
    together: whether all answers to a prompt form one row.
    mask_coder: pp/mask_codes.load.
  """
  if not isinstance(spec, Mapping) or "name" not in spec:
    raise ConfigError(f"{key}={spec!r}: expected dict(name=..., path=...).")
  options = dict(spec)
  name = check_choice(f"{key}.name", options.pop("name"), _SETS)
  chat = options.pop("chat", False)
  read = _SETS[name]
  check_kwargs(read, options, key, ["style"])
  for option, value in options.items():
    if option in ("images", "mask_coder") and value is not None:
      options[option] = files.local_path(value, f"{key}.{option}")
  style = _Style(bool(chat), "" if first else "\n", together, mask_coder)
  return read(style=style, **options)._replace(
    key=files.digest(name, style[:3], sorted(options.items()), _stamp(options))
  )


def _stamp(options: Mapping[str, Any]) -> str:
  path = options.get("mask_coder")
  return files.stamp(path) if path else ""


def _coco_captions(
  style: _Style, path: str, images: str | None = None, prompt: str | None = None
) -> Set:
  """Captions of COCO: captions_train2017.json."""
  asked = prompt or _default(style, "caption en", "Describe the picture.")

  def rows(file: str) -> _Rows:
    pictures, by_picture, _ = _coco(file, "captions", ("caption",))
    for number, annotations in by_picture.items():
      captions = [" ".join(x["caption"].split()) for x in annotations]
      image = _in_folder(images, pictures[number]["file_name"])
      for row in style.rows(asked, captions, image):
        yield f"{file}, picture {number}", row

  return Set(documents.find(path, "dataset.path"), rows)


def _coco_detection(
  style: _Style,
  path: str,
  images: str | None = None,
  prompt: str | None = None,
  per: Literal["picture", "class"] = "picture",
  boxes: Literal["loc", "json"] = "loc",
) -> Set:
  """Boxes of COCO: instances_train2017.json.

  Args:
    per: whether a row asks for all classes in its picture or for one.
    boxes: PaliGemma's format, or Qwen3-VL's.
  """
  check_choice("dataset.per", per, ("picture", "class"))
  check_choice("dataset.boxes", boxes, ("loc", "json"))
  spell = {"loc": _spell_boxes, "json": box_texts.spell_json}[boxes]
  asked = prompt or _default(style, "detect {classes}", "Detect {classes}.")
  _check_prompt(asked, "classes")

  def rows(file: str) -> _Rows:
    pictures, by_picture, names = _coco(file, "instances", ("bbox",))
    for number, annotations in by_picture.items():
      picture = pictures[number]
      found = [_box(x, picture, names) for x in _whole(annotations)]
      by_class = _grouped(found, lambda box: box.label)
      groups = list(by_class.values())
      if per == "picture" and groups:
        groups = [[box for group in groups for box in group]]
      image = _in_folder(images, picture["file_name"])
      for group in groups:
        classes = _SEPARATOR.join(dict.fromkeys(box.label for box in group))
        question = asked.format(classes=classes)
        for row in style.rows(question, [spell(group)], image):
          yield f"{file}, picture {number}", row

  return Set(documents.find(path, "dataset.path"), rows)


def _coco_segmentation(
  style: _Style,
  path: str,
  mask_coder: str,
  images: str | None = None,
  prompt: str | None = None,
) -> Set:
  """Masks of COCO: instances_train2017.json; a row asks for one class.

  Args:
    mask_coder: weights of the VQ-VAE that codes masks, PaliGemma's vae-oid.npz.
  """
  asked = prompt or _default(style, "segment {classes}", "Segment {classes}.")
  _check_prompt(asked, "classes")
  coder = style.mask_coder(mask_coder, "dataset.mask_coder")

  def objects(
    file: str,
  ) -> Iterator[tuple[dict[str, Any], str, list[_Object]]]:
    """Yields (picture, class, its objects there) for each row."""
    fields = ("bbox", "segmentation")
    pictures, by_picture, names = _coco(file, "instances", fields)
    for number, annotations in by_picture.items():
      picture = pictures[number]
      size = picture["height"], picture["width"]
      found = []
      for annotation in _whole(annotations):
        where = f"{file}, annotation {annotation.get('id')}"
        mask = coco_masks.decode(annotation["segmentation"], size, where)
        found.append(_Object(_box(annotation, picture, names), mask))
      for name, own in _grouped(found, lambda x: x.box.label).items():
        yield picture, name, own

  def rows(file: str) -> _Rows:
    for picture, name, own in objects(file):
      texts = [
        mask_texts.spell(x.box, coder.encode(x.mask, x.box)) for x in own
      ]
      image = _in_folder(images, picture["file_name"])
      answer, question = _SEPARATOR.join(texts), asked.format(classes=name)
      for row in style.rows(question, [answer], image):
        yield f"{file}, picture {picture['id']}", row

  def masks(file: str) -> Iterator[np.ndarray]:
    for _, _, own in objects(file):
      yield functools.reduce(np.logical_or, [x.mask for x in own])

  return Set(documents.find(path, "dataset.path"), rows, masks_of=masks)


class _Object(NamedTuple):
  """An object in a picture."""

  box: box_texts.Box
  mask: np.ndarray  # Bool [height, width].


def _vqa_v2(
  style: _Style,
  questions: str,
  annotations: str,
  images: str | None = None,
  prompt: str | None = None,
  answers: Literal["all", "majority"] = "all",
) -> Set:
  """Questions and answers of VQA v2.

  Args:
    questions: v2_OpenEnded_mscoco_train2014_questions.json.
    annotations: v2_mscoco_train2014_annotations.json.
    images: folder of COCO_train2014_000000000009.jpg, or of COCO's later names
      without the part before the number.
    answers: "all" ten, or only the one that most people gave.
  """
  check_choice("dataset.answers", answers, ("all", "majority"))
  asked = prompt or _default(style, "answer en {question}", "{question}")
  _check_prompt(asked, "question")
  asked_in = documents.find(questions, "dataset.questions")
  answered_in = documents.find(annotations, "dataset.annotations")
  if len(asked_in) != len(answered_in):
    raise ConfigError(
      f"dataset: {len(asked_in)} files of questions and {len(answered_in)} of "
      "annotations; expected as many."
    )
  pairs = dict(zip(asked_in, answered_in))

  def rows(file: str) -> _Rows:
    if file not in pairs:  # Of annotations, read with its questions.
      return
    content = _object(file, "VQA v2's questions", ("questions",))
    by_question = _answers_of_vqa(pairs[file], answers)
    names = _names_of_vqa(images, str(content.get("data_subtype") or ""))
    for question in content["questions"]:
      where = f"{file}, question {question.get('question_id')}"
      given = by_question.get(question["question_id"])
      if given is None:
        raise DataError(f"{where}: {pairs[file]} has no answer to it.")
      image = _in_folder(images, names(question["image_id"]))
      text = asked.format(question=question["question"].strip())
      for row in style.rows(text, given, image):
        yield where, row

  return Set([*asked_in, *answered_in], rows)


def _answers_of_vqa(path: str, which: str) -> dict[Any, list[str]]:
  content = _object(path, "VQA v2's annotations", ("annotations",))
  result = {}
  for each in content["annotations"]:
    if not {"question_id", "answers", "multiple_choice_answer"} <= each.keys():
      raise DataError(
        f"{path}: expected VQA v2's annotations, with question_id, answers and "
        f"multiple_choice_answer, got {_listed(each)}."
      )
    given = [x["answer"] for x in each["answers"]]
    if which == "majority":
      given = [each["multiple_choice_answer"]]
    result[each["question_id"]] = given
  return result


def _names_of_vqa(images: str | None, part: str) -> Callable[[int], str]:
  """Returns a function from a picture's number to the name of its file."""
  old, new = f"COCO_{part}_{{:012d}}.jpg", "{:012d}.jpg"
  # Folders of 2014 have the long names, those of 2017 the short ones.
  year = os.path.basename(os.path.normpath(images)) if images else part
  return (new if year.endswith("2017") else old).format


def _questions(
  style: _Style,
  path: str,
  images: str | None = None,
  prompt: str | None = None,
) -> Set:
  """A table of questions on pictures, JSON, JSON lines or Parquet."""
  asked = prompt or _default(style, "answer en {question}", "{question}")
  _check_prompt(asked, "question")

  def rows(file: str) -> _Rows:
    for where, row in _table(file):
      question = _field(row, _QUESTIONS, "question", where)
      answers = _texts(_field(row, _ANSWERS, "answer", where), where)
      if not isinstance(question, str):
        raise DataError(f"{where}: expected a question, got {question!r:.80}.")
      image = _field(row, _IMAGES, "picture", where)
      image = image[0] if isinstance(image, list) and image else image
      if isinstance(image, int):
        image = str(image)
      if isinstance(image, str):  # Otherwise its bytes.
        image = image if os.path.splitext(image)[1] else f"{image}.jpg"
        image = _in_folder(images, image)
      text = asked.format(question=question.strip())
      for each in style.rows(text, answers, image):
        yield where, each

  return Set(documents.find(path, "dataset.path"), rows)


_SETS: dict[str, Callable[..., Set]] = {
  "coco_captions": _coco_captions,
  "coco_detection": _coco_detection,
  "coco_segmentation": _coco_segmentation,
  "vqa_v2": _vqa_v2,
  "questions": _questions,
}


def _default(style: _Style, prompt: str, of_chats: str) -> str:
  return of_chats if style.chat else prompt


def _check_prompt(prompt: str, field: str) -> None:
  try:
    is_used = prompt.format(**{field: "\0"}).count("\0") == 1
  except (KeyError, IndexError, ValueError):
    is_used = False
  if not is_used:
    raise ConfigError(
      f"dataset.prompt={prompt!r}: expected a text with {{{field}}}."
    )


def _in_folder(folder: str | None, name: str) -> str:
  return os.path.join(folder, name) if folder else name


# COCO.

_Coco = tuple[
  dict[int, dict[str, Any]],  # Pictures by their number.
  dict[int, list[dict[str, Any]]],  # Annotations by the number of the picture.
  dict[int, str],  # Names of the classes.
]


def _coco(path: str, kind: str, fields: Sequence[str]) -> _Coco:
  expected = f"COCO's {kind}"
  content = _object(path, expected, ("images", "annotations"))
  pictures = {picture["id"]: picture for picture in content["images"]}
  by_picture: dict[int, list[dict[str, Any]]] = {n: [] for n in pictures}
  for annotation in content["annotations"]:
    number = annotation.get("image_id")
    missing = [x for x in (*fields, "image_id") if x not in annotation]
    if missing:
      raise DataError(
        f"{path}: expected {expected}, whose annotations have {missing[0]}, "
        f"got {_listed(annotation)}."
      )
    if number not in by_picture:
      raise DataError(
        f"{path}, annotation {annotation.get('id')}: no picture has its "
        f"image_id, {number}."
      )
    by_picture[number].append(annotation)
  names = {x["id"]: x["name"] for x in content.get("categories", [])}
  by_picture = {n: own for n, own in by_picture.items() if own}
  return pictures, by_picture, names


def _whole(annotations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Annotations of single objects; crowds are left out."""
  return [x for x in annotations if not x.get("iscrowd")]


def _box(
  annotation: Mapping[str, Any],
  picture: Mapping[str, Any],
  names: Mapping[int, str],
) -> box_texts.Box:
  left, top, width, height = annotation["bbox"]
  H, W = picture["height"], picture["width"]
  label = names.get(annotation.get("category_id", -1), "object")
  return box_texts.Box(
    top / H, left / W, (top + height) / H, (left + width) / W, label
  )


def _spell_boxes(boxes: Sequence[box_texts.Box]) -> str:
  return _SEPARATOR.join(f"{box_texts.spell(x[:4])} {x.label}" for x in boxes)


def _grouped(
  items: Sequence[Any], key: Callable[[Any], Any]
) -> dict[Any, list[Any]]:
  groups: dict[Any, list[Any]] = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return groups


# Tables and JSON files.


def _object(path: str, expected: str, keys: Sequence[str]) -> dict[str, Any]:
  """Reads a JSON object that must have lists at some keys."""
  content = documents.json_value(path)
  names = ", ".join(keys)
  if not isinstance(content, dict):
    kind = "an array" if isinstance(content, list) else repr(content)[:40]
    raise DataError(
      f"{path}: expected {expected}, an object with {names}, got {kind}."
    )
  if not all(isinstance(content.get(key), list) for key in keys):
    raise DataError(
      f"{path}: expected {expected}, an object with {names}, got "
      f"{_listed(content)}."
    )
  return content


def _table(path: str) -> Iterator[tuple[Any, Mapping[str, Any]]]:
  """Yields (place, row); rows of JSON may be below "data"."""
  if documents.suffix_of(path) == ".json":
    content = documents.json_value(path)
    if isinstance(content, dict):
      content = _object(path, "a table", ("data",))["data"]
    for number, row in enumerate(content):
      yield f"{path}, row {number} (from 0)", row
    return
  for where, row in documents.rows(path):
    if isinstance(row, DataError):
      raise row
    yield where, row


def _field(row: Any, names: Sequence[str], what: str, where: Any) -> Any:
  if isinstance(row, Mapping):
    for name in names:
      if row.get(name) is not None:
        return row[name]
  got = _listed(row) if isinstance(row, Mapping) else f"{row!r:.80}"
  raise DataError(
    f"{where}: no {what}: expected {' or '.join(names)}, got {got}."
  )


def _texts(value: Any, where: Any) -> list[str]:
  """Answers as texts: a text, a number, or a list of these or of objects."""
  given = value if isinstance(value, list | tuple) else [value]
  texts = [x.get("answer") if isinstance(x, Mapping) else x for x in given]
  if not texts or not all(isinstance(x, str | int | float) for x in texts):
    raise DataError(f"{where}: expected answers, got {value!r:.80}.")
  return [str(x) for x in texts]


def _listed(row: Mapping[str, Any]) -> str:
  names = ", ".join(map(str, row))
  return f"{names:.80}" or "nothing"
