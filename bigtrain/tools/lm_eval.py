"""Evaluates a language model with the lm-evaluation-harness.

  pip install 'bigtrain[lm_eval]'
  python -m bigtrain.tools.lm_eval runs/mine --tasks=arc_easy,lambada_openai
  python -m bigtrain.tools.lm_eval runs/mine --tasks=my_task \\
      --include_path=my_tasks/ --output=scores.json

In Python, `model("runs/mine")` returns a model for lm_eval.simple_evaluate. It
scores and generates in batches over all devices. Tasks and their data come from
the harness, which may download them.

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

# The harness's own limit of new tokens, for tasks that set none.
_MAX_NEW = 256
# Options of generation that have the same name in the harness.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


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
    max_length: largest number of tokens that the model sees at a time; by
      default the model's max_len, or the length of its training examples.
    bos: whether a text starts with the begin token (the end token, if the
      tokenizer has no begin token). An empty context always does.
    max_new: largest number of new tokens, for tasks that set none.
    **options: of bigtrain.load.
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
      "max_length: missing, and neither the model nor the run's data has one."
    )
  cls = type("BigtrainLM", (_Methods, package.TemplateLM), {})
  return cls(predictor, max_length, bos, max_new)


class _Methods:
  """The methods of an LM of the harness, which is imported only when needed."""

  def __init__(
    self, predictor: Predictor, max_length: int, bos: bool, max_new: int
  ):
    super().__init__()
    self.predictor = predictor
    self.max_length = max_length
    self._codec = predictor.need_tokenizer()
    self._bos = bos
    self._max_new = max_new

  @property
  def eot_token_id(self) -> int | None:
    return self._codec.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token that stands for an empty context."""
    if self._codec.bos_id is not None:
      return self._codec.bos_id
    if self._codec.eos_id is not None:
      return self._codec.eos_id
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
    return [(score["log_likelihood"], score["greedy"]) for score in scores]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihoods of whole texts, also of those longer than the context."""
    from lm_eval import utils

    pairs = []  # (context, rest) of all windows of all texts.
    text_of_pair = []
    for i, request in enumerate(requests):
      windows = utils.get_rolling_token_windows(
        token_list=self.tok_encode(request.args[0]),
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      for window in map(utils.make_disjoint_window, windows):
        pairs.append(window)
        text_of_pair.append(i)
    sums = np.zeros(len(requests))
    scores = self.predictor.score_ids(pairs, self.max_length)
    for i, score in zip(text_of_pair, scores):
      sums[i] += score["log_likelihood"]
    return sums.tolist()

  def generate_until(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    # Requests with the same options can share batches.
    groups: dict[str, list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
      groups[json.dumps(request.args[1], sort_keys=True)].append(i)
    texts = [""] * len(requests)
    for key, members in groups.items():
      stops, options = self._generation(json.loads(key))
      # The end of a prompt that is too long; the new tokens need room as well.
      room = self.max_length - options["max_new"]
      prompts = []
      for i in members:
        ids = self.tok_encode(requests[i].args[0]) or [self.prefix_token_id]
        prompts.append(ids[-room:])
      results = self.predictor.generate(prompts, **options)
      for i, result in zip(members, results):
        texts[i] = result["text"]
        for stop in stops:
          texts[i] = texts[i].partition(stop)[0]
    return texts

  def _generation(
    self, given: Mapping[str, Any]
  ) -> tuple[list[str], dict[str, Any]]:
    """Returns (stop texts, options of the predict function `generate`)."""
    stops = given.get("until") or []
    if isinstance(stops, str):
      stops = [stops]
    if given.get("do_sample", given.get("temperature", 0) > 0):
      options = {name: x for name, x in given.items() if name in _SAMPLING}
      options.setdefault("temperature", 1.0)
    else:
      # Greedy, even if the folder of a published model asks for samples.
      options = {"temperature": 0.0}
    max_new = given.get("max_gen_toks", given.get("max_new_tokens"))
    if max_new is None:
      # Half of the context is left for the prompt.
      max_new, limit = self._max_new, self.max_length // 2
    else:
      max_new, limit = int(max_new or self._max_new), self.max_length - 1
    options["max_new"] = max(1, min(max_new, limit))
    return [stop for stop in stops if stop], options


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
  trained = model(
    args.run,
    step=args.step,
    weights=args.weights,
    tokenizer=args.tokenizer,
    batch_size=args.batch_size,
    max_length=args.max_length,
    bos=args.bos,
  )
  results = _evaluate(trained, args)
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
      "your own tasks need --include_path."
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
