"""Pictures in texts: placeholders, and the image tokens of a model.

A prompt marks the places of its pictures with a placeholder such as "<image>".
In the ids, each picture has a fixed number of image tokens, whose embeddings a
model of models/vision_language.py replaces. `of_folder` reads all of this from
a published model's folder.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_kwargs,
  check_number,
)
from bigtrain.files import paths
from bigtrain.text import (
  chat,
  picture_families,
  picture_layouts,
  tokenizers,
)

# Types of parts that no model here reads.
_UNREAD = ("video", "video_url", "audio", "audio_url", "input_audio")


class Pictures(NamedTuple):
  """The format of pictures for a model: their tokens in texts, and pixels."""

  token: int  # Id of an image token.
  tokens: int  # Number of image tokens of a picture.
  pp: str  # Ops that make its pixels of "image", encoded or an array.
  placeholder: str = "<image>"
  # What stands around the image tokens of a picture.
  before: str = ""
  after: str = ""
  # PaliGemma: pictures come first, the begin token follows them, and the prompt
  # ends with a line break.
  first: bool = False
  # Options of a class in picture_layouts.py, if the size of a picture decides
  # its number of image tokens. A text has one for each picture at first, and
  # `tokens` is 1.
  layout: Mapping[str, Any] | None = None
  # Text for a picture that no placeholder places; "" for the placeholder
  # itself.
  unplaced: str = ""
  # Ops of pictures that are several of a row, if these differ.
  pp_several: str = ""

  def key(self) -> str:
    """Identifies the format; the same as in older versions where possible."""
    newer = {"layout": None, "unplaced": "", "pp_several": ""}
    fields = [
      f"{name}={x!r}"
      for name, x in self._asdict().items()
      if name not in newer or x != newer[name]
    ]
    return f"Pictures({', '.join(fields)})"

  def expanded(
    self,
    tokenizer: tokenizers.Tokenizer,
    ids: np.ndarray,
    sizes: Sequence[tuple[int, int]],
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids with all image tokens, the place in `ids` of each).

    Args:
      sizes: height and width of each picture, in order.
    """
    self.check(ids, len(sizes))
    at = np.flatnonzero(ids == self.token)
    pieces: list[Any] = []
    origins: list[Any] = []
    start = 0
    for place, size in zip(at.tolist(), sizes):
      own = self._ids_of(tokenizer, *size, len(sizes))
      pieces += [ids[start:place], own]
      origins += [np.arange(start, place), np.full(len(own), place)]
      start = place + 1
    pieces.append(ids[start:])
    origins.append(np.arange(start, len(ids)))
    return (
      np.concatenate(pieces).astype(np.int32),
      np.concatenate(origins).astype(np.int64),
    )

  def _ids_of(
    self,
    tokenizer: tokenizers.Tokenizer,
    height: int,
    width: int,
    number: int,
  ) -> np.ndarray:
    assert self.layout is not None
    layout = picture_layouts.read(self.layout, "pictures.layout")
    token = tokenizer.spell([self.token])
    text = layout.text(token, height, width, number)
    return tokenizer.encode(text, special=True)

  def check_expanded(
    self,
    tokenizer: tokenizers.Tokenizer,
    ids: np.ndarray,
    sizes: Sequence[tuple[int, int]],
  ) -> None:
    """Refuses ids without all image tokens of pictures of these sizes."""
    counts = [
      int((self._ids_of(tokenizer, *size, len(sizes)) == self.token).sum())
      for size in sizes
    ]
    present = int((ids == self.token).sum())
    if present != sum(counts):
      raise DataError(
        f"{present} image tokens, but pictures of "
        f"{' + '.join(map(str, counts)) or 'none'}."
      )

  def prompt(
    self, tokenizer: tokenizers.Tokenizer, text: str, number: int
  ) -> str:
    """Returns a prompt with a placeholder for each picture.

    Pictures without a placeholder come at the beginning.
    """
    present = text.count(self.placeholder)
    if present not in (0, number):
      raise DataError(
        f"{number} pictures, but {present} placeholders {self.placeholder!r} "
        "in the text."
      )
    if not present:
      text = (self.unplaced or self.placeholder) * number + text
    if not self.first:
      return text
    end = text.rfind(self.placeholder) + len(self.placeholder) if number else 0
    bos = ""
    if tokenizer.bos_id is not None:
      bos = tokenizer.spell([tokenizer.bos_id])
    return text[:end] + bos + text[end:] + "\n"

  def encode(
    self, tokenizer: tokenizers.Tokenizer, text: str, special: bool
  ) -> np.ndarray:
    """Returns the ids of a text with placeholders.

    Args:
      special: whether special tokens that a text spells out become tokens. They
        always do if the image token is one of the tokenizer's.
    """
    if self.token < tokenizer.vocab_size:
      one = tokenizer.spell([self.token]) * self.tokens
      whole = self.before + one + self.after
      text = text.replace(self.placeholder, whole)
      return tokenizer.encode(text, special=True)
    # An image token beside the tokenizer's own ids.
    parts = []
    for i, piece in enumerate(text.split(self.placeholder)):
      if i:
        parts.append(np.full(self.tokens, self.token, np.int32))
      parts.append(tokenizer.encode(piece, special))
    return np.concatenate(parts).astype(np.int32)

  def messages(
    self, template: chat.Template, messages: Any, number: int
  ) -> list[dict[str, Any]]:
    """Returns messages in which {"type": "image"} marks each picture.

    For templates without such parts, the placeholder marks a picture. Pictures
    that no message places come at the beginning of the first message.
    """
    if not isinstance(messages, list | tuple):
      return messages  # Which `messages.readable` refuses.
    result: list[Any] = [
      {**x, "content": self._parts(x.get("content"))}
      if isinstance(x, Mapping)
      else x
      for x in messages
    ]
    placed = sum(map(_num_images, result))
    if not placed and number:
      place: Any = next(x for x in result if isinstance(x, Mapping))
      content = place["content"]
      if isinstance(content, str):
        content = [{"type": "text", "text": content}]
      place["content"] = [*[{"type": "image"}] * number, *(content or [])]
    elif placed != number:
      raise DataError(f"{number} pictures, but messages place {placed}.")
    if any("image" in text for text in template.texts.values()):
      return result
    return [{**x, "content": self._as_text(x["content"])} for x in result]

  def _parts(self, content: Any) -> Any:
    """A content whose placeholders are parts; pictures' own fields are gone."""
    if isinstance(content, str) and self.placeholder in content:
      parts: list[dict[str, Any]] = []
      for i, text in enumerate(content.split(self.placeholder)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
      return parts
    if not isinstance(content, list):
      return content
    for part in content:
      kind = part.get("type") if isinstance(part, Mapping) else None
      if kind in _UNREAD:
        raise DataError(
          f"a part of type {kind!r}: the model reads texts and pictures."
        )
    return [{"type": "image"} if is_image(part) else part for part in content]

  def _as_text(self, content: Any) -> Any:
    if not isinstance(content, list):
      return content
    return "".join(
      self.placeholder if is_image(part) else part.get("text") or ""
      for part in content
    )

  def check(self, ids: np.ndarray, number: int) -> None:
    """Refuses ids whose image tokens do not fit `number` pictures."""
    present = int((ids == self.token).sum())
    if present != number * self.tokens:
      raise DataError(
        f"{present} image tokens, but {number} pictures of {self.tokens} image "
        "tokens each."
      )


class Tokenizer:
  """A tokenizer that reads the placeholders of pictures, for chat templates."""

  def __init__(self, tokenizer: tokenizers.Tokenizer, pictures: Pictures):
    self._tokenizer, self._pictures = tokenizer, pictures

  def encode(self, text: str, special: bool = False) -> np.ndarray:
    return self._pictures.encode(self._tokenizer, text, special)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._tokenizer, name)


