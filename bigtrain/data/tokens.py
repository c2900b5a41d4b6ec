"""Token ids in files, mapped and read in windows by index.

  dict(type="tokens", path="corpus/tokens", length=1024)
  dict(type="tokens", path="openwebtext/train.bin", length=1024, eos_id=50256)

See token_files for what can be read. Features of a window:

- `tokens` int32 [L] and `targets` int32 [L], the token after each. Each token
  is the target of exactly one window, unless `stride` is given; where
  documents end in `eos_id`, that is also the context of their first token,
  else the first is context only.
- `loss_mask` float32 [L]: 0 where the last window is padding; or
- `segments` int32 [L], documents counted from 1, 0 is padding, and `positions`
  int32 [L], from 0 in each, with packing=True or segments=True.
- `num_bytes` float32: bytes of text behind the targets, where a manifest says
  how many all tokens stand for; the average a token, so exact over all.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.data.formats import files, token_files, windows
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError, DataError


class Source:
  """Windows of the token ids in one or more files.

  Args:
    length: tokens of a window.
    path: a folder that bigtrain.tools.tokenize made, a file, a pattern, or a
      list. No window goes from one file to the next.
    dtype: of ids in files that do not say: "uint16" unless given, or "uint32".
    eos_id: ends documents; needed where neither a manifest nor an index says
      where documents end and it matters.
    cross_documents: False gives each document windows of its own.
    segments: tell the documents in a window apart, by two more features.
    packing: documents share windows where they fit, see packing.first_fit;
      those longer than a window are cut.
    stride: tokens from one window to the next, `length` unless given.
    last: "pad" or "drop": what becomes of a last window that is not full.
    vocab_size: ids must be below it; a manifest says it.
    tokenizer: "bytes" or a path, as preprocessing has it: what the ids must
      have been made with. A manifest says whether they were.
    slice: such as "[:99%]", of the windows.

  Raises:
    ConfigError: no such file, options that do not go together, or another
      tokenizer or vocabulary than the manifest's.
    DataError: a damaged file, or no window in it.
  """

  def __init__(
    self,
    length: int,
    path: str | Sequence[str],
    *,
    dtype: str | None = None,
    eos_id: int | None = None,
    cross_documents: bool = True,
    segments: bool = False,
    packing: bool = False,
    stride: int | None = None,
    last: Literal["pad", "drop"] = "pad",
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    slice: str = "",
  ):
    windows.check_options("tokens", length, stride, last, packing)
    whole = packing or not cross_documents
    if not cross_documents and (packing or segments or stride is not None):
      raise ConfigError(
        "tokens: cross_documents=False is windows of one document each, which "
        "has no packing, segments or stride."
      )
    if whole and last == "drop":
      raise ConfigError("tokens: last='drop' would drop whole documents.")
    self._shards, manifest = token_files.open_shards(path, dtype)
    self._vocab_size, self._eos_id = vocab_size, eos_id
    self._fresh = eos_id is not None
    self._bytes_per_token: float | None = None
    if manifest is not None:
      self._read_manifest(manifest, tokenizer, str(path))
    elif tokenizer is not None:
      raise ConfigError(
        f"tokens: tokenizer={tokenizer!r}: only the folders that "
        "bigtrain.tools.tokenize makes say what they were made with."
      )
    # Read by whoever checks that the model has as many.
    self.vocab_sizes = {}
    if self._vocab_size is not None:
      self.vocab_sizes = dict.fromkeys(("tokens", "targets"), self._vocab_size)
    self._length = length
    self._segments = segments or packing
    self._options = (
      length,
      self._eos_id,
      (cross_documents, segments, packing),
      (stride, last, slice),
    )
    self._plan = self._make_plan(stride or length, last, whole, packing)
    if not len(self._plan):
      raise DataError(f"tokens: {path}: no window of {length} tokens in it.")
    self._rows = windows.Rows(self._plan, "", slice, "tokens")
    self._maps = files.Handles(lambda name: self._by_name[name].map())
    self._by_name = {shard.path: shard for shard in self._shards}
    self.spec = windows.spec(
      length,
      segments=self._segments,
      last=last,
      num_bytes=self._bytes_per_token is not None,
    )

  def _read_manifest(
    self, manifest: dict[str, Any], tokenizer: str | None, folder: str
  ) -> None:
    """Takes what it says; refuses options that contradict it."""
    made_by, bos_id = manifest["tokenizer"], manifest["bos_id"]
    said = {"vocab_size": made_by["vocab_size"], "eos_id": manifest["eos_id"]}
    given = {"vocab_size": self._vocab_size, "eos_id": self._eos_id}
    for name, value in given.items():
      if value not in (None, said[name]):
        raise ConfigError(
          f"tokens: {name}={value!r}, but {folder} says {said[name]!r}."
        )
    if tokenizer is not None:
      found = tokenizers.get(tokenizer).fingerprint()
      if found != made_by["fingerprint"]:
        raise ConfigError(
          f"tokens: tokenizer={tokenizer!r}, but {folder} was made with "
          f"another, {made_by['name']!r}."
        )
    self._vocab_size, self._eos_id = said["vocab_size"], said["eos_id"]
    # Documents that begin with a token of their own need no other before.
    self._fresh = self._eos_id is not None and bos_id is None
    if manifest["num_tokens"]:
      self._bytes_per_token = manifest["num_bytes"] / manifest["num_tokens"]

  def _make_plan(
    self, stride: int, last: str, whole: bool, packing: bool
  ) -> windows.Plan:
    stream = windows.Stream(
      [shard.size for shard in self._shards],
      self._length,
      stride=stride,
      fresh=self._fresh,
      drop_last=last == "drop",
    )
    if not whole and not self._segments:
      return stream
    starts = [np.append(0, self._ends(shard)) for shard in self._shards]
    if not whole:
      return windows.Masked(stream, starts, fresh=self._fresh)
    return windows.Documents(
      starts, self._length, fresh=self._fresh, packed=packing
    )

  def _ends(self, shard: token_files.Shard) -> np.ndarray:
    if shard.ends is not None:
      return shard.ends()
    if self._eos_id is None:
      raise ConfigError(
        f"tokens: nothing says where the documents of {shard.path} end; give "
        "the id that ends them as eos_id."
      )
    return token_files.ends_by_id(shard, self._eos_id)

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Features of windows [B], as above, with a leading axis B."""
    pieces = self._plan.pieces(self._rows[indices])
    batch = windows.fill(
      pieces,
      len(indices),
      self._length,
      lambda shard: self._maps.get(self._shards[shard].path),
      start_id=self._eos_id,
      segments=self._segments,
    )
    if self._vocab_size is not None:
      self._check_ids(batch, indices)
    if self._bytes_per_token is not None:
      counts = batch["loss_mask"].sum(axis=1)
      batch["num_bytes"] = counts * np.float32(self._bytes_per_token)
    return {name: batch[name] for name in self.spec}

  def _check_ids(
    self, batch: dict[str, np.ndarray], indices: np.ndarray
  ) -> None:
    """Ids that no embedding has would train something else in silence."""
    for name in ("tokens", "targets"):
      ids = batch[name]
      if ids.min() < 0 or ids.max() >= self._vocab_size:
        row, at = np.argwhere((ids < 0) | (ids >= self._vocab_size))[0]
        raise DataError(
          f"{self.where(int(indices[row]))}: id {ids[row, at]} in the window "
          f"that begins there, but the vocabulary has {self._vocab_size}: a "
          "damaged file, another dtype or another tokenizer."
        )

  def where(self, index: int) -> str:
    """File and token."""
    pieces = self._plan.pieces(self._rows[np.asarray([index])])
    return f"{self._shards[pieces.shard[0]].path}, token {pieces.begin[0]}"

  def fingerprint(self) -> str:
    """Changes with names and sizes of the files, and with the choices."""
    parts = [
      (os.path.basename(shard.path), shard.size, shard.dtype)
      for shard in self._shards
    ]
    return files.digest("tokens", *parts, self._options)
