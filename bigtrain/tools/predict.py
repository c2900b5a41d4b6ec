"""Predicts files and folders with a trained model.

  python -m bigtrain.tools.predict runs/mine photos/ --output=labels.jsonl
  python -m bigtrain.tools.predict runs/mine a.jpg b.jpg
  python -m bigtrain.tools.predict runs/lm questions.jsonl --scores \\
      --prompt_key=question --output=answers.jsonl --shard=0/4

Pictures are classified, captioned or embedded, whatever the run was trained
for, and text files are continued or answered. A row has the file's path, the
step and the result, as JSON or CSV, or "error" for a file that cannot be read.
Each line of a .jsonl file has a row of its own, with path:line as its path and
the line as "row". --method=score gives the log-likelihoods of given answers.
The same command, run again, skips what the output has already, and the whole
output is the same as without the interruption.

Exit codes: 0; 1 if there are such files, or for a damaged checkpoint; 2 for a
wrong argument.
"""

import concurrent.futures
import contextlib
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.files import paths
from bigtrain.inference import load
from bigtrain.inference.predictor import Predictor
from bigtrain.runtime import jax_flags
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
  "score": ("log_likelihood", "tokens", "greedy"),
  "embed_texts": ("embedding",),
}
_TEXT_METHODS = ("generate", "score", "embed_texts")
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