def is_image(part: Any) -> bool:
  """Whether a part of a message's content is a picture."""
  return isinstance(part, Mapping) and (
    part.get("type") in ("image", "image_url")
  )


def _num_images(message: Any) -> int:
  content = message.get("content") if isinstance(message, Mapping) else None
  return sum(map(is_image, content)) if isinstance(content, list) else 0


def get(spec: Any, tokenizer: tokenizers.Tokenizer, key: str) -> Pictures:
  """Returns the pictures of a published model's folder, or of a dict.

  The dict has the fields of `Pictures`; `token` is by default the first id
  after the tokenizer's own.
  """
  if isinstance(spec, Mapping) and "published" in spec:
    options = dict(spec)
    folder = options.pop("published")
    check_kwargs(_OfFolder, options, key)
    return of_folder(folder, tokenizer, key, **options)
  if isinstance(spec, Mapping):
    options = {"token": tokenizer.vocab_size, **spec}
    check_kwargs(Pictures, options, key)
    result = Pictures(**options)
    if result.layout is not None:
      picture_layouts.read(result.layout, f"{key}.layout")
    check_number(f"{key}.tokens", result.tokens, least=1, whole=True)
    check_number(f"{key}.token", result.token, least=0, whole=True)
    return result
  if not isinstance(spec, str):
    raise ConfigError(
      f"{key}={spec!r}: expected the folder of a published model, or "
      "dict(tokens=..., pp=...)."
    )
  return of_folder(spec, tokenizer, key)


