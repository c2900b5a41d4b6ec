"""Text as bytes, without a tokenizer.

  dict(type="text", path="books/*.txt", length=1024)
  dict(type="text", name="pydoc", split="train", length=256)

Byte b is token b + 3, as the tokenizer "bytes" has it (0 pads, 1 begins a text,
2 ends one); the vocabulary has 259 tokens. Windows of `length` tokens are read
by index from mapped files:

- `tokens` int32 [L] and `targets` int32 [L], the byte after each. The first
  byte of a file is predicted from the begin token, and each byte is a target of
  exactly one window, unless `stride` is given.
- `loss_mask` float32 [L]: 0 where a file's last window is padding (not there
  with last="drop").
- `num_bytes` float32: targets that are bytes.
"""

import glob
import mmap
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.data.formats import files, slices, windows
from bigtrain.settings import ConfigError, DataError, did_you_mean

_SHIFT = 3
_BEGIN = 1
_TEST_FRACTION = 10


class Source:
  """Windows of the bytes of one or more texts.

  Args:
    length: tokens of a window.
    path: a file, a pattern such as "src/**/*.py", or a list of them. No window
      goes from one file to the next.
    name: "pydoc": the topics of Python's own documentation, sorted by name and
      joined by blank lines. They come with every Python.
    split: of pydoc: "train", "test" (the last tenth of the topics) or "all".
    stride: bytes from one window to the next, `length` unless given; 1 makes a
      window of every position.
    packing: short files share a window; adds `segments` (from 1, 0 is
      padding) and `positions`, int32 [L], in place of `loss_mask`.
    last: "pad" or "drop": what becomes of a file's last bytes that do not
      fill a window.
    slice: such as "[:99%]", of the windows.

  Raises:
    ConfigError: no such file or split, a length or stride below 1.
    DataError: no bytes.
  """

  vocab_sizes = {"tokens": _SHIFT + 256, "targets": _SHIFT + 256}

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
      raise ConfigError("text: give either path or name.")
    part = ""
    if name is not None:
      found, part = _named(name, split or "train")
      self._texts: list[str | np.ndarray] = [found]
      self._names = [f"{name} {split or 'train'}"]
      self._sizes = [len(found)]
    else:
      if split is not None:
        raise ConfigError(
          f"text: split={split!r} goes with name='pydoc'; use slice='[:90%]'."
        )
      self._names = _find(path)
      self._texts = list(self._names)
      self._sizes = [os.path.getsize(p) for p in self._names]
    if not sum(self._sizes):
      raise DataError(f"text: {path}: there is not a byte in it.")
    self._length = length
    self._packing = packing
    self._plan: windows.Plan
    if packing:
      starts = [np.asarray([0, size]) for size in self._sizes]
      self._plan = windows.Documents(starts, length, fresh=True, packed=True)
    else:
      self._plan = windows.Stream(
        self._sizes,
        length,
        stride=stride or length,
        fresh=True,
        drop_last=last == "drop",
      )
    if not len(self._plan):
      raise DataError(
        f"text: {path or name}: no window of {length} tokens is full; "
        "last='pad' also takes those that are not."
      )
    self._rows = windows.Rows(self._plan, part, slice, "text")
    self._options = (length, stride, packing, last, part, slice)
    self._maps = files.Handles(_map)
    self.spec = windows.spec(
      length, segments=packing, last=last, num_bytes=True
    )

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Features of windows [B], as above, with a leading axis B."""
    pieces = self._plan.pieces(self._rows[indices])
    batch = windows.fill(
      pieces,
      len(indices),
      self._length,
      self._text,
      start_id=_BEGIN,
      shift=_SHIFT,
      segments=self._packing,
    )
    batch["num_bytes"] = batch["loss_mask"].sum(axis=1)
    return {name: batch[name] for name in self.spec}

  def _text(self, shard: int) -> np.ndarray:
    text = self._texts[shard]
    if isinstance(text, np.ndarray):
      return text
    found = self._maps.get(text)
    if len(found) != self._sizes[shard]:
      raise DataError(
        f"{text}: has {len(found)} bytes, but had {self._sizes[shard]} when "
        "the run began."
      )
    return found

  def where(self, index: int) -> str:
    """File (or name) and byte."""
    pieces = self._plan.pieces(self._rows[np.asarray([index])])
    return f"{self._names[pieces.shard[0]]}, byte {pieces.begin[0]}"

  def fingerprint(self) -> str:
    """Changes with names and sizes of the files, and with the choices."""
    names = [os.path.basename(name) for name in self._names]
    return files.digest("text", *names, *self._sizes, self._options)


def _find(path: str | Sequence[str]) -> list[str]:
  """All files that a path or pattern, or each of a list of them, stands for."""
  if not isinstance(path, str | os.PathLike):
    return [found for one in path for found in _find(one)]
  path = os.path.expanduser(os.fspath(path))
  if "**" in path:
    found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if found:
      return found
  return files.find(path, "text: path")


def _map(path: str) -> np.ndarray:
  """The bytes of a file, uint8, read when they are used."""
  try:
    with open(path, "rb") as f:
      if not os.fstat(f.fileno()).st_size:
        return np.zeros(0, np.uint8)
      mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}.") from e
  return np.frombuffer(mapped, np.uint8)


def _named(name: str, split: str) -> tuple[np.ndarray, str]:
  """The bytes of a text that is known by name, and the slice of its windows."""
  if name != "pydoc":
    raise ConfigError(f"text: no text {name!r}. There are: pydoc.")
  split, part = slices.split_name(split, "text: split")
  try:
    from pydoc_data.topics import topics
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"text: this Python came without the texts of its documentation ({e})."
    ) from e
  names = sorted(topics)
  num_train = len(names) - len(names) // _TEST_FRACTION
  splits: dict[str, Any] = {
    "train": names[:num_train],
    "test": names[num_train:],
    "all": names,
  }
  if split not in splits:
    raise ConfigError(
      f"text: split={split!r}: there is no such split."
      f"{did_you_mean(split, splits)}"
    )
  text = "\n\n".join(topics[topic] for topic in splits[split])
  return np.frombuffer(text.encode("utf-8"), np.uint8), part
