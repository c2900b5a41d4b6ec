"""Turns prompts with pictures into features for a model that reads both.

A prompt is dict(text=..., images=[...]), or dict(messages=..., images=[...])
for a conversation. A picture is anything that `Predictor.predict` accepts.

Legend: B batch, N pictures of a prompt, H height, W width.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.files import paths, picture_sizes
from bigtrain.inference.saved import Saved
from bigtrain.pp import picture_files, pixels
from bigtrain.text import pictures, tokenizers

# Numbers of patches are rounded up to a multiple of this, so that few programs
# are compiled.
_ROUND_TO = 64
_FIELDS = ("text", "messages", "images")


class PicturePrompts:
  """Prepares prompts with pictures for a saved model."""

  def __init__(self, saved: Saved, tokenizer: tokenizers.Tokenizer):
    self._saved, self._tokenizer = saved, tokenizer
    options = saved.data.get("prompts", {}).get("pictures")
    if options is None:
      raise ConfigError(
        f"{saved.path}: the model reads no pictures, or its folder does not "
        "say how they are prepared."
      )
    self.pictures = pictures.get(options, tokenizer, "pictures")
    # Whole squares of the patches that become a token.
    merge = (self.pictures.layout or {}).get("merge", 1)
    self._round_to = math.lcm(_ROUND_TO, merge**2)
    self._pixels = pixels.Pixels(self.pictures.pp, self.pictures.pp_several)

  def ids(self, prompt: Mapping[str, Any]) -> np.ndarray:
    """Token ids of a prompt, int32 [L]."""
    for name in prompt:
      if name not in _FIELDS:
        hint = did_you_mean(name, _FIELDS)
        raise ConfigError(f"a prompt: {name}: unknown key.{hint}")
    number = len(images_of(prompt))
    if prompt.get("messages") is not None:
      ids = self._saved.ids_of_chat(
        self._tokenizer, prompt["messages"], num_pictures=number
      )
    else:
      text = self.pictures.prompt(
        self._tokenizer, prompt.get("text", ""), number
      )
      ids = self.pictures.encode(self._tokenizer, text, False).tolist()
      bos = self._tokenizer.bos_id
      adds_bos = self._saved.adds_bos(self._tokenizer)
      if adds_bos and bos is not None and not self.pictures.first:
        ids = [bos, *ids]
    result = np.asarray(ids, np.int32)
    if self.pictures.layout is None:
      self.pictures.check(result, number)
    else:
      sizes = [_size(_raw(x)) for x in images_of(prompt)]
      result, _ = self.pictures.expanded(self._tokenizer, result, sizes)
    if len(result) and result[-1] == self.pictures.token:
      raise DataError("a prompt: expected text after the last picture.")
    return result

  def features(
    self, prompts: Sequence[Mapping[str, Any]]
  ) -> dict[str, np.ndarray]:
    """The pictures of prompts: "image", perhaps "shapes"; or nothing.

    "image" is float32 [B, N, H, W, 3] or [B, N, patches, values], with zeros
    where a prompt has fewer pictures.
    """
    rows = [
      self._pixels([_raw(x) for x in images_of(prompt)]) for prompt in prompts
    ]
    return pixels.features(rows, round_to=self._round_to) if any(rows) else {}


def images_of(prompt: Mapping[str, Any]) -> list[Any]:
  """The pictures of a prompt, as a list."""
  given = prompt.get("images")
  if given is None:
    return []
  return [*given] if isinstance(given, list | tuple) else [given]


def _size(raw: bytes | np.ndarray) -> tuple[int, int]:
  """Height and width."""
  if isinstance(raw, bytes):
    return picture_sizes.size(raw)
  return raw.shape[0], raw.shape[1]


def _raw(picture: Any) -> bytes | np.ndarray:
  """The bytes of a file, or uint8 [H, W, 3]."""
  if isinstance(picture, str | os.PathLike):
    try:
      return paths.read_bytes(paths.absolute(picture))
    except OSError as e:
      raise DataError(f"{os.fspath(picture)}: {e.strerror}.") from e
  if isinstance(picture, bytes | bytearray):
    return bytes(picture)
  if hasattr(picture, "convert"):  # Of PIL.
    picture = picture_files.opaque(picture)
  array = np.asarray(picture)
  array = array[..., None] if array.ndim == 2 else array
  if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3):
    raise DataError(
      "images: expected paths, bytes of files, pictures of PIL, or arrays of "
      f"uint8 [height, width, 3], got {array.dtype}{list(array.shape)}."
    )
  return np.broadcast_to(array, (*array.shape[:2], 3))
