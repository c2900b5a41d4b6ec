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
from bigtrain.text import chat, picture_layouts, tokenizers

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
  config = _json(os.path.join(path, "config.json"), key)
  kind = config.get("model_type")
  vision: dict[str, Any] = {"image_size": 224, "patch_size": 16}
  vision |= config.get("vision_config") or {}
  side = vision["image_size"] // vision["patch_size"]
  token = config.get("image_token_index", config.get("image_token_id"))
  pp = f"published({folder!r}, precise=True)"
  layout = _layout(path, config, min_pixels, max_pixels)
  if layout is not None:
    area = "".join(
      f", {name}={layout[name]}"
      for name in ("min_pixels", "max_pixels")
      if name in layout
    )
    pp = f"published({folder!r}, precise=True{area})"
    if layout["kind"] in ("fitted", "views"):
      return _of_newer(config, tokenizer, token, folder, layout)
    return _with_layout(str(kind), tokenizer, token, pp, layout)
  if min_pixels or max_pixels:
    raise ConfigError(
      f"{key}: expected no min_pixels and max_pixels for pictures of one size."
    )
  if kind == "paligemma":
    return Pictures(token or 256000, side**2, pp, first=True)
  if kind == "gemma3":
    ends = [
      config.get(f"{name}_token_index", default)
      for name, default in (("boi", 255999), ("eoi", 256000))
    ]
    begin, end = (tokenizer.spell([number]) for number in ends)
    return Pictures(
      262144 if token is None else token,
      config.get("mm_tokens_per_image", 256),
      pp,
      placeholder=begin,
      before="\n\n" + begin,
      after=end + "\n\n",
    )
  if kind == "llava":
    tower = config.get("vision_config", {}).get("model_type", "clip")
    has_class = tower.startswith("clip")
    is_full = config.get("vision_feature_select_strategy", "default") == "full"
    number = side**2 + (has_class and is_full)
    return Pictures(32000 if token is None else token, number, pp)
  raise ConfigError(
    f"{key}: {path}: model_type={kind!r}: expected paligemma, gemma3, gemma4, "
    "llava, llava_next, llava_onevision, idefics3, smolvlm or a Qwen-VL, with "
    "preprocessor_config.json. "
    "For others give dict(token=..., tokens=..., pp=...)."
  )


def _layout(
  path: str,
  config: Mapping[str, Any],
  min_pixels: int | None,
  max_pixels: int | None,
) -> dict[str, Any] | None:
  for name in ("preprocessor_config.json", "processor_config.json"):
    file = os.path.join(path, name)
    if os.path.isfile(file):
      values = _json(file, "pictures")
      values = values.get("image_processor", values)
      layout = picture_layouts.of_processor(values, min_pixels, max_pixels)
      if layout is not None and layout["kind"] == "tiles":
        vision = {"patch_size": 32, **(config.get("vision_config") or {})}
        side = layout["tile"] // vision["patch_size"]
        layout["tokens"] = (side // config.get("scale_factor", 2)) ** 2
      return layout
  return None


def _with_layout(
  kind: str,
  tokenizer: tokenizers.Tokenizer,
  token: int | None,
  pp: str,
  layout: Mapping[str, Any],
) -> Pictures:
  """Pictures of Qwen's models, Idefics 3 and SmolVLM."""
  if layout["kind"] == "tiles":
    token = 128257 if token is None else token
    return Pictures(token, 1, pp, layout=layout)
  token = 151655 if token is None else token
  placeholder = tokenizer.spell([token])
  whole = f"<|vision_start|>{placeholder}<|vision_end|>"
  return Pictures(
    token, 1, pp, placeholder=placeholder, layout=layout, unplaced=whole
  )


def _of_newer(
  config: Mapping[str, Any],
  tokenizer: tokenizers.Tokenizer,
  token: int | None,
  folder: str,
  layout: dict[str, Any],
) -> Pictures:
  """Pictures of Gemma 4, LLaVA-NeXT and LLaVA-OneVision."""
  pp = f"published({folder!r}, precise=True)"
  if layout["kind"] == "fitted":
    token = 258880 if token is None else token
    ends = [
      tokenizer.spell([config.get(f"{name}_token_id", default)])
      for name, default in (("boi", 255999), ("eoi", 258882))
    ]
    layout |= dict(before=ends[0], after=ends[1])
    placeholder = tokenizer.spell([token])
    return Pictures(token, 1, pp, placeholder=placeholder, layout=layout)
  vision = config.get("vision_config") or {}
  layout["side"] = vision["image_size"] // vision["patch_size"]
  if layout["splits_several"]:
    return Pictures(32000 if token is None else token, 1, pp, layout=layout)
  limit = config.get("vision_aspect_ratio", "anyres_max_9")
  layout["limit"] = int(limit.removeprefix("anyres_max_"))
  return Pictures(
    151646 if token is None else token,
    1,
    pp,
    layout=layout,
    pp_several=f"published({folder!r}, precise=True, several=True)",
  )


def _json(path: str, key: str) -> dict[str, Any]:
  try:
    content = json.loads(paths.read_bytes(path))
  except (OSError, ValueError) as e:
    raise ConfigError(f"{key}: {path}: cannot be read: {e}") from e
  return content if isinstance(content, dict) else {}
