"""Merges, filters and shuffles folders of token files.

  python -m bigtrain.tools.merge_tokens news/tokens books/tokens \\
      --output=corpus/tokens --min_tokens=64 --unique --shuffle=0

Training does not need this: a config can mix folders, and each epoch has a
different order. Use it to leave out documents that should not be trained on, or
for other programs, which read in sequence. All folders must have the same
tokenizer. The tool needs 24 bytes of memory for each document, and about 100
with --unique.

Exit codes: 0; 2 for wrong arguments or folders; 1 otherwise.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.config.modules import find_attribute
from bigtrain.data.formats import token_files, token_writer
from bigtrain.files import paths
from bigtrain.text import tokenizers
from bigtrain.tools import arguments, exits

# Fields of a manifest that all folders must share.
_SHARED_FIELDS = ("tokenizer", "eos_id", "bos_id", "dtype")


def merge(
  inputs: Sequence[str],
  output: str,
  *,
  min_tokens: int = 1,
  max_tokens: int | None = None,
  unique: bool = False,
  keep: str = "",
  shuffle: int | None = None,
  shard_tokens: int = 1 << 27,
) -> dict[str, Any]:
  """Writes a folder of token files; returns its manifest.

  Legend: N documents; a row of spans_N3 is (shard, start, end).

  Args:
    min_tokens, max_tokens: limits for the length of a document, with its begin
      and end tokens.
    unique: whether to keep only the first of equal documents.
    keep: dotted path of a function that gets a document's ids and returns
      whether to keep it, such as "my_project.filters.is_english".
    shuffle: seed for the order of documents; None keeps the order.
    shard_tokens: a shard ends with the document that reaches this number.
  """
  options = dict(
    min_tokens=min_tokens,
    max_tokens=max_tokens,
    unique=unique,
    keep=keep,
    shuffle=shuffle,
    shard_tokens=shard_tokens,
  )
  folders = [paths.absolute(folder) for folder in inputs]
  manifests = [token_files.read_manifest(folder) for folder in folders]
  common = _common(folders, manifests)
  output = paths.absolute(output)
  if os.path.isdir(output) and os.listdir(output):
    raise ConfigError(f"--output={output}: expected a new or empty folder.")
  shards: list[token_files.Shard] = []
  for folder in folders:
    shards += token_files.open_shards(folder, None)[0]
  spans_N3 = _spans(shards)
  wanted = _filter(shards, spans_N3, min_tokens, max_tokens, keep, unique)
  if not len(wanted):
    raise DataError("no document is left.")
  num_bytes = sum(manifest["num_bytes"] for manifest in manifests)
  if len(wanted) < len(spans_N3):  # Manifests have the sum over all documents.
    decode = tokenizers.get(common["tokenizer"]["name"]).decode
    num_bytes = sum(
      len(decode(ids).encode()) for ids in _documents(shards, spans_N3[wanted])
    )
  if shuffle is not None:
    wanted = np.random.default_rng(shuffle).permutation(wanted)
  os.makedirs(output, exist_ok=True)
  written = _write_shards(output, shards, spans_N3[wanted], shard_tokens)
  manifest = dict(
    format=token_files.FORMAT,
    version=token_files.FORMAT_VERSION,
    **common,
    options=options,
    sources=[dict(path=folder) for folder in folders],
    num_documents=len(wanted),
    num_tokens=sum(shard["num_tokens"] for shard in written),
    num_bytes=num_bytes,
    num_empty=0,
    num_skipped=0,
    shards=written,
  )
  path = os.path.join(output, token_files.MANIFEST)
  token_writer.write_json(path, manifest)
  return manifest


def _write_shards(
  output: str,
  shards: Sequence[token_files.Shard],
  spans_N3: np.ndarray,
  shard_tokens: int,
) -> list[dict[str, Any]]:
  """Writes the documents in this order; returns a description of each shard."""
  # A shard ends with the document that reaches a multiple of shard_tokens.
  ends = np.cumsum(spans_N3[:, 2] - spans_N3[:, 1])
  cuts = np.searchsorted(ends, np.arange(shard_tokens, ends[-1], shard_tokens))
  written: list[dict[str, Any]] = []
  for group_N3 in np.split(spans_N3, np.unique(cuts + 1)):
    if len(group_N3):
      counts = {"num_documents": len(group_N3)}
      name = f"{len(written):05}"
      ids = _documents(shards, group_N3)
      written.append(token_writer.write_documents(output, name, ids, counts))
  return written


def _common(
  folders: Sequence[str], manifests: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """The fields that all folders share; an error if they do not.

  The name of the tokenizer may differ, because it can be a path.
  """
  first = manifests[0]
  for folder, manifest in zip(folders, manifests):
    for name in _SHARED_FIELDS:
      ours, theirs = first[name], manifest[name]
      if name == "tokenizer":
        ours, theirs = ours["fingerprint"], theirs["fingerprint"]
      if ours != theirs:
        raise ConfigError(
          f"{folder}: has {name} {theirs!r}, and {folders[0]} has {ours!r}."
        )
  return {name: first[name] for name in _SHARED_FIELDS}


def _spans(shards: Sequence[token_files.Shard]) -> np.ndarray:
  """Returns (shard, start, end) of every document, int64 [N, 3]."""
  result = []
  for i, shard in enumerate(shards):
    assert shard.ends is not None  # Folders of ours have them.
    ends = shard.ends()
    starts = np.append(0, ends[:-1])
    result.append(np.stack([np.full(len(ends), i), starts, ends], axis=1))
  return np.concatenate(result)


def _filter(
  shards: Sequence[token_files.Shard],
  spans_N3: np.ndarray,
  min_tokens: int,
  max_tokens: int | None,
  keep: str,
  unique: bool,
) -> np.ndarray:
  """Numbers of the documents to keep, ascending."""
  sizes_N = spans_N3[:, 2] - spans_N3[:, 1]
  is_kept_N = sizes_N >= min_tokens
  if max_tokens is not None:
    is_kept_N &= sizes_N <= max_tokens
  if keep:
    function = find_attribute(keep, "--keep")
    is_kept_N[is_kept_N] = [
      bool(function(ids)) for ids in _documents(shards, spans_N3[is_kept_N])
    ]
  kept = np.flatnonzero(is_kept_N)
  if unique:
    digests = [
      hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
      for ids in _documents(shards, spans_N3[kept])
    ]
    _, first = np.unique(np.asarray(digests, "V16"), return_index=True)
    kept = kept[np.sort(first)]
  return kept


def _documents(
  shards: Sequence[token_files.Shard], spans_N3: np.ndarray
) -> Iterator[np.ndarray]:
  """Yields the ids of each document."""
  ids = [shard.map() for shard in shards]
  return (ids[i][start:end] for i, start, end in spans_N3)


def _parser() -> arguments.Parser:
  parser = arguments.Parser("merge_tokens", __doc__)
  parser.add_argument(
    "inputs", nargs="+", help="folders of bigtrain.tools.tokenize"
  )
  parser.add_argument(
    "--output", required=True, help="new folder for the token files"
  )
  parser.add_argument(
    "--min_tokens",
    type=int,
    default=1,
    help="drop documents with fewer tokens, begin and end tokens included "
    "(default: %(default)s)",
  )
  parser.add_argument(
    "--max_tokens",
    type=int,
    help="drop documents with more tokens (default: keep all)",
  )
  parser.add_argument(
    "--unique",
    action="store_true",
    help="keep only the first of equal documents",
  )
  parser.add_argument(
    "--keep",
    default="",
    help="dotted path of a function that gets a document's ids and returns "
    "whether to keep the document",
  )
  parser.add_argument(
    "--shuffle",
    type=int,
    help="seed for the order of documents (default: the order of the inputs)",
  )
  parser.add_argument(
    "--shard_tokens",
    type=int,
    default=1 << 27,
    help="number of tokens after which a shard ends (default: %(default)s)",
  )
  return parser


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  parser = _parser()
  args = vars(parser.parse_args(argv))
  for name in ("min_tokens", "max_tokens", "shard_tokens"):
    if args[name] is not None and args[name] < 1:
      parser.error(f"--{name}: expected a whole number of at least 1")
  manifest = merge(**args)
  print(
    f"{args['output']}: {manifest['num_documents']:,} documents, "
    f"{manifest['num_tokens']:,} tokens of {manifest['num_bytes']:,} bytes."
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
