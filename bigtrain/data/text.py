"""Text as bytes, without a tokenizer.

  dict(type="text", path="books/*.txt", length=1024)
  dict(type="text", name="pydoc", split="train", length=256)

Byte b is token b + 3, as in the tokenizer "bytes" (0 is padding, 1 begins a
text, 2 ends one), so the vocabulary has 259 tokens. Features, L = `length`:

- `tokens` int32 [L] and `targets` int32 [L], the next byte of each. The first
  byte of a file has the begin token as context.
- `loss_mask` float32 [L]: 0 for padding; absent with last="drop".
- `num_bytes` float32: number of targets.
"""

import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.data.formats import files, splits, windows
from bigtrain.text import tokenizers

# Ids of the tokenizer "bytes": of byte 0, and of the begin token.
_SHIFT = 3
_BEGIN = 1
# One in this many of pydoc's topics is in the split "test".
_TEST_EVERY = 10


class Source:
  """Windows of the bytes of one or more texts.

  Args:
    length: window length in tokens.
    path: a file, a pattern such as "src/**/*.py", or a list of these. Windows
      do not cross files.
    name: "pydoc", the topics of Python's own documentation.
    split: split of pydoc: "train", "test" (the last tenth of the topics) or
      "all".
    stride: bytes between the starts of windows, by default `length`.
    packing: whether short files share windows. Adds `segments` (from 1; 0 is
      padding) and `positions`, int32 [L], and leaves out `loss_mask`.
    last: "pad" or "drop", for the last window of a file if it is incomplete.
    slice: slice of the windows, such as "[:99%]".
  """

  vocab_sizes = {"tokens": _SHIFT + 256, "targets": _SHIFT + 256}
  tokenizer = "bytes", tokenizers.get("bytes").fingerprint()

  def __init__(
    self,
    length: int,
    path: str | Sequence[str] | None = None,
    *,
    name: str | None = None,
    split: str | None = None,
    stride: int | None = None,
    packing: bool = False,
    last: Literal["pad", "drop"] = "pad",
    slice: str = "",
  ):
    windows.check_options("text", length, stride, last, packing)
    if (path is None) == (name is None):
      raise ConfigError("text: expected either path or name.")
    part = ""
    if name is not None:
      text, part = _named(name, split or "train")
      self._texts: list[str | np.ndarray] = [text]
      self._names = [f"{name} {split or 'train'}"]
      self._sizes = [len(text)]
    else:
      if split is not None:
        raise ConfigError(
          f"text: split={split!r} requires name='pydoc'; for files use slice."
        )
      self._names = files.find(path, "text: path")
      self._texts = list(self._names)
      self._sizes = [os.path.getsize(p) for p in self._names]
    if not sum(self._sizes):
      raise DataError(f"text: {path}: contains no bytes.")
    self._length, self._packing = length, packing
    plan: windows.Plan
    if packing:
      starts = [np.asarray([0, size]) for size in self._sizes]
      plan = windows.Documents(starts, length, fresh=True, packed=True)
    else:
      plan = windows.Stream(
        self._sizes, length, stride or length, True, drop_last=last == "drop"
      )
    if not len(plan):
      raise DataError(
        f"text: {path or name}: no complete window of {length} tokens; "
        "last='pad' also uses incomplete ones."
      )
    self._windows = windows.Selected(plan, part, slice, "text")
    self._options = (length, stride, packing, last, part, slice)
    self._maps = files.handles(_map)
    self.spec = windows.spec(
      length, segments=packing, last=last, num_bytes=True
    )

  def __len__(self) -> int:
    return len(self._windows)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    pieces = self._windows.pieces(indices)
    shape = len(indices), self._length
    batch = windows.fill(
      pieces, shape, self._text, _BEGIN, self._packing, shift=_SHIFT
    )
    batch["num_bytes"] = batch["loss_mask"].sum(axis=1)
    return {name: batch[name] for name in self.spec}

  def _text(self, shard: int) -> np.ndarray:
    text = self._texts[shard]
    if isinstance(text, np.ndarray):
      return text
    mapped, size = self._maps.get(text), self._sizes[shard]
    if len(mapped) != size:
      raise DataError(
        f"{text}: {len(mapped)} bytes; expected {size}, as before."
      )
    return mapped

  def where(self, index: int) -> str:
    pieces = self._windows.pieces(np.asarray([index]))
    return f"{self._names[pieces.shard[0]]}, byte {pieces.begin[0]}"

  def fingerprint(self) -> str:
    names = [os.path.basename(name) for name in self._names]
    return files.digest("text", *names, *self._sizes, self._options)


def _map(path: str) -> np.ndarray:
  try:
    if not os.path.getsize(path):
      return np.zeros(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r"))
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}.") from e


def _named(name: str, split: str) -> tuple[np.ndarray, str]:
  check_choice("text: name", name, ["pydoc"])
  try:
    from pydoc_data.topics import topics
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"text: name={name!r}: this Python has no documentation topics ({e})."
    ) from e
  names = sorted(topics)
  num_train = len(names) - len(names) // _TEST_EVERY
  parts = {"train": names[:num_train], "test": names[num_train:], "all": names}
  chosen, part = splits.choose(split, parts, "text: split")
  text = "\n\n".join(topics[topic] for topic in chosen)
  return np.frombuffer(text.encode("utf-8"), np.uint8), part
