"""Tokenizers: from text to numbers and back.

  get("bytes")                   no file: one id for each byte of UTF-8
  get("c4.model")                a SentencePiece model
  get("tokenizer.json")          of Hugging Face's `tokenizers`
  get("some/published/model")    a folder with one of the two

Only the ids of text come out of `encode`: whatever begins, ends or pads a
sequence is added by whoever knows the task. Words of a caption that look like
such a token, as "</s>" does, are plain text.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from bigtrain.settings import ConfigError, did_you_mean

_BYTES_PAD, _BYTES_BOS, _BYTES_EOS, _FIRST_BYTE = 0, 1, 2, 3

# What a folder of a published model may call its tokenizer, best first.
_NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model")
# Hugging Face's files need not say which token ends a text. Where none of them
# does, these are what published tokenizers call it, if it is there.
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")
_BOS_NAMES = ("<s>", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "[CLS]")
_EOS_NAMES = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Maps text to ids [0, vocab_size) and back. Threads may share one.

  Attributes:
    name: what `get` was asked for.
    vocab_size: one more than the largest id.
    pad_id: fills sequences up; None where the tokenizer has no such token,
      and so with the next two.
    bos_id: begins a sequence.
    eos_id: ends one.
    special_ids: ids that stand for no text.
  """

  name: str
  vocab_size: int
  pad_id: int | None
  bos_id: int | None
  eos_id: int | None
  special_ids: frozenset[int]
  _encode: Callable[[str], Sequence[int] | np.ndarray] = dataclasses.field(
    repr=False
  )
  _decode: Callable[[list[int]], str] = dataclasses.field(repr=False)
  _digest: str = dataclasses.field(repr=False)

  def encode(self, text: str) -> np.ndarray:
    """int32 [n] ids of a text, without any that begin or end it."""
    return np.asarray(self._encode(text), np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids.

    Those that stand for none are left out: padding, begin and end, and numbers
    that a model with a larger vocabulary may give but that are no ids here.
    """
    # Python's own integers are what the libraries take.
    ids = [int(i) for i in np.asarray(ids).ravel()]
    return self._decode(
      [i for i in ids if 0 <= i < self.vocab_size and i not in self.special_ids]
    )

  def fingerprint(self) -> str:
    """Changes with the content of the file, not with where it lies."""
    parts = (self._digest, self.pad_id, self.bos_id, self.eos_id)
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def get(spec: str) -> Tokenizer:
  """The tokenizer that `spec` names; the same object while the file is.

  Args:
    spec: "bytes", or the path of a SentencePiece model, of a Hugging Face
      tokenizer.json, or of a folder with one of them. What a file is, its
      content says.

  Raises:
    ConfigError: no such file, one that is no tokenizer, or the package that
      reads it is not installed.
  """
  if not isinstance(spec, str) or not spec:
    raise ConfigError(
      f"tokenizer: expected 'bytes' or the path of a file, got {spec!r}."
    )
  if spec == "bytes":
    return _bytes()
  path = _find(os.path.expanduser(spec))
  stat = os.stat(path)
  return _load(spec, path, stat.st_size, stat.st_mtime_ns)


def _find(path: str) -> str:
  if os.path.isdir(path):
    for name in _NAMES:
      if os.path.isfile(os.path.join(path, name)):
        return os.path.join(path, name)
    raise ConfigError(
      f"tokenizer {path!r}: the folder has none of {', '.join(_NAMES)}."
    )
  if os.path.isfile(path):
    return path
  folder, name = os.path.split(path)
  if folder and not os.path.isdir(folder):
    raise ConfigError(f"tokenizer {path!r}: there is no folder {folder!r}.")
  there = os.listdir(folder or ".") + ([] if folder else ["bytes"])
  raise ConfigError(
    f"tokenizer {path!r}: no such file.{did_you_mean(name, there)}"
  )


@functools.cache
def _bytes() -> Tokenizer:
  def decode(ids: list[int]) -> str:
    raw = bytes(i - _FIRST_BYTE for i in ids)
    # A model may write what is no UTF-8, or be cut short within a character.
    return raw.decode("utf-8", "replace")

  return Tokenizer(
    name="bytes",
    vocab_size=_FIRST_BYTE + 256,
    pad_id=_BYTES_PAD,
    bos_id=_BYTES_BOS,
    eos_id=_BYTES_EOS,
    special_ids=frozenset(range(_FIRST_BYTE)),
    _encode=lambda text: byte_ids(text.encode()),
    _decode=decode,
    _digest="bytes v1",
  )


def byte_ids(raw: bytes) -> np.ndarray:
  """int32 [n]: the ids that the tokenizer "bytes" gives these bytes."""
  return np.frombuffer(raw, np.uint8).astype(np.int32) + _FIRST_BYTE


@functools.lru_cache(maxsize=16)
def _load(spec: str, path: str, size: int, mtime_ns: int) -> Tokenizer:
  """Reads a file; size and time make the cache forget one that changed."""
  try:
    with open(path, "rb") as f:
      content = f.read()
  except OSError as e:
    raise ConfigError(f"tokenizer {path!r}: {e.strerror}.") from e
  if not content.strip():
    raise ConfigError(f"tokenizer {path!r}: the file is empty.")
  if content.startswith(b"version https://git-lfs"):
    raise ConfigError(
      f"tokenizer {path!r}: a git-lfs pointer, not the file itself; run "
      "git lfs pull where it came from."
    )
  digest = hashlib.sha256(content).hexdigest()
  is_json = content.lstrip().startswith((b"{", b"["))
  read = _hugging_face if is_json else _sentencepiece
  return read(spec, path, content, digest)


def _sentencepiece(
  spec: str, path: str, content: bytes, digest: str
) -> Tokenizer:
  try:
    import sentencepiece
  except ModuleNotFoundError as e:
    raise _not_installed(path, "sentencepiece", e) from e
  try:
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
  except (RuntimeError, OSError) as e:
    raise ConfigError(
      f"tokenizer {path!r}: neither a SentencePiece model nor a Hugging Face "
      "tokenizer.json."
    ) from e
  size = model.get_piece_size()

  def known(i: int) -> int | None:
    return i if 0 <= i < size else None  # -1 stands for none.

  pad, bos, eos = map(known, (model.pad_id(), model.bos_id(), model.eos_id()))
  control = {i for i in range(size) if model.is_control(i)}
  return Tokenizer(
    name=spec,
    vocab_size=size,
    pad_id=pad,
    bos_id=bos,
    eos_id=eos,
    special_ids=frozenset(control | ({pad, bos, eos} - {None})),
    _encode=model.encode_as_ids,
    _decode=model.decode_ids,
    _digest=digest,
  )


def _hugging_face(
  spec: str, path: str, content: bytes, digest: str
) -> Tokenizer:
  try:
    import tokenizers
  except ModuleNotFoundError as e:
    raise _not_installed(path, "tokenizers", e) from e
  try:
    described = json.loads(content)
  except (ValueError, RecursionError) as e:
    raise ConfigError(f"tokenizer {path!r}: not valid JSON: {e}.") from e
  if not isinstance(described, dict) or "model" not in described:
    raise ConfigError(
      f"tokenizer {path!r}: JSON, but not a tokenizer.json: it has no 'model' "
      "(a vocab.json alone does not say how text is split)."
    )
  try:
    model = tokenizers.Tokenizer.from_buffer(content)
  except Exception as e:  # The library raises nothing more special.
    told = " ".join(str(e).split())
    raise ConfigError(
      f"tokenizer {path!r}: not a tokenizer.json that tokenizers "
      f"{tokenizers.__version__} reads: {told}."
    ) from e
  # Files come with the lengths that somebody once trained with.
  model.no_truncation()
  model.no_padding()
  model.encode_special_tokens = True
  added = model.get_added_tokens_decoder()
  special = {i for i, token in added.items() if token.special}
  padding = described.get("padding") or {}
  said = _said_special_tokens(os.path.dirname(path))
  ids = {}
  usual: dict[str, tuple[str | None, ...]] = {
    "pad_token": (padding.get("pad_token"), *_PAD_NAMES),
    "bos_token": _BOS_NAMES,
    "eos_token": _EOS_NAMES,
  }
  for kind, names in usual.items():
    if kind in said:
      names = (said[kind],)
    found = [model.token_to_id(name) for name in names if name]
    ids[kind] = next((i for i in found if i is not None), None)
  vocab = model.get_vocab(with_added_tokens=True)
  if not vocab:
    raise ConfigError(f"tokenizer {path!r}: its vocabulary is empty.")
  return Tokenizer(
    name=spec,
    # Ids may have gaps, so this is not their number.
    vocab_size=max(vocab.values()) + 1,
    pad_id=ids["pad_token"],
    bos_id=ids["bos_token"],
    eos_id=ids["eos_token"],
    special_ids=frozenset(special | (set(ids.values()) - {None})),
    _encode=lambda text: model.encode(text, add_special_tokens=False).ids,
    _decode=model.decode,
    _digest=digest,
  )


def _said_special_tokens(folder: str) -> dict[str, str | None]:
  """What the files beside a tokenizer.json say its special tokens are."""
  said: dict[str, str | None] = {}
  for name in ("special_tokens_map.json", "tokenizer_config.json"):
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
      continue
    try:
      with open(path, encoding="utf-8") as f:
        found: Any = json.load(f)
    except (OSError, ValueError) as e:
      raise ConfigError(f"tokenizer: {path}: cannot be read: {e}.") from e
    for kind in ("pad_token", "bos_token", "eos_token"):
      # A token is a string, or a dict of how it is to be matched; null means
      # that there is none.
      if isinstance(found, dict) and kind in found:
        token = found[kind]
        said[kind] = token.get("content") if isinstance(token, dict) else token
  return said


def _not_installed(path: str, package: str, error: Exception) -> ConfigError:
  return ConfigError(
    f"tokenizer {path!r}: reading it needs {package} ({error}); "
    "pip install 'bigtrain[text]'."
  )
