"""Turns text into token files for the source `tokens`.

  python -m bigtrain.tools.tokenize --tokenizer=tokenizer.json \\
      --output=corpus/tokens corpus/*.jsonl.zst

Reads .txt (a document each), .jsonl and .parquet (a field of each line or row),
also .gz and .zst, in as many processes as there are cores. The output folder
gets shards and, last, manifest.json: tokenizer, counts, and what was read.
Killed at any moment, the same command goes on, and ends with the same bytes.

The exit code is 0; 2 for a wrong argument or document, told with file and line;
1 for anything else.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

from bigtrain.data.formats import documents, token_files, token_writer
from bigtrain.files import paths as paths_lib
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError, DataError, did_you_mean

_PLAN = "plan.json"
# Of each end of a source, for its fingerprint.
_SAMPLE_BYTES = 1 << 20


def tokenize(
  inputs: Sequence[str],
  output: str,
  tokenizer: str,
  *,
  key: str = "text",
  format: str = "auto",
  eos: bool = True,
  bos: bool = False,
  skip_errors: int = 0,
  shard_bytes: int = 1 << 28,
  processes: int = 1,
) -> dict[str, Any]:
  """Makes a folder of token files, or goes on with one.

  Args:
    inputs: files and patterns.
    output: the folder.
    tokenizer: "bytes" or a path, see pp/tokenizers.py.
    key: the field with the text.
    format: of the inputs, see documents.parts.
    eos: end each document with the tokenizer's end token.
    bos: begin each with its begin token.
    skip_errors: documents that may be unusable; they are left out and counted.
    shard_bytes: of input, for a shard, which is what one process does at a
      time.
    processes: how many.

  Returns:
    The manifest.

  Raises:
    ConfigError: wrong arguments, or `output` was begun with others.
    DataError: a document that cannot be used, with file and line.
  """
  output = paths_lib.absolute(output)
  plan, groups = _plan(inputs, tokenizer, key, format, eos, bos, shard_bytes)
  os.makedirs(output, exist_ok=True)
  with _locked(output):
    done = _begin(output, plan)
    if done is not None:
      return done
    recipe = token_writer.Recipe(
      tokenizer, plan["dtype"], plan["eos_id"], plan["bos_id"], skip_errors
    )
    shards = _write(output, groups, recipe, key, processes)
    return _finish(output, plan, shards)


def _plan(
  inputs: Sequence[str],
  tokenizer: str,
  key: str,
  format: str,
  eos: bool,
  bos: bool,
  shard_bytes: int,
) -> tuple[dict[str, Any], list[list[documents.Part]]]:
  """What the output depends on, and the parts of each shard."""
  found = tokenizers.get(tokenizer)
  for wanted, name, id in (
    (eos, "eos", found.eos_id),
    (bos, "bos", found.bos_id),
  ):
    if wanted and id is None:
      raise ConfigError(
        f"--{name}: the tokenizer {tokenizer!r} has no such token; give "
        f"--no-{name}."
      )
  paths = [path for one in inputs for path in _find(one)]
  if len(set(paths)) < len(paths):
    twice = next(path for path in paths if paths.count(path) > 1)
    raise ConfigError(f"{twice}: given twice.")
  parts = [
    part
    for path in paths
    for part in documents.parts(path, format, shard_bytes)
  ]
  groups = documents.grouped(parts, shard_bytes)
  plan = dict(
    format=token_files.FORMAT,
    version=token_files.FORMAT_VERSION,
    tokenizer=dict(
      name=tokenizer,
      fingerprint=found.fingerprint(),
      vocab_size=found.vocab_size,
    ),
    eos_id=found.eos_id if eos else None,
    bos_id=found.bos_id if bos else None,
    dtype="uint16" if found.vocab_size <= 1 << 16 else "uint32",
    options=dict(key=key, format=format, shard_bytes=shard_bytes),
    sources=[_fingerprint(path) for path in paths],
  )
  return plan, groups


def _find(pattern: str) -> list[str]:
  path = os.path.expanduser(pattern)
  if os.path.isfile(path):
    return [path]
  found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
  if not found:
    folder, name = os.path.split(path)
    there = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise ConfigError(f"{pattern}: no such file.{did_you_mean(name, there)}")
  return found


def _fingerprint(path: str) -> dict[str, Any]:
  """Name, size, and a digest of both ends: cheap for files of any size."""
  size = os.path.getsize(path)
  digest = hashlib.sha256(str(size).encode())
  with open(path, "rb") as f:
    digest.update(f.read(_SAMPLE_BYTES))
    f.seek(max(0, size - _SAMPLE_BYTES))
    digest.update(f.read())
  return dict(path=path, size=size, sha256_of_ends=digest.hexdigest())


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
  """Holds the folder; the system lets go of it when this process ends."""
  fd = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise ConfigError(
        f"--output={folder}: another process is writing to it."
      ) from e
    yield
  finally:
    os.close(fd)


def _begin(folder: str, plan: dict[str, Any]) -> dict[str, Any] | None:
  """Claims the folder for a plan; the manifest if that has been finished."""
  names = set(os.listdir(folder))
  for name in names:
    if name.endswith(".tmp"):  # Of a process that was killed.
      os.remove(os.path.join(folder, name))
  names = {name for name in names if not name.endswith(".tmp")}
  for name in (token_files.MANIFEST, _PLAN):
    if name not in names:
      continue
    with open(os.path.join(folder, name), encoding="utf-8") as f:
      before = json.load(f)
    for field, value in plan.items():
      # A tuple is a list after a while in JSON.
      if before.get(field) != json.loads(json.dumps(value)):
        raise ConfigError(
          f"--output={folder}: was begun with another {field!r}: "
          f"{_short(before.get(field))}, now {_short(value)}. Give another "
          "folder, or remove that one."
        )
    if name == token_files.MANIFEST:
      _clean(folder)
      return before
    return None
  if names:
    raise ConfigError(
      f"--output={folder}: has other files in it, such as {min(names)!r}; give "
      "a new folder."
    )
  token_writer.write_json(os.path.join(folder, _PLAN), plan)
  return None


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) < 80 else text[:77] + "..."


def _write(
  folder: str,
  groups: Sequence[Sequence[documents.Part]],
  recipe: token_writer.Recipe,
  key: str,
  processes: int,
) -> list[dict[str, Any]]:
  """The counts of all shards, in order; makes those that are not there."""
  names = [f"{i:05}" for i in range(len(groups))]
  counts = {name: token_writer.finished_shard(folder, name) for name in names}
  todo = [(n, g) for n, g in zip(names, groups) if counts[n] is None]
  begun, num_tokens = time.monotonic(), 0
  work = functools.partial(_shard, folder, recipe, key)
  for made in _in_processes(work, todo, processes):
    counts[made["name"]] = made
    num_tokens += made["num_tokens"]
    for message in made["skipped"]:
      print(f"Skipped: {message}", file=sys.stderr)
    _check_skipped(counts.values(), recipe.skip_errors)
    rate = num_tokens / (time.monotonic() - begun)
    finished = sum(c is not None for c in counts.values())
    print(
      f"[{finished}/{len(names)}] {made['name']}: {made['num_documents']:,} "
      f"documents, {made['num_tokens']:,} tokens ({rate:,.0f} tokens/s)",
      file=sys.stderr,
      flush=True,
    )
  _check_skipped(counts.values(), recipe.skip_errors)
  return [counts[name] for name in names]


def _check_skipped(shards: Iterable[dict[str, Any] | None], most: int) -> None:
  """The cap is on all shards together, whoever made them."""
  made = [shard for shard in shards if shard and shard["num_skipped"]]
  count = sum(shard["num_skipped"] for shard in made)
  if count > most:
    raise DataError(
      f"{count} documents cannot be used, more than --skip_errors={most}, "
      f"such as: {made[-1]['skipped'][-1]}"
    )


def _shard(
  folder: str,
  recipe: token_writer.Recipe,
  key: str,
  item: tuple[str, Sequence[documents.Part]],
) -> dict[str, Any]:
  name, parts = item
  found = (text for part in parts for text in documents.read(part, key))
  return token_writer.write_shard(folder, name, found, recipe)


def _in_processes(work: Any, items: Sequence[Any], count: int) -> Iterator[Any]:
  """`work(item)` for each, as they are done."""
  if count == 1 or len(items) < 2:
    yield from map(work, items)
    return
  pool = concurrent.futures.ProcessPoolExecutor(
    min(count, len(items)),
    # A fork copies locks that threads of this process may hold.
    mp_context=multiprocessing.get_context("spawn"),
    initializer=_follow_parent,
  )
  try:
    waiting = [pool.submit(work, item) for item in items]
    for future in concurrent.futures.as_completed(waiting):
      yield future.result()
  except concurrent.futures.process.BrokenProcessPool as e:
    raise RuntimeError(
      "a process died: killed from outside, or out of memory (fewer "
      "--processes, smaller --shard_mb); the same command goes on."
    ) from e
  finally:
    pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
  """Ends this process when its parent is gone, however that came."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent tells.
  parent = multiprocessing.parent_process()

  def wait() -> None:
    connection.wait([parent.sentinel])
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def _finish(
  folder: str, plan: dict[str, Any], shards: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Writes the manifest, and removes what it has taken in."""
  manifest: dict[str, Any] = dict(plan)
  for name in (
    "num_documents",
    "num_tokens",
    "num_bytes",
    "num_empty",
    "num_skipped",
  ):
    manifest[name] = sum(shard[name] for shard in shards)
  if not manifest["num_tokens"]:
    raise DataError("there is no text in the inputs.")
  # Nothing reads empty shards, and a file of no bytes cannot be mapped.
  manifest["shards"] = [shard for shard in shards if shard["num_tokens"]]
  path = os.path.join(folder, token_files.MANIFEST)
  token_writer.write_json(path, manifest)
  _clean(folder)
  return manifest


def _clean(folder: str) -> None:
  """Removes what is not part of a finished folder."""
  manifest = token_files.read_manifest(folder)
  keep = {token_files.MANIFEST}
  for shard in manifest["shards"]:
    keep |= {f"{shard['name']}.bin", f"{shard['name']}.ends.npy"}
  for name in os.listdir(folder):
    stem = name.split(".")[0]
    if name not in keep and (stem.isdigit() or name.startswith(_PLAN)):
      os.remove(os.path.join(folder, name))


def _num_cores() -> int:
  """The cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
  """The command; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m bigtrain.tools.tokenize",
    description="Turns text into token files.",
  )
  add = parser.add_argument
  add("inputs", nargs="+", help="files and patterns")
  add("--tokenizer", required=True, help="'bytes', or a file or folder")
  add("--output", required=True, help="a folder, new or to go on with")
  add("--key", default="text", help="field with the text")
  formats = ("auto", *documents.FORMATS)
  add("--format", default="auto", choices=formats, help="of the inputs")
  boolean = argparse.BooleanOptionalAction
  add("--eos", default=True, action=boolean, help="end each document")
  add("--bos", default=False, action=boolean, help="begin each document")
  add("--skip_errors", type=int, default=0, help="documents that may be bad")
  add("--shard_mb", type=int, default=256, help="of input, for a shard")
  add("--processes", type=int, default=_num_cores(), help="at a time")
  args = vars(parser.parse_args(arguments))
  args["shard_bytes"] = args.pop("shard_mb") << 20
  for name in ("shard_bytes", "processes"):
    if args[name] < 1:
      parser.error(f"--{name.replace('bytes', 'mb')}: expected at least 1")
  try:
    manifest = tokenize(**args)
  except ConfigError as e:
    print(f"error: {e}", file=sys.stderr)
    return 2
  except (OSError, RuntimeError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 1
  print(
    f"{args['output']}: {manifest['num_documents']:,} documents, "
    f"{manifest['num_tokens']:,} tokens of {manifest['num_bytes']:,} bytes, "
    f"{manifest['num_skipped']:,} skipped."
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
