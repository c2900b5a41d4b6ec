"""Evaluates a language model with the lm-evaluation-harness.

  pip install 'bigtrain[lm_eval]'
  python -m bigtrain.tools.lm_eval runs/mine --tasks=arc_easy,lambada_openai
  python -m bigtrain.tools.lm_eval runs/mine --tasks=my_task \\
      --include_path=my_tasks/ --output=scores.json

In Python, `model("runs/mine")` is a model of that library, for
lm_eval.simple_evaluate. It scores and generates in batches over all devices.
Tasks and their data come from the library, which may download them.

Exit codes: 0; 2 for a wrong argument or without the package lm_eval.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError, import_package
from bigtrain.files import paths
from bigtrain.inference import load
from bigtrain.inference.predictor import Predictor
from bigtrain.tools import arguments, exits

# The harness's own limit of tokens where a task sets none.
_MAX_NEW = 256
# Options of generation with the same name in the harness.
_SAMPLING = ("temperature", "top_k", "top_p")


def model(
  path: str | os.PathLike[str],
  *,
  max_length: int | None = None,
  bos: bool = False,
  max_new: int = _MAX_NEW,
  **options: Any,
) -> Any:
  """Returns a trained language model as an LM of the harness.

  Args:
    max_length: most tokens of a text that the model sees; by default the
      model's max_len, or the length of its training examples.
    bos: whether a text starts with the begin token (the end token, if the
      tokenizer has no begin token). An empty context always does.
  """
  package = import_package(
    "lm_eval.api.model", "bigtrain.tools.lm_eval", "'bigtrain[lm_eval]'"
  )
  predictor = load.load(path, **options)
  if not {"score", "generate"} <= set(predictor.preds):
    raise ConfigError(
      f"{os.fspath(path)}: the harness needs a model of the task "
      f"language_modeling, not of {predictor.config.get('task')!r}."
    )
  predictor.need_tokenizer()
  if max_length is None:
    data = predictor.config.get("input", {}).get("data", {})
    max_length = getattr(predictor.model, "max_len", None) or data.get("length")
  if not max_length:
    raise ConfigError(
      "max_length: the run does not tell the length of its texts; give it."
    )
  cls = type("BigtrainLM", (_Methods, package.TemplateLM), {})
  return cls(predictor, max_length, bos, max_new)


class _Methods:
  def __init__(
    self, predictor: Predictor, max_length: int, bos: bool, max_new: int
  ):
    super().__init__()
    self.predictor, self.max_length = predictor, max_length
    self._codec, self._bos = predictor.need_tokenizer(), bos
    self._max_new = max_new

  @property
  def eot_token_id(self) -> int | None:
    return self._codec.eos_id

  @property
  def prefix_token_id(self) -> int:
    for number in (self._codec.bos_id, self._codec.eos_id):
      if number is not None:
        return number
    raise ConfigError("lm_eval: the tokenizer has no begin or end token.")

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    ids = np.asarray(self._codec.encode(string)).tolist()
    if self._bos and add_special_tokens is not False:
      return [self.prefix_token_id, *ids]
    return ids

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    pairs = [(context, rest) for _, context, rest in requests]
    scores = self.predictor.score_ids(pairs, self.max_length)
    return [(row["log_likelihood"], row["greedy"]) for row in scores]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    from lm_eval import utils

    pairs, owners = [], []
    for i, request in enumerate(requests):
      windows = utils.get_rolling_token_windows(
        token_list=self.tok_encode(request.args[0]),
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      for window in map(utils.make_disjoint_window, windows):
        pairs.append(window)
        owners.append(i)
    sums = np.zeros(len(requests))
    scores = self.predictor.score_ids(pairs, self.max_length)
    for i, row in zip(owners, scores):
      sums[i] += row["log_likelihood"]
    return sums.tolist()

  def generate_until(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    texts = [""] * len(requests)
    groups: dict[str, list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
      groups[json.dumps(request.args[1], sort_keys=True)].append(i)
    for key, members in groups.items():
      stops, options = self._generation(json.loads(key))
      room = self.max_length - options["max_new"]
      prompts = [
        self.tok_encode(requests[i].args[0]) or [self.prefix_token_id]
        for i in members
      ]
      results = self.predictor.generate(
        [prompt[-room:] for prompt in prompts], **options
      )
      for i, result in zip(members, results):
        texts[i] = result["text"]
        for stop in filter(None, stops):
          texts[i] = texts[i].partition(stop)[0]
    return texts

  def _generation(
    self, given: Mapping[str, Any]
  ) -> tuple[list[str], dict[str, Any]]:
    """(stop texts, options of the predict function `generate`)."""
    until = given.get("until") or []
    # Greedy, even if the folder of a published model asks for samples.
    options: dict[str, Any] = {"temperature": 0.0}
    if given.get("do_sample", given.get("temperature", 0) > 0):
      options = {name: x for name, x in given.items() if name in _SAMPLING}
      options.setdefault("temperature", 1.0)
    new = given.get("max_gen_toks", given.get("max_new_tokens"))
    # Half of the window is left for the prompt.
    longest = self.max_length // 2 if new is None else self.max_length - 1
    options["max_new"] = max(1, min(int(new or self._max_new), longest))
    return [until] if isinstance(until, str) else list(until), options


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("lm_eval", __doc__, changes_config=False)
  parser.add_argument("run", help="a workdir, a checkpoint or an export")
  parser.add_argument(
    "--tasks", required=True, help="names of tasks, such as arc_easy,piqa"
  )
  parser.add_argument(
    "--include_path", help="folder with your own tasks, in YAML"
  )
  parser.add_argument(
    "--num_fewshot", type=int, help="number of examples in each prompt"
  )
  parser.add_argument(
    "--limit", type=int, help="number of questions of each task"
  )
  parser.add_argument(
    "--step", type=int, help="step of the checkpoint (default: the newest)"
  )
  parser.add_argument(
    "--weights",
    default="params",
    choices=["params", "ema"],
    help="parameters to use (default: %(default)s)",
  )
  parser.add_argument(
    "--tokenizer", help="'bytes' or a path, if the tokenizer's file has moved"
  )
  parser.add_argument(
    "--batch_size",
    type=int,
    default=32,
    help="number of texts in a batch, over all devices (default: %(default)s)",
  )
  parser.add_argument(
    "--max_length",
    type=int,
    help="largest number of tokens that the model sees at a time (default: the "
    "model's max_len, or the length of its training examples)",
  )
  parser.add_argument(
    "--bos", action="store_true", help="start texts with the begin token"
  )
  parser.add_argument("--output", help="JSON file for all results")
  return parser


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args, _ = _parser().parse(argv)
  names = ("step", "weights", "tokenizer", "batch_size", "max_length", "bos")
  options = {name: getattr(args, name) for name in names}
  results = _evaluate(model(args.run, **options), args)
  from lm_eval import utils

  print(utils.make_table(results))
  if args.output:
    with paths.replacing(paths.absolute(args.output)) as file:
      json.dump(results, file, indent=2, default=str)
  return process.EXIT_OK


def _evaluate(trained: Any, args: Any) -> dict[str, Any]:
  import lm_eval
  from lm_eval import tasks

  manager = tasks.TaskManager(include_path=args.include_path)
  names = args.tasks.split(",")
  unknown = sorted(set(names) - set(manager.all_tasks))
  if unknown:
    raise ConfigError(
      f"--tasks: the harness has no task {', '.join(map(repr, unknown))}; "
      "tasks of your own are found with --include_path."
    )
  return lm_eval.simple_evaluate(
    trained,
    tasks=names,
    num_fewshot=args.num_fewshot,
    limit=args.limit,
    task_manager=manager,
    log_samples=False,
  )


if __name__ == "__main__":
  sys.exit(main())
