"""Predicts files and folders with a trained model.

  python -m bigtrain.tools.predict runs/mine photos/ --output=labels.jsonl
  python -m bigtrain.tools.predict runs/mine a.jpg b.jpg
  python -m bigtrain.tools.predict runs/lm questions.jsonl --scores \\
      --prompt_key=question --output=answers.jsonl --shard=0/4

Pictures are classified, captioned or embedded, depending on what the run was
trained for. Texts are continued or answered. The output has a line for each
file, as JSON or CSV, with the path, the step of the checkpoint, and the result
or, for a file that cannot be read, "error". For a .jsonl file, the output has a
line for each of its lines, with path:line as the path and the input as "row".
--method=score gives the log-likelihoods of given answers.

If you run the same command again, it skips what is already in the output. The
complete output is the same as without an interruption.

Exit codes: 0; 1 if files cannot be read, or for a damaged checkpoint; 2 for a
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
from bigtrain.data.formats.files import log_hidden, split_hidden
from bigtrain.files import paths
from bigtrain.inference import load
from bigtrain.inference.predictor import Predictor
from bigtrain.pp import picture_files
from bigtrain.runtime import jax_flags
from bigtrain.tools import arguments, exits

_PICTURES = picture_files.SUFFIXES
_TEXTS = (".txt",)
_FORMATS = ("jsonl", "csv")
# {method: fields of its results}, which are the columns of a CSV.
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
# Number of batches in work: while the devices compute one, another thread
# preprocesses the next.
_THREADS = 2


# The inputs.


def find_files(names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
  """The files that are named, and those below folders with the suffixes.

  Hidden files and folders are left out, as in training data.
  """
  result: dict[str, None] = {}  # An ordered set.
  for name in names:
    path = os.path.expanduser(name)
    if os.path.isdir(path):
      found = []
      for folder, folders, file_names in os.walk(path):
        folders.sort()
        for file in sorted(file_names):
          if file.lower().endswith(tuple(suffixes)):
            found.append(os.path.relpath(os.path.join(folder, file), path))
      visible, hidden = split_hidden(found)
      log_hidden(hidden, path)
      result |= dict.fromkeys(os.path.join(path, file) for file in visible)
    elif os.path.exists(path):
      result[path] = None
    else:
      raise ConfigError(f"{paths.absolute(name)}: no such file or folder.")
  if not result:
    kinds = ", ".join(suffixes)
    raise ConfigError(f"{' '.join(names)}: contains no files of type {kinds}.")
  return list(result)


def read_lines(files: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
  """Reads .jsonl files as {"path:line": object}; the keys must have texts."""
  result: dict[str, Any] = {}
  for path in files:
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        name = f"{path}:{number}"
        try:
          example = json.loads(line)
          texts = [example[key] for key in keys]
        except (ValueError, TypeError, KeyError) as e:
          raise ConfigError(
            f"{name}: expected a JSON object with {', '.join(keys)}: {e!r}."
          ) from e
        if not all(isinstance(text, str) for text in texts):
          raise ConfigError(f"{name}: {', '.join(keys)}: expected texts.")
        result[name] = example
  return result


def shard_of(spec: str, output: str) -> tuple[slice, str]:
  """The items of --shard=i/n, and the name of their output."""
  match = re.fullmatch(r"(\d+)/(\d+)", spec)
  if not match or int(match[1]) >= int(match[2]):
    raise ConfigError(f"--shard={spec}: expected i/n with i from 0 to n - 1.")
  first, count = int(match[1]), int(match[2])
  stem, suffix = os.path.splitext(output)
  if suffix:  # Otherwise it is the standard output.
    output = f"{stem}-{match[1]}-of-{match[2]}{suffix}"
  return slice(first, None, count), output


# The output.


class Results:
  """The output: a file, or standard output for "jsonl" and "csv".

  `done` has the paths of the results that an earlier call has written to the
  file. If that call was killed while it wrote a line, the line is removed.
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
    # A line that was cut may end within a character, hence `errors`.
    self._file = open(
      output, "a+", encoding="utf-8", errors="surrogateescape", newline=""
    )
    self._file.seek(0)
    text = self._file.read()
    complete = text[: text.rfind("\n") + 1]
    if self._csv:
      # A field in quotes can have line breaks. With an odd number of quotes,
      # the text was cut within one.
      while complete.count('"') % 2:
        complete = complete[: complete.rfind("\n", 0, -1) + 1]
    rest = text[len(complete) :]
    for path, step_of_path in self._parse(complete, rest, output):
      self.done.add(path)
      if step_of_path != step:
        raise ConfigError(
          f"--output={output}: has results of step {step_of_path}, but the "
          f"checkpoint is of step {step}: give another file."
        )
    if rest:
      self._file.truncate(len(complete.encode(errors="surrogateescape")))
    if self._csv and not complete:
      self._file.write(",".join(self._fields) + "\n")

  def _parse(
    self, text: str, rest: str, output: str
  ) -> Iterator[tuple[str, int]]:
    """Yields path and step of each result; `rest` is an unfinished one."""
    begin = ",".join(self._fields) if self._csv else '{"path": "'
    try:
      if not text and rest[: len(begin)] != begin[: len(rest)]:
        raise ValueError(f"expected it to begin with {begin}")
      if self._csv:
        reader = csv.DictReader(io.StringIO(text))
        if text and reader.fieldnames != self._fields:
          raise ValueError(f"expected the columns {', '.join(self._fields)}")
        for result in reader:
          yield result["path"], int(result["step"])
      else:
        for line in text.split("\n"):
          if line:
            result = json.loads(line)
            yield result["path"], int(result["step"])
    except (ValueError, KeyError, TypeError, csv.Error) as e:
      raise ConfigError(
        f"--output={output}: not an output of this tool: {e}."
      ) from e

  def write(self, results: Sequence[Mapping[str, Any]]) -> None:
    for result in results:
      plain = dict(result)
      if (vector := result.get("embedding")) is not None:
        # As many digits as float32 has.
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
  results: Results,
  *,
  method: str = "",
  lines: Mapping[str, Any] | None = None,
  keys: Sequence[str] = (),
  progress: Callable[[int, int], None] = lambda done, total: None,
  **options: Any,
) -> int:
  """Writes the results that are missing; returns how many files are unreadable.

  Args:
    files: paths, or names of `lines`.
    lines: {name: object}. The arguments of the method are the values of `keys`.
    progress: called with the numbers of finished files and of all files.
    **options: of the method.
  """
  call = getattr(predictor, method or predictor.default_method)
  size = predictor.batch_size
  # The same batches as in an interrupted call, because the rounding of a result
  # depends on the shape of its batch.
  batches = [files[i : i + size] for i in range(0, len(files), size)]
  batches = [batch for batch in batches if not results.done.issuperset(batch)]
  reads_texts = call.__name__ in _TEXT_METHODS

  def predict_batch(names: Sequence[str]) -> list[dict[str, Any]]:
    try:
      if lines is not None:
        columns = [[lines[name][key] for name in names] for key in keys]
        return call(*columns, **options)
      if reads_texts:
        return call([_read_text(name) for name in names], **options)
      return call(list(names), **options)
    except DataError as e:
      if len(names) == 1:
        return [{"error": str(e).removeprefix(f"{names[0]}: ")}]
      # Find the file that is to blame, and predict the others.
      return [result for name in names for result in predict_batch([name])]

  num_failed = 0
  done = len(files) - sum(map(len, batches))
  progress(done, len(files))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    # Only a few batches ahead, because all of them could fill the memory.
    waiting = [pool.submit(predict_batch, b) for b in batches[:_THREADS]]
    for i, names in enumerate(batches):
      batch_results = waiting.pop(0).result()
      if i + _THREADS < len(batches):
        waiting.append(pool.submit(predict_batch, batches[i + _THREADS]))
      new = []
      for name, result in zip(names, batch_results):
        if name not in results.done:
          about = {"path": name, "step": predictor.step}
          if lines is not None:
            about["row"] = lines[name]
          new.append({**about, **result})
      results.write(new)
      num_failed += sum("error" in result for result in batch_results)
      done += len(names)
      progress(done, len(files))
  return num_failed


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
    if method != "generate":
      raise ConfigError(f"--scores: {method} writes no text.")
    options["scores"] = True
    fields += _FIELDS["score"]
  if args.top_k is not None:
    if method not in ("classify", "zero_shot"):
      raise ConfigError(f"--top_k: {method} has no classes.")
    options["top_k"] = args.top_k
  if method == "zero_shot" and args.class_names is not None:
    options["class_names"] = args.class_names

  keys = [args.prompt_key]
  if method == "score":
    keys.append(args.answer_key)
  lines = None
  if method == "score" or any(name.endswith(".jsonl") for name in args.paths):
    if method not in _TEXT_METHODS:
      raise ConfigError(f"{args.paths[0]}: {method} reads pictures.")
    lines = read_lines(find_files(args.paths, (".jsonl",)), keys)
    files = list(lines)
  else:
    suffixes = _TEXTS if method in _TEXT_METHODS else _PICTURES
    files = find_files(args.paths, suffixes)
  output = args.output
  if args.shard != "0/1":
    shard, output = shard_of(args.shard, output)
    files = files[shard]

  results = Results(output, predictor.step, fields)
  with _progress_bar() as progress:
    num_failed = predict(
      predictor,
      files,
      results,
      method=method,
      lines=lines,
      keys=keys,
      progress=progress,
      **options,
    )
  if num_failed:
    print(f"error: {num_failed} file(s) cannot be read.", file=sys.stderr)
  return 1 if num_failed else 0


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
  """Yields what shows (finished, all) on standard error, if on a terminal."""
  import rich.console
  import rich.progress

  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.MofNCompleteColumn(),
    console=console,
    disable=not console.is_terminal,
  ) as bar:
    task = bar.add_task("files", total=None)
    yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
  sys.exit(main())
