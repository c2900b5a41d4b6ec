"""Prompts with pictures, as features of a model that reads both.

A prompt is dict(text=..., images=[...]), or dict(messages=..., images=[...])
for a conversation. A picture is what `Predictor.predict` takes.

Legend: B batch, N pictures of a prompt, H height, W width.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.files import paths
from bigtrain.inference.saved import Saved
from bigtrain.pp import pixels
from bigtrain.text import pictures, tokenizers

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
    self._pixels = pixels.Pixels(self.pictures.pp)

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
    self.pictures.check(result, number)
    if len(result) and result[-1] == self.pictures.token:
      raise DataError("a prompt: expected text after the last picture.")
    return result

  def images(self, prompts: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """Float32 [B, N, H, W, 3], zeros where a prompt has fewer pictures."""
    rows = [
      self._pixels([_raw(x) for x in images_of(prompt)]) for prompt in prompts
    ]
    shapes = {picture.shape for row in rows for picture in row}
    if not shapes:
      return None
    if len(shapes) > 1:
      raise DataError(
        f"images: expected one size after preprocessing, got {sorted(shapes)}."
      )
    most = max(map(len, rows))
    result = np.zeros((len(rows), most, *shapes.pop()), np.float32)
    for b, row in enumerate(rows):
      for n, picture in enumerate(row):
        result[b, n] = picture
    return result


def images_of(prompt: Mapping[str, Any]) -> list[Any]:
  """The pictures of a prompt, a list or one."""
  given = prompt.get("images")
  if given is None:
    return []
  return [*given] if isinstance(given, list | tuple) else [given]


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
    picture = picture.convert("RGB")
  array = np.asarray(picture)
  array = array[..., None] if array.ndim == 2 else array
  if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3):
    raise DataError(
      "images: expected paths, bytes of files, pictures of PIL, or arrays of "
      f"uint8 [height, width, 3], got {array.dtype}{list(array.shape)}."
    )
  return np.broadcast_to(array, (*array.shape[:2], 3))
