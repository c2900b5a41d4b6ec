"""Windows of token ids from memory-mapped files.

  dict(type="tokens", path="corpus/tokens", length=1024)
  dict(type="tokens", path="openwebtext/train.bin", length=1024, eos_id=50256)

formats/token_files.py lists the formats. Features of a window:

- `tokens` int32 [L] and `targets` int32 [L], the next token of each. If
  documents end in `eos_id`, this id is also the context of the next document's
  first token; otherwise a document's first token is not a target.
- `loss_mask` float32 [L]: 0 for padding. With packing or segments there are
  instead `segments` int32 [L], the number of the document from 1 (0 for
  padding), and `positions` int32 [L], the position in the document from 0.
- `num_bytes` float32: estimated bytes of text of the targets, from the average
  bytes per token in the manifest.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_number
from bigtrain.data.formats import files, token_files, windows
from bigtrain.text import tokenizers


class Source:
  """Windows of the token ids in one or more files.

  Args:
    length: window length in tokens, L.
    path: a folder made by bigtrain.tools.tokenize, a file, a pattern, or a list
      of files and patterns. Windows do not cross files.
    dtype: dtype of the ids in files that do not store it, "uint16" by default.
    eos_id: last id of each document, for files without manifest and index.
    cross_documents: whether windows may cross documents.
    segments: whether to add `segments` and `positions`.
    packing: whether whole documents share windows; longer ones are split.
    stride: tokens between the starts of windows, by default `length`.
    last: "pad" or "drop", for the last window if it is incomplete.
    vocab_size: exclusive upper bound of the ids, by default the manifest's.
    tokenizer: "bytes" or a path; must be the tokenizer named in the manifest.
    slice: slice of the windows, such as "[:99%]".
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
    tokenizer: tokenizers.Spec | None = None,
    slice: str = "",
  ):
    windows.check_options("tokens", length, stride, last, packing)
    if eos_id is not None:
      check_number("tokens: eos_id", eos_id, least=0, whole=True)
    if vocab_size is not None:
      check_number("tokens: vocab_size", vocab_size, least=1, whole=True)
    whole = packing or not cross_documents
    if not cross_documents and (packing or segments or stride is not None):
      raise ConfigError(
        "tokens: cross_documents=False makes windows of one document each and "
        "cannot be combined with packing, segments or stride."
      )
    if whole and last == "drop":
      raise ConfigError("tokens: last='drop' would drop whole documents.")
    self._shards, manifest = token_files.open_shards(path, dtype)
    self._vocab_size, self._eos_id = vocab_size, eos_id
    # Whether a document's first token is a target, with eos_id as context.
    self._fresh = eos_id is not None
    self._bytes_per_token: float | None = None
    self.tokenizer: tuple[str, str] | None = None
    if manifest is not None:
      self._read_manifest(manifest, tokenizer, str(path))
    elif tokenizer is not None:
      raise ConfigError(
        f"tokens: tokenizer={tokenizer!r}: cannot be checked; only folders of "
        "bigtrain.tools.tokenize record their tokenizer."
      )
    # The input pipeline checks these against the model's vocabulary.
    self.vocab_sizes = {}
    if self._vocab_size is not None:
      self.vocab_sizes = dict.fromkeys(("tokens", "targets"), self._vocab_size)
    self._length, self._segments = length, segments or packing
    # For the fingerprint.
    flags = cross_documents, segments, packing
    self._options = (length, self._eos_id, flags, (stride, last, slice))
    plan = self._make_plan(stride or length, last, whole, packing)
    if not len(plan):
      raise DataError(f"tokens: {path}: contains no window of {length} tokens.")
    self._windows = windows.Selected(plan, "", slice, "tokens")
    self._maps = files.handles(lambda name: self._by_name[name].map())
    self._by_name = {shard.path: shard for shard in self._shards}
    knows_bytes = self._bytes_per_token is not None
    self.spec = windows.spec(
      length, segments=self._segments, last=last, num_bytes=knows_bytes
    )

  def _read_manifest(
    self, manifest: dict[str, Any], tokenizer: Any, folder: str
  ) -> None:
    made_by, bos_id = manifest["tokenizer"], manifest["bos_id"]
    self.tokenizer = made_by["name"], made_by["fingerprint"]
    for name, value, expected in (
      ("vocab_size", self._vocab_size, made_by["vocab_size"]),
      ("eos_id", self._eos_id, manifest["eos_id"]),
    ):
      if value not in (None, expected):
        raise ConfigError(
          f"tokens: {name}={value!r}: expected {expected!r}, as in the "
          f"manifest of {folder}."
        )
    if tokenizer is not None:
      fingerprint = tokenizers.get(tokenizer).fingerprint()
      if fingerprint != made_by["fingerprint"]:
        raise ConfigError(
          f"tokens: tokenizer={tokenizer!r}: {folder} was made with another "
          f"tokenizer, {made_by['name']!r}."
        )
    self._vocab_size, self._eos_id = made_by["vocab_size"], manifest["eos_id"]
    # A begin token in the data is the context of a document's first token.
    self._fresh = self._eos_id is not None and bos_id is None
    if manifest["num_tokens"]:
      self._bytes_per_token = manifest["num_bytes"] / manifest["num_tokens"]

  def _make_plan(
    self, stride: int, last: str, whole: bool, packing: bool
  ) -> windows.Plan:
    sizes = [shard.size for shard in self._shards]
    stream = windows.Stream(
      sizes, self._length, stride, self._fresh, drop_last=last == "drop"
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
        f"tokens: eos_id: missing; {shard.path} has no index of documents, so "
        "give the id that ends them."
      )
    return token_files.ends_by_id(shard, self._eos_id)

  def __len__(self) -> int:
    return len(self._windows)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    pieces = self._windows.pieces(indices)
    shape = len(indices), self._length
    batch = windows.fill(
      pieces, shape, self._tokens_of, self._eos_id or 0, self._segments
    )
    if self._vocab_size is not None:
      self._check_ids(batch, indices)
    if self._bytes_per_token is not None:
      counts = batch["loss_mask"].sum(axis=1)
      batch["num_bytes"] = counts * np.float32(self._bytes_per_token)
    return {name: batch[name] for name in self.spec}

  def _tokens_of(self, shard: int) -> np.ndarray:
    return self._maps.get(self._shards[shard].path)

  def _check_ids(
    self, batch: dict[str, np.ndarray], indices: np.ndarray
  ) -> None:
    for ids in (batch["tokens"], batch["targets"]):
      if ids.min() < 0 or ids.max() >= self._vocab_size:
        row, at = np.argwhere((ids < 0) | (ids >= self._vocab_size))[0]
        raise DataError(
          f"{self.where(int(indices[row]))}: id {ids[row, at]} in this window, "
          f"but the vocabulary has {self._vocab_size}: the file is damaged, or "
          "has another dtype or tokenizer."
        )

  def where(self, index: int) -> str:
    pieces = self._windows.pieces(np.asarray([index]))
    return f"{self._shards[pieces.shard[0]].path}, token {pieces.begin[0]}"

  def fingerprint(self) -> str:
    names = [os.path.basename(shard.path) for shard in self._shards]
    parts = [(n, s.size, s.dtype) for n, s in zip(names, self._shards)]
    return files.digest("tokens", *parts, self._options)