class _OfFolder(NamedTuple):
  """Options beside the folder of a published model."""

  # Area of pictures that a model sees in about their own size.
  min_pixels: int | None = None
  max_pixels: int | None = None


def of_folder(
  folder: str,
  tokenizer: tokenizers.Tokenizer,
  key: str,
  min_pixels: int | None = None,
  max_pixels: int | None = None,
) -> Pictures:
  path = paths.absolute(folder)
  model = _json(os.path.join(path, "config.json"), key)
  kind = str(model.get("model_type"))
  if kind not in picture_families.FAMILIES:
    raise ConfigError(
      f"{key}: {path}: model_type={kind!r}: expected "
      f"{', '.join(picture_families.FAMILIES)}. For others give "
      "dict(token=..., tokens=..., pp=...)."
    )
  processor, texts = _processor(path, key)
  layout = picture_layouts.of_processor(
    processor, model, min_pixels, max_pixels
  )
  if layout is None and (min_pixels or max_pixels):
    raise ConfigError(
      f"{key}: expected no min_pixels and max_pixels for pictures of one size."
    )
  kinds, fields_of = picture_families.FAMILIES[kind]
  if (layout["kind"] if layout else "") not in kinds:
    raise ConfigError(
      f"{key}: {path}: image_processor_type="
      f"{processor.get('image_processor_type')!r}: its pictures are not those "
      f"of model_type={kind!r}."
    )
  area = "".join(
    f", {name}={(layout or {})[name]}"
    for name in ("min_pixels", "max_pixels")
    if name in (layout or {})
  )
  pp = f"published({folder!r}, precise=True{area})"
  fields = fields_of(
    picture_families.Folder(model, processor, texts, tokenizer, layout)
  )
  if layout and not layout.get("splits_several", True):
    fields["pp_several"] = f"published({folder!r}, precise=True, several=True)"
  return Pictures(pp=pp, **fields)


def _processor(path: str, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The options of a folder's processors of pictures, and of texts."""
  files = []
  for name in ("preprocessor_config.json", "processor_config.json"):
    file = os.path.join(path, name)
    files.append(_json(file, key) if os.path.isfile(file) else {})
  if not any(files):
    raise ConfigError(
      f"{key}: {path}: expected preprocessor_config.json or "
      "processor_config.json."
    )
  pictures, texts = files
  pictures = pictures or texts
  return pictures.get("image_processor", pictures), texts


def _json(path: str, key: str) -> dict[str, Any]:
  try:
    content = json.loads(paths.read_bytes(path))
  except (OSError, ValueError) as e:
    raise ConfigError(f"{key}: {path}: cannot be read: {e}") from e
  return content if isinstance(content, dict) else {}
