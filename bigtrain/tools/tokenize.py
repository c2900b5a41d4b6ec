"""Converts text to token files for the data source `tokens`.

  python -m bigtrain.tools.tokenize --tokenizer=tokenizer.json \\
      --output=corpus/tokens corpus/*.jsonl.zst

It reads .txt (one document per file), .jsonl, .json and .parquet (one field of
each row), also as .gz and .zst, in one process per core. It writes shards
and, at the end, manifest.json. After an interruption, the same command
continues, and the result has the same bytes.

Exit codes: 0; 2 for a wrong argument, or a wrong document, whose file and line
the message names; 1 otherwise.
"""

import argparse
import collections
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

from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data.formats import documents, files, token_files, token_writer
from bigtrain.files import paths
from bigtrain.text import tokenizers
from bigtrain.tools import arguments, exits

# File with what determines the output, until there is a manifest.
_PLAN = "plan.json"
# Number of bytes at each end of a source that its fingerprint covers.
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
  """Writes a folder of token files, or completes an interrupted one.

  Returns the manifest. A process makes one shard at a time, from `shard_bytes`
  bytes of input.
  """
  output = paths.absolute(output)
  plan, groups = _plan(inputs, tokenizer, key, format, eos, bos, shard_bytes)
  os.makedirs(output, exist_ok=True)
  with _locked(output):
    manifest = _start(output, plan)
    if manifest is not None:
      return manifest  # An earlier call has finished.
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
  """Returns (values that determine the output, parts of each shard)."""
  tokens = tokenizers.get(tokenizer)
  special = {"eos": (eos, tokens.eos_id), "bos": (bos, tokens.bos_id)}
  for name, (is_wanted, id) in special.items():
    if is_wanted and id is None:
      raise ConfigError(
        f"--{name}: the tokenizer {tokenizer!r} has no such token; give "
        f"--no-{name}."
      )
  sources = files.find(inputs, "inputs")
  for file, count in collections.Counter(sources).items():
    if count > 1:
      raise ConfigError(f"{file}: given twice.")
  parts: list[documents.Part] = []
  for file in sources:
    parts += documents.parts(file, format, shard_bytes)
  plan = dict(
    format=token_files.FORMAT,
    version=token_files.FORMAT_VERSION,
    tokenizer=dict(
      name=tokenizer,
      fingerprint=tokens.fingerprint(),
      vocab_size=tokens.vocab_size,
    ),
    eos_id=tokens.eos_id if eos else None,
    bos_id=tokens.bos_id if bos else None,
    dtype="uint16" if tokens.vocab_size <= 1 << 16 else "uint32",
    options=dict(key=key, format=format, shard_bytes=shard_bytes),
    sources=[_fingerprint(file) for file in sources],
  )
  return plan, documents.grouped(parts, shard_bytes)


def _fingerprint(path: str) -> dict[str, Any]:
  """Describes a file by its size and its ends, which is fast for any size."""
  size = os.path.getsize(path)
  digest = hashlib.sha256(str(size).encode())
  with open(path, "rb") as f:
    digest.update(f.read(_SAMPLE_BYTES))
    f.seek(max(0, size - _SAMPLE_BYTES))
    digest.update(f.read())
  return dict(path=path, size=size, sha256_of_ends=digest.hexdigest())


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
  """Locks the folder; the system unlocks it when this process ends."""
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


