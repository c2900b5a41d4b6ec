"""Predicts files and folders with a trained model.

  python -m bigtrain.tools.predict runs/mine photos/ --output=labels.jsonl
  python -m bigtrain.tools.predict runs/mine a.jpg b.jpg

Pictures are classified, captioned or embedded, whatever the run was trained
for, and text files are continued or answered. A row has the file's path, the
step and the result, as JSON or CSV, or "error" for a file that cannot be read.
The same command, run again, skips files that the output has already.

Exit codes: 0; 1 if there are such files, or for a damaged checkpoint; 2 for a
wrong argument.
"""

import concurrent.futures
import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bigtrain.files import paths
from bigtrain.inference import load
from bigtrain.inference.predictor import Predictor
from bigtrain.runtime import jax_flags
from bigtrain.settings import ConfigError, DataError, check_choice
from bigtrain.tools import arguments, exits

_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_TEXTS = (".txt",)
_FORMATS = ("jsonl", "csv")
# Methods, and the columns of their results.
_CLASSES = ("label", "index", "score", "top")
_FIELDS = {
  "classify": _CLASSES,
  "caption": ("caption",),
  "embed_images": ("embedding",),
  "zero_shot": _CLASSES,
  "generate": ("text",),
}
# Batches that are preprocessed while the devices work on one.
_THREADS = 2


def find_files(names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
  files_seen: dict[str, None] = {}
  for name in names:
    path = os.path.expanduser(name)
    if os.path.isdir(path):
      for folder, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files):
          if file.lower().endswith(tuple(suffixes)):
            files_seen[os.path.join(folder, file)] = None
    elif os.path.exists(path):
      files_seen[path] = None
    else:
      raise ConfigError(f"{paths.absolute(name)}: no such file or folder.")
  if not files_seen:
    kinds = ", ".join(suffixes)
    raise ConfigError(f"{' '.join(names)}: contains no files of type {kinds}.")
  return list(files_seen)


class Rows:
  """The output: a file, or standard output for "jsonl" and "csv".

  `done` has the paths of its rows. An unfinished last line of an earlier call
  is removed.
  """

  def __init__(self, output: str, step: int, method: str):
    self.done: set[str] = set()
    self._csv = output.endswith("csv")
    self._fields = ["path", "step", *_FIELDS[method], "error"]
    self._file: Any = sys.stdout
    if output in _FORMATS:
      if self._csv:
        print(",".join(self._fields))
      return
    if not output.endswith(tuple(f".{name}" for name in _FORMATS)):
      raise ConfigError(
        f"--output={output}: expected jsonl, csv, or a file whose name ends in "
        ".jsonl or .csv."
      )
    output = paths.absolute(output)
    if not os.path.isdir(os.path.dirname(output)):
      raise ConfigError(f"--output={output}: no such folder.")
    self._file = open(output, "a+", encoding="utf-8", newline="")
    self._file.seek(0)
    text = self._file.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # The earlier call was killed while it wrote.
      self._file.truncate(len(whole.encode()))
    if self._csv and not whole:
      self._file.write(",".join(self._fields) + "\n")
    for row in self._parse(whole, output):
      self.done.add(row["path"])
      if int(row["step"]) != step:
        raise ConfigError(
          f"--output={output}: has rows of step {row['step']}, but the "
          f"checkpoint is of step {step}: give another file."
        )

  def _parse(self, text: str, output: str) -> Iterator[dict[str, Any]]:
    try:
      if not self._csv:
        yield from map(json.loads, text.splitlines())
        return
      reader = csv.DictReader(io.StringIO(text))
      if text and reader.fieldnames != self._fields:
        raise ValueError(f"expected the columns {', '.join(self._fields)}")
      yield from reader
    except (ValueError, KeyError, csv.Error) as e:
      raise ConfigError(
        f"--output={output}: not an output of this tool: {e}."
      ) from e

  def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
      plain = dict(row)
      if (vector := row.get("embedding")) is not None:
        plain["embedding"] = [float(f"{x:.7g}") for x in vector.tolist()]
      if self._csv:
        for name, value in plain.items():
          if isinstance(value, list | dict):
            plain[name] = json.dumps(value, ensure_ascii=False)
        writer = csv.DictWriter(self._file, self._fields, lineterminator="\n")
        writer.writerow(plain)
      else:
        self._file.write(json.dumps(plain, ensure_ascii=False) + "\n")
    self._file.flush()


