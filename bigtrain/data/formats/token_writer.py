"""Writes the folders of token files that `token_files` reads.

A shard is three files: ids (.bin), document ends (.ends.npy) and counts
(.json). The counts are written last, so a shard with counts is complete.
"""

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from bigtrain.config.errors import DataError
from bigtrain.files import paths
from bigtrain.text import tokenizers

# Messages about skipped documents that a shard's counts keep.
_MAX_MESSAGES = 10


class Recipe(NamedTuple):
  """Options for turning documents into tokens."""

  tokenizer: str  # Argument of tokenizers.get.
  dtype: str
  eos_id: int | None  # Appended to each document.
  bos_id: int | None  # Prepended to each document.
  skip_errors: int  # Maximum number of invalid documents in a shard.


def write_shard(
  folder: str, name: str, documents: Iterable[str | DataError], recipe: Recipe
) -> dict[str, Any]:
  """Tokenizes documents into a shard; returns the contents of its .json file.

  Invalid documents are errors. Empty ones are skipped.
  """
  tokenizer = tokenizers.get(recipe.tokenizer)
  counts: dict[str, Any] = {
    "name": name,
    "num_tokens": 0,
    "num_documents": 0,
    "num_bytes": 0,  # Of the texts.
    "num_empty": 0,
    "num_skipped": 0,
    "skipped": [],
  }

  def ids_of_documents() -> Iterator[np.ndarray]:
    for text in documents:
      if isinstance(text, DataError):
        counts["num_skipped"] += 1
        if counts["num_skipped"] > recipe.skip_errors:
          raise text
        if len(counts["skipped"]) < _MAX_MESSAGES:
          counts["skipped"].append(str(text))
        continue
      ids = tokenizer.encode(text)
      if not len(ids):
        counts["num_empty"] += 1
        continue
      begin = [] if recipe.bos_id is None else [recipe.bos_id]
      end = [] if recipe.eos_id is None else [recipe.eos_id]
      counts["num_documents"] += 1
      counts["num_bytes"] += len(text.encode())
      yield np.concatenate([begin, ids, end]).astype(recipe.dtype)

  return write_documents(folder, name, ids_of_documents(), counts)


def write_documents(
  folder: str,
  name: str,
  documents: Iterable[np.ndarray],
  counts: dict[str, Any],
) -> dict[str, Any]:
  """Writes documents' ids as a shard; returns the content of the .json file."""
  ends: list[int] = []
  checksum = google_crc32c.Checksum()

  def raw_documents() -> Iterator[bytes]:
    for ids in documents:
      ends.append((ends[-1] if ends else 0) + len(ids))
      raw = ids.tobytes()
      checksum.update(raw)
      yield raw

  path = os.path.join(folder, name)
  with paths.replacing(f"{path}.bin", "wb") as f:
    f.writelines(raw_documents())
  with paths.replacing(f"{path}.ends.npy", "wb") as f:
    np.save(f, np.asarray(ends, np.int64), allow_pickle=False)
  counts |= {"name": name, "num_tokens": ends[-1] if ends else 0}
  counts["crc32c"] = checksum.hexdigest().decode()
  write_json(f"{path}.json", counts)
  return counts


def finished_shard(folder: str, name: str) -> dict[str, Any] | None:
  """Returns the counts of a shard if it is complete and intact."""
  path = os.path.join(folder, name)
  checksum = google_crc32c.Checksum()
  try:
    with open(f"{path}.json", encoding="utf-8") as f:
      counts = json.load(f)
    with open(f"{path}.bin", "rb") as f:
      while chunk := f.read(1 << 20):
        checksum.update(chunk)
  except FileNotFoundError:
    return None
  intact = checksum.hexdigest().decode() == counts["crc32c"]
  return counts if intact and os.path.exists(f"{path}.ends.npy") else None


def write_json(path: str, content: Any) -> None:
  with paths.replacing(path) as f:
    f.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