def read_lines(files: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
  """{path:line: object} of .jsonl files, with texts as values of the keys."""
  found: dict[str, Any] = {}
  for path in files:
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        name = f"{path}:{number}"
        try:
          found[name] = row = json.loads(line)
          texts = [row[key] for key in keys]
        except (ValueError, TypeError, KeyError) as e:
          raise ConfigError(
            f"{name}: expected a JSON object with {', '.join(keys)}: {e!r}."
          ) from e
        if not all(isinstance(text, str) for text in texts):
          raise ConfigError(f"{name}: {', '.join(keys)}: expected texts.")
  return found


def shard_of(spec: str, output: str) -> tuple[slice, str]:
  """The items of --shard=i/n, and the name of their output."""
  match = re.fullmatch(r"(\d+)/(\d+)", spec)
  if not match or int(match[1]) >= int(match[2]):
    raise ConfigError(f"--shard={spec}: expected i/n with i from 0 to n - 1.")
  stem, suffix = os.path.splitext(output)
  name = f"{stem}-{match[1]}-of-{match[2]}{suffix}" if suffix else output
  return slice(int(match[1]), None, int(match[2])), name


class Rows:
  """The output: a file, or standard output for "jsonl" and "csv".

  `done` has the paths of its rows. An unfinished last line of an earlier call
  is removed.
  """

  def __init__(self, output: str, step: int, fields: Sequence[str]):
    self.done: set[str] = set()
    self._csv = output.endswith("csv")
    self._fields = ["path", "step", *fields, "error"]
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
    # The last row may end within a character.
    self._file = open(
      output, "a+", encoding="utf-8", errors="surrogateescape", newline=""
    )
    self._file.seek(0)
    text = self._file.read()
    whole = text[: text.rfind("\n") + 1]
    while self._csv and whole.count('"') % 2:  # Cut in a text with quotes.
      whole = whole[: whole.rfind("\n", 0, -1) + 1]
    for path, of_step in self._parse(whole, text[len(whole) :], output):
      self.done.add(path)
      if of_step != step:
        raise ConfigError(
          f"--output={output}: has rows of step {of_step}, but the "
          f"checkpoint is of step {step}: give another file."
        )
    if whole != text:  # The earlier call was killed while it wrote.
      self._file.truncate(len(whole.encode(errors="surrogateescape")))
    if self._csv and not whole:
      self._file.write(",".join(self._fields) + "\n")

  def _parse(
    self, text: str, rest: str, output: str
  ) -> Iterator[tuple[str, int]]:
    """Yields path and step of each row; `rest` is an unfinished row."""
    begin = ",".join(self._fields) if self._csv else '{"path": "'
    try:
      if not text and rest[: len(begin)] != begin[: len(rest)]:
        raise ValueError(f"expected it to begin with {begin}")
      if not self._csv:
        for line in filter(None, text.split("\n")):
          row = json.loads(line)
          yield row["path"], int(row["step"])
        return
      reader = csv.DictReader(io.StringIO(text))
      if text and reader.fieldnames != self._fields:
        raise ValueError(f"expected the columns {', '.join(self._fields)}")
      for row in reader:
        yield row["path"], int(row["step"])
    except (ValueError, KeyError, TypeError, csv.Error) as e:
      raise ConfigError(
        f"--output={output}: not an output of this tool: {e}."
      ) from e

  def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
      plain = dict(row)
      if (vector := row.get("embedding")) is not None:
        plain["embedding"] = [float(f"{x:.7g}") for x in vector.tolist()]
      if self._csv:
        plain.pop("row", None)
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
  lines: Mapping[str, Any] | None = None,
  keys: Sequence[str] = (),
  progress: Callable[[int, int], None] = lambda done, total: None,
  **options: Any,
) -> int:
  """Writes a row for each file without one; returns how many are unreadable.

  `lines` has the content of files by name, from whose `keys` the method takes
  its arguments; `progress` is called with the number of finished files and of
  all.
  """
  call = getattr(predictor, method or predictor.default_method)
  size = predictor.batch_size
  # The batches of an interrupted call, so that each result has its rounding.
  batches = [files[i : i + size] for i in range(0, len(files), size)]
  batches = [batch for batch in batches if not rows.done.issuperset(batch)]
  texts = call.__name__ in _TEXT_METHODS

  def results(names: Sequence[str]) -> list[dict[str, Any]]:
    try:
      if lines is not None:
        columns = [[lines[name][key] for name in names] for key in keys]
        return call(*columns, **options)
      items = [_read_text(name) for name in names] if texts else list(names)
      return call(items, **options)
    except DataError as e:
      if len(names) == 1:
        return [{"error": str(e).removeprefix(f"{names[0]}: ")}]
      return [result for name in names for result in results([name])]

  failed = 0
  done = len(files) - sum(map(len, batches))
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
          {"path": name, "step": predictor.step}
          | ({} if lines is None else {"row": lines[name]})
          | result
          for name, result in zip(names, batch_results)
          if name not in rows.done
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


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("predict", __doc__, changes_config=False)
  parser.add_argument("run", help="a workdir, or one of its checkpoints")
  parser.add_argument(
    "paths",
    nargs="+",
    help="pictures, texts or .jsonl files, and folders of them",
  )
  parser.add_argument(
    "--output",
    default="jsonl",
    help="file ending in .jsonl or .csv; 'jsonl' or 'csv' writes to standard "
    "output (default: %(default)s)",
  )
  parser.add_argument(
    "--method",
    default="",
    help=f"{', '.join(_FIELDS)} (default: what the run was trained for)",
  )
  parser.add_argument(
    "--top_k", type=int, help="number of classes in `top` (default: 5)"
  )
  parser.add_argument(
    "--class_names",
    help="file with the name of a class on each line (default: the run's)",
  )
  parser.add_argument(
    "--pp", help="ops for the pictures (default: the ops of an evaluation)"
  )
  parser.add_argument(
    "--evaluation", help="evaluation of the run whose ops to use"
  )
  parser.add_argument(
    "--tokenizer", help="path of the run's tokenizer, if it has moved"
  )
  parser.add_argument(
    "--step", type=int, help="step of the checkpoint (default: the newest)"
  )
  parser.add_argument(
    "--weights",
    default="params",
    help="parameters to use: params or ema (default: %(default)s)",
  )
  parser.add_argument(
    "--batch_size",
    type=int,
    default=32,
    help="number of files in a batch, over all devices (default: %(default)s)",
  )
  parser.add_argument(
    "--prompt_key",
    default="prompt",
    help="key of the texts in .jsonl files (default: %(default)s)",
  )
  parser.add_argument(
    "--answer_key",
    default="answer",
    help="key of the answers, for --method=score (default: %(default)s)",
  )
  parser.add_argument(
    "--scores",
    action="store_true",
    help="add the log-likelihoods of generated texts",
  )
  parser.add_argument(
    "--options",
    default="{}",
    help="options of the method as JSON, such as '{\"max_new\": 100}' "
    "(default: %(default)s)",
  )
  parser.add_argument(
    "--shard",
    default="0/1",
    help="i/n: predict every n-th item from the i-th one (from 0), into a file "
    'whose name has "-i-of-n" (default: %(default)s)',
  )
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
  try:
    options: dict[str, Any] = {**json.loads(args.options)}
  except (ValueError, TypeError) as e:
    raise ConfigError(f"--options: expected a JSON object: {e}.") from e
  fields = _FIELDS[method]
  if args.scores:
    options["scores"], fields = True, fields + _FIELDS["score"]
    if method != "generate":
      raise ConfigError(f"--scores: {method} writes no text.")
  if args.top_k is not None:
    options["top_k"] = args.top_k
    if method not in ("classify", "zero_shot"):
      raise ConfigError(f"--top_k: {method} has no classes.")
  if method == "zero_shot" and args.class_names is not None:
    options["class_names"] = args.class_names
  lines, keys = None, [args.prompt_key]
  if method == "score":
    keys.append(args.answer_key)
  if method == "score" or any(name.endswith(".jsonl") for name in args.paths):
    if method not in _TEXT_METHODS:
      raise ConfigError(f"{args.paths[0]}: {method} reads pictures.")
    lines = read_lines(find_files(args.paths, (".jsonl",)), keys)
    files = list(lines)
  else:
    suffixes = _TEXTS if method in _TEXT_METHODS else _PICTURES
    files = find_files(args.paths, suffixes)
  shard, output = slice(None), args.output
  if args.shard != "0/1":
    shard, output = shard_of(args.shard, output)
  rows = Rows(output, predictor.step, fields)
  given = dict(method=method, lines=lines, keys=keys, **options)
  with _bar() as progress:
    failed = predict(predictor, files[shard], rows, progress=progress, **given)
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