def predict(
  predictor: Predictor,
  files: Sequence[str],
  rows: Rows,
  *,
  method: str = "",
  progress: Callable[[int, int], None] = lambda done, total: None,
  **options: Any,
) -> int:
  """Writes a row for each file without one; returns how many are unreadable.

  `progress` is called with the number of finished files and of all.
  """
  call = getattr(predictor, method or predictor.default_method)
  left = [file for file in files if file not in rows.done]
  size = predictor.batch_size
  batches = [left[i : i + size] for i in range(0, len(left), size)]
  texts = call.__name__ == "generate"

  def results(names: Sequence[str]) -> list[dict[str, Any]]:
    try:
      items = [_read_text(name) for name in names] if texts else list(names)
      return call(items, **options)
    except DataError as e:
      if len(names) == 1:
        return [{"error": str(e).removeprefix(f"{names[0]}: ")}]
      return [result for name in names for result in results([name])]

  done, failed = len(files) - len(left), 0
  progress(done, len(files))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    # A few batches ahead; all of them could fill the memory.
    waiting = [pool.submit(results, names) for names in batches[:_THREADS]]
    for i, names in enumerate(batches):
      batch_results = waiting.pop(0).result()
      waiting += [
        pool.submit(results, more)
        for more in batches[i + _THREADS : i + _THREADS + 1]
      ]
      rows.write(
        [
          {"path": name, "step": predictor.step, **result}
          for name, result in zip(names, batch_results)
        ]
      )
      failed += sum("error" in result for result in batch_results)
      done += len(names)
      progress(done, len(files))
  return failed


def _read_text(path: str) -> str:
  try:
    with open(path, encoding="utf-8") as file:
      return file.read()
  except (OSError, UnicodeDecodeError) as e:
    raise DataError(f"{path}: {e}.") from e


def _parser() -> arguments.Parser:
  parser = arguments.Parser("predict", __doc__, changes_config=False)
  add = parser.add
  add("run", "a workdir, or one of its checkpoints")
  add("paths", "pictures (or texts), and folders of them", nargs="+")
  output = "file ending in .jsonl or .csv; jsonl or csv: the standard output"
  add("--output", output, "jsonl")
  methods = ", ".join(_FIELDS)
  add("--method", f"{methods} (default: what the run was trained for)", "")
  add("--top_k", "number of classes in `top` (default: 5)", type=int)
  names = "file with a name of a class on each line (default: the run's)"
  add("--class_names", names)
  add("--pp", "ops for the pictures (default: the ops of an evaluation)")
  add("--evaluation", "evaluation of the run whose ops to use")
  add("--tokenizer", "path of the run's tokenizer, if it has moved")
  add("--step", "step of the checkpoint (default: the newest)", type=int)
  add("--weights", "params or ema", "params")
  add("--batch_size", "files at a time, over all devices", 32)
  return parser


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args, _ = _parser().parse(argv)
  jax_flags.use_compile_cache(True)
  predictor = load.load(
    args.run,
    args.step,
    args.weights,
    pp=args.pp,
    evaluation=args.evaluation,
    class_names=None if args.method == "zero_shot" else args.class_names,
    tokenizer=args.tokenizer,
    batch_size=args.batch_size,
  )
  method = args.method or predictor.default_method
  check_choice("--method", method, _FIELDS)
  options: dict[str, Any] = {}
  if args.top_k is not None:
    options["top_k"] = args.top_k
    if method not in ("classify", "zero_shot"):
      raise ConfigError(f"--top_k: {method} has no classes.")
  if method == "zero_shot" and args.class_names is not None:
    options["class_names"] = args.class_names
  suffixes = _TEXTS if method == "generate" else _PICTURES
  files = find_files(args.paths, suffixes)
  rows = Rows(args.output, predictor.step, method)
  with _bar() as progress:
    failed = predict(
      predictor, files, rows, method=method, progress=progress, **options
    )
  if failed:
    print(f"error: {failed} file(s) cannot be read.", file=sys.stderr)
  return 1 if failed else 0


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
  import rich.console
  import rich.progress

  console = rich.console.Console(stderr=True)
  columns = rich.progress.Progress.get_default_columns()
  count, silent = rich.progress.MofNCompleteColumn(), not console.is_terminal
  with rich.progress.Progress(
    *columns, count, console=console, disable=silent
  ) as bar:
    task = bar.add_task("files", total=None)
    yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
  sys.exit(main())
