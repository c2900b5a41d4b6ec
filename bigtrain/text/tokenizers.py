"""Tokenizers: they turn text into ids and back.

  get("bytes")                   one id per byte of UTF-8; needs no file
  get("c4.model")                a SentencePiece model
  get("tokenizer.json")          a file of Hugging Face's `tokenizers`
  get("some/published/model")    a folder with one of these files
  get(dict(path="some/published/model", new_tokens=["<call>"]))
                                 a tokenizer.json, with more tokens

`encode` returns only the ids of the text, without begin token, end token and
padding. Text that spells a special token, such as "</s>", stays plain text,
except with `special=True`, for texts that a chat template has written.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  check_keys,
  did_you_mean,
  import_package,
)
from bigtrain.files import paths

# Id of byte 0 in "bytes"; before it are padding, begin and end of a text.
_FIRST_BYTE = 3

# What `get` takes: "bytes", a path, or a path with new tokens. The latter is a
# dict, or as `Tokenizer.name` its JSON.
Spec = str | Mapping[str, Any]

# Names of tokenizers in folders of published models, in order of preference.
NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model")
# Hugging Face's files may leave out which token ends a text. Then the first of
# these common names that is in the vocabulary is used.
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")
_BOS_NAMES = ("<s>", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "[CLS]")
_EOS_NAMES = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")


class NewTokens(NamedTuple):
  """Tokens that a config adds to a tokenizer; their ids follow its own."""

  new_tokens: tuple[str, ...] = ()  # Text, such as pieces of a language.
  new_special_tokens: tuple[str, ...] = ()  # No text, such as ends of turns.


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Maps text to ids [0, vocab_size) and back. Thread-safe."""

  name: str  # Argument of `get`, with new tokens as JSON.
  vocab_size: int  # Largest id + 1.
  pad_id: int | None
  bos_id: int | None
  eos_id: int | None
  special_ids: frozenset[int]  # Ids that are not text.
  _encode: Callable[[str], Sequence[int] | np.ndarray]
  _decode: Callable[[list[int]], str]
  _digest: str
  # Like _encode, but what spells a special token becomes its id.
  _encode_special: Callable[[str], Sequence[int]] | None = None
  # {special token: id}.
  spellings: Mapping[str, int] = dataclasses.field(default_factory=dict)
  adds_bos: bool = False  # Whether the library begins every text with bos_id.
  # Ids that belong to the file, so new tokens have ids from here on.
  size_in_file: int = 0
  _vocab: Callable[[], Mapping[str, int]] = dict  # {token: id} of all tokens.

  @property
  def new_special_tokens(self) -> tuple[str, ...]:
    """Special tokens that the config adds to the file's."""
    return parse(self.name)[1].new_special_tokens

  def __repr__(self) -> str:
    return f"Tokenizer({self.name!r})"

  def encode(self, text: str, special: bool = False) -> np.ndarray:
    if not special:
      return np.asarray(self._encode(text), np.int32)
    if self._encode_special is None:
      raise ConfigError(
        f"tokenizer {self.name!r}: special tokens in texts, as chat templates "
        "write them, need a tokenizer.json."
      )
    return np.asarray(self._encode_special(text), np.int32)

  def spell(self, ids: Iterable[int]) -> str:
    """Returns the text of ids, with special ids spelled out."""
    names = {i: text for text, i in self.spellings.items()}
    parts, run = [], list[int]()
    for i in map(int, ids):
      if i in self.special_ids:
        parts += [self.decode(run), names.get(i, f"<{i}>")]
        run = []
      else:
        run.append(i)
    return "".join([*parts, self.decode(run)])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of ids, without special ids and ids beyond the size."""
    # The libraries take only Python integers.
    ids = [int(i) for i in np.asarray(ids).ravel()]
    return self._decode(
      [i for i in ids if 0 <= i < self.vocab_size and i not in self.special_ids]
    )

  def extends(self, other: "Tokenizer") -> bool:
    """Whether all tokens of the other tokenizer have the same ids here."""
    own = self._vocab()
    return all(own.get(token) == i for token, i in other._vocab().items())

  def fingerprint(self) -> str:
    """Hash of the content and the special ids, not of the path."""
    parts = (self._digest, self.pad_id, self.bos_id, self.eos_id)
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_folder(path: object) -> bool:
  """Returns whether a path is a folder with a tokenizer."""
  return isinstance(path, str) and any(
    os.path.isfile(os.path.join(paths.absolute(path), name)) for name in NAMES
  )


def get(spec: Spec) -> Tokenizer:
  """Returns the tokenizer "bytes", or the one of a file or folder.

  It is loaded once, and loaded again if the file has changed.
  """
  path_or_name, new = parse(spec)
  if path_or_name == "bytes":
    if any(new):
      raise ConfigError(
        "tokenizer 'bytes': expected no new tokens; they need a tokenizer.json."
      )
    return _bytes()
  path = _find(path_or_name)
  stat = os.stat(path)
  name = name_of(path_or_name, new)
  return _load(name, path, new, stat.st_size, stat.st_mtime_ns)


def parse(spec: Spec) -> tuple[str, NewTokens]:
  """Returns (path or "bytes", new tokens) of an argument of `get`."""
  if isinstance(spec, str) and spec.startswith("{"):
    with contextlib.suppress(ValueError):
      spec = json.loads(spec)
  if isinstance(spec, str) and spec:
    return spec, NewTokens()
  if not isinstance(spec, Mapping) or not isinstance(spec.get("path"), str):
    raise ConfigError(
      "tokenizer: expected 'bytes', the path of a file, or dict(path=..., "
      f"new_tokens=[...]), got {spec!r}."
    )
  check_keys("tokenizer", spec, ("path", *NewTokens._fields))
  new = NewTokens(
    **{
      field: _texts(f"tokenizer.{field}", spec.get(field) or ())
      for field in NewTokens._fields
    }
  )
  repeated = [x for x, n in Counter(itertools.chain(*new)).items() if n > 1]
  if repeated:
    raise ConfigError(f"tokenizer: {repeated[0]!r} is there twice.")
  return spec["path"], new


def _texts(key: str, value: Any) -> tuple[str, ...]:
  if isinstance(value, list | tuple):
    if all(isinstance(text, str) and text for text in value):
      return tuple(value)
  raise ConfigError(f"{key}: expected a list of texts, got {value!r}.")


def name_of(path: str, new: NewTokens) -> str:
  """Returns the `Tokenizer.name` of a path with new tokens."""
  if not any(new):
    return path
  fields = {field: [*texts] for field, texts in new._asdict().items() if texts}
  return json.dumps({"path": path, **fields}, ensure_ascii=False)


def has_new_tokens(spec: Any) -> bool:
  """Whether a value of a config is a tokenizer with new tokens."""
  is_dict = isinstance(spec, Mapping)
  return is_dict and bool({*spec} & {*NewTokens._fields})


def moved(name: str, spec: Spec) -> Spec:
  """Returns the tokenizer `name` at a new path; it keeps its new tokens."""
  path, new = parse(spec)
  return spec if any(new) else name_of(path, parse(name)[1])


def _find(spec: str) -> str:
  path = paths.absolute(spec)
  if os.path.isdir(path):
    for name in NAMES:
      if os.path.isfile(os.path.join(path, name)):
        return os.path.join(path, name)
    raise ConfigError(
      f"tokenizer {spec!r}: the folder needs one of {', '.join(NAMES)}."
    )
  if os.path.isfile(path):
    return path
  folder, name = os.path.split(path)
  if not os.path.isdir(folder):
    raise ConfigError(f"tokenizer {spec!r}: there is no folder {folder!r}.")
  options = os.listdir(folder)
  if os.sep not in spec:
    options.append("bytes")
  raise ConfigError(
    f"tokenizer {spec!r}: no such file.{did_you_mean(name, options)} The full "
    f"path is {path}."
  )


@functools.cache
def _bytes() -> Tokenizer:
  def encode(text: str) -> np.ndarray:
    raw = np.frombuffer(text.encode(), np.uint8)
    return raw.astype(np.int32) + _FIRST_BYTE

  def decode(ids: list[int]) -> str:
    raw = bytes(i - _FIRST_BYTE for i in ids)
    # A model may write invalid UTF-8, or stop in the middle of a character.
    return raw.decode("utf-8", "replace")

  spellings = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
  return Tokenizer(
    name="bytes",
    vocab_size=_FIRST_BYTE + 256,
    size_in_file=_FIRST_BYTE + 256,
    _vocab=lambda: {str(i): i for i in range(_FIRST_BYTE + 256)},
    pad_id=0,
    bos_id=1,
    eos_id=2,
    special_ids=frozenset(spellings.values()),
    spellings=spellings,
    _encode=encode,
    _decode=decode,
    _digest="bytes v1",
  )


@functools.lru_cache(maxsize=16)
def _load(
  name: str, path: str, new: NewTokens, size: int, mtime_ns: int
) -> Tokenizer:
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
      "git lfs pull in its repository."
    )
  digest = hashlib.sha256(content).hexdigest()
  is_json = content.lstrip().startswith((b"{", b"["))
  if is_json:
    return _hugging_face(name, path, content, digest, new)
  if any(new):
    raise ConfigError(
      f"tokenizer {path!r}: new tokens need a tokenizer.json; transformers' "
      "AutoTokenizer writes one beside it."
    )
  return _sentencepiece(name, path, content, digest)


def _without_none(*ids: int | None) -> frozenset[int]:
  return frozenset(i for i in ids if i is not None)


def _sentencepiece(
  name: str, path: str, content: bytes, digest: str
) -> Tokenizer:
  by = f"tokenizer {path!r}: reading it"
  sentencepiece = import_package("sentencepiece", by, "'bigtrain[text]'")
  try:
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
  except (RuntimeError, OSError) as e:
    raise ConfigError(
      f"tokenizer {path!r}: neither a SentencePiece model nor a Hugging Face "
      "tokenizer.json."
    ) from e
  size = model.get_piece_size()

  def id_or_none(i: int) -> int | None:
    return i if 0 <= i < size else None  # The library uses -1 for None.

  pad = id_or_none(model.pad_id())
  bos = id_or_none(model.bos_id())
  eos = id_or_none(model.eos_id())
  control = {i for i in range(size) if model.is_control(i)}
  return Tokenizer(
    name=name,
    vocab_size=size,
    size_in_file=size,
    _vocab=lambda: {model.id_to_piece(i): i for i in range(size)},
    pad_id=pad,
    bos_id=bos,
    eos_id=eos,
    special_ids=_without_none(*control, pad, bos, eos),
    spellings={model.id_to_piece(i): i for i in control},
    _encode=model.encode_as_ids,
    _decode=model.decode_ids,
    _digest=digest,
  )


def _hugging_face(
  name: str, path: str, content: bytes, digest: str, new: NewTokens
) -> Tokenizer:
  by = f"tokenizer {path!r}: reading it"
  tokenizers = import_package("tokenizers", by, "'bigtrain[text]'")
  try:
    parsed = json.loads(content)
  except (ValueError, RecursionError) as e:
    raise ConfigError(f"tokenizer {path!r}: not valid JSON: {e}.") from e
  if not isinstance(parsed, dict) or "model" not in parsed:
    raise ConfigError(
      f"tokenizer {path!r}: JSON, but not a tokenizer.json: it has no 'model' "
      "(a vocab.json alone does not define how to split text)."
    )
  try:
    model = tokenizers.Tokenizer.from_buffer(content)
  except Exception as e:  # The library raises no more specific type.
    reason = " ".join(str(e).split())
    raise ConfigError(
      f"tokenizer {path!r}: not a tokenizer.json that tokenizers "
      f"{tokenizers.__version__} reads: {reason}."
    ) from e
  size_in_file = _size(model, path)
  add_tokens(model, new, path)
  # Files may contain the sequence lengths of the original training.
  model.no_truncation()
  model.no_padding()
  model.encode_special_tokens = True
  added = model.get_added_tokens_decoder()
  special = {i for i, token in added.items() if token.special}
  padding = parsed.get("padding") or {}
  declared = declared_special_tokens(os.path.dirname(path))
  # A second object, because that option holds for all threads of the first.
  with_special = tokenizers.Tokenizer.from_buffer(content)
  add_tokens(with_special, new, path)
  with_special.no_truncation()
  with_special.no_padding()

  def find(kind: str, names: tuple[str | None, ...]) -> int | None:
    """Returns the id of the declared token, or the first of these names."""
    names = (declared[kind],) if kind in declared else names
    ids = [model.token_to_id(name) for name in names if name]
    return next((i for i in ids if i is not None), None)

  pad = find("pad_token", (padding.get("pad_token"), *_PAD_NAMES))
  bos, eos = find("bos_token", _BOS_NAMES), find("eos_token", _EOS_NAMES)
  ids = _without_none(*special, pad, bos, eos)
  return Tokenizer(
    name=name,
    vocab_size=_size(model, path),
    size_in_file=size_in_file,
    _vocab=lambda: model.get_vocab(with_added_tokens=True),
    pad_id=pad,
    bos_id=bos,
    eos_id=eos,
    special_ids=ids,
    spellings={model.id_to_token(i): i for i in ids},
    adds_bos=bos is not None and bos in with_special.encode("a").ids[:1],
    _encode=lambda text: model.encode(text, add_special_tokens=False).ids,
    _encode_special=lambda text: (
      with_special.encode(text, add_special_tokens=False).ids
    ),
    _decode=model.decode,
    _digest=" ".join([digest, *([name_of("", new)] if any(new) else [])]),
  )


def _size(model: Any, path: str) -> int:
  """Largest id + 1. Ids may have gaps, so this may exceed their count."""
  vocab = model.get_vocab(with_added_tokens=True)
  if not vocab:
    raise ConfigError(f"tokenizer {path!r}: its vocabulary is empty.")
  return max(vocab.values()) + 1


def add_tokens(model: Any, new: NewTokens, path: str) -> None:
  """Adds tokens to a Tokenizer of the library; `path` is for messages."""
  size = _size(model, path)
  for token in itertools.chain(*new):
    # Spelled as in the file, or as text: " six" may be "Ġsix" there.
    encoded = model.encode(token, add_special_tokens=False)
    ids = [i for i, real in zip(encoded.ids, encoded.attention_mask) if real]
    i = model.token_to_id(token)
    if i is None and len(ids) == 1 and model.decode(ids) == token:
      i = ids[0]
    if i is not None:
      raise ConfigError(
        f"tokenizer {path!r}: {token!r} is no new token: it has the id {i}."
      )
  model.add_tokens([*new.new_tokens])
  model.add_special_tokens([*new.new_special_tokens])
  ids = [model.token_to_id(token) for token in itertools.chain(*new)]
  if ids != [*range(size, size + len(ids))]:
    raise ConfigError(
      f"tokenizer {path!r}: its ids have gaps, so the library gives new tokens "
      f"the ids {ids}; expected ids from {size} on."
    )


def declared_special_tokens(folder: str) -> dict[str, str | None]:
  """Returns special tokens by name, such as {"bos_token": "<s>"}.

  They are in the files that transformers writes beside a tokenizer. None means
  that, according to the folder, there is no such token.
  """
  declared: dict[str, str | None] = {}
  for name in ("special_tokens_map.json", "tokenizer_config.json"):
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
      continue
    try:
      with open(path, encoding="utf-8") as f:
        content: Any = json.load(f)
    except (OSError, ValueError) as e:
      raise ConfigError(f"tokenizer: {path}: cannot be read: {e}.") from e
    for kind, token in content.items() if isinstance(content, dict) else ():
      # A token is a string, a dict with its "content", or null for none.
      text = token.get("content") if isinstance(token, dict) else token
      if kind.endswith("_token") and (text is None or isinstance(text, str)):
        declared[kind] = text
  return declared