def _start(folder: str, plan: dict[str, Any]) -> dict[str, Any] | None:
  """Prepares the folder; returns the manifest if it is complete.

  A folder that was started with another plan is an error.
  """
  for path in glob.glob(os.path.join(glob.escape(folder), "*.tmp")):
    os.remove(path)  # From a killed process.
  names, _ = files.split_hidden(os.listdir(folder))
  for name in (token_files.MANIFEST, _PLAN):
    if name not in names:
      continue
    with open(os.path.join(folder, name), encoding="utf-8") as f:
      before = json.load(f)
    for field, value in plan.items():
      # As JSON, which has lists in place of tuples.
      if before.get(field) != json.loads(json.dumps(value)):
        raise ConfigError(
          f"--output={folder}: was started with another {field!r}: "
          f"{_short(before.get(field))}, now {_short(value)}. Give another "
          "folder, or remove this one."
        )
    if name == token_files.MANIFEST:
      _clean(folder)
      return before
    return None
  if names:
    raise ConfigError(
      f"--output={folder}: contains other files, such as {min(names)!r}; give "
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
  """Writes the shards that are missing; returns the description of each."""
  names = [f"{i:05}" for i in range(len(groups))]
  finished: dict[str, dict[str, Any]] = {}
  todo = []
  for name, group in zip(names, groups):
    if shard := token_writer.finished_shard(folder, name):
      finished[name] = shard
    else:
      todo.append((name, group))
  start_secs = time.monotonic()
  num_tokens = 0
  work = functools.partial(_shard, folder, recipe, key)
  for shard in _in_processes(work, todo, processes):
    finished[shard["name"]] = shard
    num_tokens += shard["num_tokens"]
    for message in shard["skipped"]:
      print(f"Skipped: {message}", file=sys.stderr)
    _check_skipped(finished.values(), recipe.skip_errors)
    rate = num_tokens / (time.monotonic() - start_secs)
    print(
      f"[{len(finished)}/{len(names)}] {shard['name']}: "
      f"{shard['num_documents']:,} documents, {shard['num_tokens']:,} tokens "
      f"({rate:,.0f} tokens/s)",
      file=sys.stderr,
      flush=True,
    )
  # Again, for the shards of an earlier call.
  _check_skipped(finished.values(), recipe.skip_errors)
  return [finished[name] for name in names]


def _check_skipped(shards: Iterable[dict[str, Any]], limit: int) -> None:
  incomplete = [shard for shard in shards if shard["num_skipped"]]
  count = sum(shard["num_skipped"] for shard in incomplete)
  if count > limit:
    raise DataError(
      f"{count} documents cannot be used, more than --skip_errors={limit}, "
      f"such as: {incomplete[-1]['skipped'][-1]}"
    )


def _shard(
  folder: str,
  recipe: token_writer.Recipe,
  key: str,
  item: tuple[str, Sequence[documents.Part]],
) -> dict[str, Any]:
  name, parts = item
  texts = (text for part in parts for text in documents.read(part, key))
  return token_writer.write_shard(folder, name, texts, recipe)


def _in_processes(work: Any, items: Sequence[Any], count: int) -> Iterator[Any]:
  """Yields `work(item)` of each, in the order in which they finish."""
  if count == 1 or len(items) < 2:
    yield from map(work, items)
    return
  pool = concurrent.futures.ProcessPoolExecutor(
    min(count, len(items)),
    # A fork could copy locks that other threads hold.
    mp_context=multiprocessing.get_context("spawn"),
    initializer=_follow_parent,
  )
  try:
    futures = [pool.submit(work, item) for item in items]
    for future in concurrent.futures.as_completed(futures):
      yield future.result()
  except concurrent.futures.process.BrokenProcessPool as e:
    raise RuntimeError(
      "a process was killed, or ran out of memory (then give fewer "
      "--processes or a smaller --shard_mb); the same command continues."
    ) from e
  finally:
    pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
  """Ends this process when its parent ends for any reason."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it.
  parent = multiprocessing.parent_process()
  assert parent is not None

  def wait(sentinel: int = parent.sentinel) -> None:
    connection.wait([sentinel])
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def _finish(
  folder: str, plan: dict[str, Any], shards: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Writes the manifest, which makes the folder a complete one."""
  manifest: dict[str, Any] = dict(plan)
  for what in ("documents", "tokens", "bytes", "empty", "skipped"):
    manifest[f"num_{what}"] = sum(shard[f"num_{what}"] for shard in shards)
  if not manifest["num_tokens"]:
    raise DataError("the inputs contain no text.")
  # An empty file cannot be memory-mapped.
  manifest["shards"] = [shard for shard in shards if shard["num_tokens"]]
  path = os.path.join(folder, token_files.MANIFEST)
  token_writer.write_json(path, manifest)
  _clean(folder)
  return manifest


def _clean(folder: str) -> None:
  """Removes the files that only an unfinished folder needs."""
  manifest = token_files.read_manifest(folder)
  keep = {token_files.MANIFEST}
  for shard in manifest["shards"]:
    keep |= {f"{shard['name']}.bin", f"{shard['name']}.ends.npy"}
  for name in os.listdir(folder):
    stem = name.split(".")[0]
    if name not in keep and (stem.isdigit() or name.startswith(_PLAN)):
      os.remove(os.path.join(folder, name))


def _parser() -> arguments.Parser:
  parser = arguments.Parser("tokenize", __doc__)
  parser.add_argument(
    "inputs",
    nargs="+",
    help="files and glob patterns: .txt, .jsonl, .parquet, also .gz and .zst",
  )
  parser.add_argument(
    "--tokenizer",
    required=True,
    help="'bytes', or the path of a tokenizer's file or folder",
  )
  parser.add_argument(
    "--output",
    required=True,
    help="folder for the token files: a new one, or one to continue",
  )
  parser.add_argument(
    "--key",
    default="text",
    help="field with the text in .jsonl and .parquet (default: %(default)s)",
  )
  parser.add_argument(
    "--format",
    default="auto",
    choices=("auto", *documents.FORMATS),
    help="format of the inputs; auto goes by the name (default: %(default)s)",
  )
  parser.add_argument(
    "--eos",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="end each document with the end token (default: --eos)",
  )
  parser.add_argument(
    "--bos",
    action=argparse.BooleanOptionalAction,
    default=False,
    help="start each document with the begin token (default: --no-bos)",
  )
  parser.add_argument(
    "--skip_errors",
    type=int,
    default=0,
    help="largest number of unusable documents to skip (default: %(default)s)",
  )
  parser.add_argument(
    "--shard_mb",
    type=int,
    default=256,
    help="MiB of input per shard (default: %(default)s)",
  )
  parser.add_argument(
    "--processes",
    type=int,
    default=process.num_cores(),
    help="number of processes (default: one per core, %(default)s)",
  )
  return parser


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  parser = _parser()
  args = vars(parser.parse_args(argv))
  args["shard_bytes"] = args.pop("shard_mb") << 20
  for name in ("shard_bytes", "processes"):
    if args[name] < 1:
      option = name.replace("bytes", "mb")
      parser.error(f"--{option}: expected a whole number of at least 1")
  manifest = tokenize(**args)
  print(
    f"{args['output']}: {manifest['num_documents']:,} documents, "
    f"{manifest['num_tokens']:,} tokens of {manifest['num_bytes']:,} bytes, "
    f"{manifest['num_skipped']:,} skipped."
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
