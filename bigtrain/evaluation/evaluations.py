"""The evaluations of a config: checked at the start, built when first due.

`from_config` checks all entries of config.evals and returns an `Evaluation` for
each. Its `build` later makes the evaluator, an instance of a class in
bigtrain/evaluators, which gets `Batches` of its data and a `Context`.
bigtrain/evaluators/__init__.py describes an evaluator. The functions at the end
of this file are for evaluators' own checks.
"""

import collections
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays.types import Batch, ClassCount, PredictFn, Variables
from bigtrain.config import lengths, settings
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_keys,
  check_kwargs,
  check_number,
  did_you_mean,
)
from bigtrain.config.modules import find_module
from bigtrain.files import paths
from bigtrain.inputs import eval_input, labels
from bigtrain.inputs.named_features import Features
from bigtrain.text import tokenizers

# Keys of an entry that `from_config` reads. All others are options of the
# evaluator or of its batches.
_KEYS = (
  "at_start",
  "enabled",
  "pred",
  "pred_kw",
  "type",
  "weights",
)
# An evaluator gets those of these arguments that its class has as parameters.
_GIVEN = ("predict_fn", "batches", "context")
# More would hold more results on the device, and not make it faster.
_BATCHES_IN_FLIGHT = 4
# Limits of an option that counts something, for the LIMITS of an evaluator.
COUNT: dict[str, Any] = dict(least=1, whole=True)


class Context(NamedTuple):
  """The evaluation's name and its place in the config, and facts of the run."""

  name: str
  workdir: str  # "" without a run.
  mesh: Mesh
  # Global batch size of training, which is the default for evaluations.
  batch_size: int
  pp_modules: Sequence[str]  # The user's preprocessing modules.
  # Called with (finished batches, number of batches); it can raise to stop.
  progress: Callable[[int, int], None]
  # Number of ids that the model accepts in each feature of ids or labels.
  vocab_sizes: Mapping[str, int] = {}
  # Class names of the training data, for each feature of labels.
  class_names: Mapping[str, Sequence[str]] = {}
  # Features in which a negative number means that there is no label.
  negative_ids: frozenset[str] = frozenset()
  # Specs of the variables that `run` will get, to compile before they exist.
  variables: Any = None
  compile: Callable[..., Any] | None = None  # `Programs.compile`, or jax.jit.

  @property
  def path(self) -> str:
    return f"config.evals.{self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
  """A fixed evaluation set, cut into batches on the devices."""

  context: Context
  data: Mapping[str, Any]  # Source, as in config.input.data.
  pp: str = ""
  batch_size: int | None = None  # Global; by default that of training.
  num_examples: int | None = None  # The first ones; by default all.
  cache: bool = True  # Whether to keep preprocessed batches in host memory.
  # Whether class numbers mean the same as in training even if names differ.
  trust_class_numbers: bool = False

  def replace(self, **options: Any) -> "Batches":
    return dataclasses.replace(self, **options)

  def labelled(self, feature: str, num_classes: int | None) -> "Batches":
    """Batches in which a feature has class numbers, negative for no label.

    Numbers of `num_classes` or more are errors, unless it is None.
    """
    sizes = dict(self.context.vocab_sizes)
    sizes.pop(feature, None)
    if num_classes is not None:
      sizes[feature] = num_classes
    context = self.context._replace(
      vocab_sizes=sizes, negative_ids=self.context.negative_ids | {feature}
    )
    return self.replace(context=context)

  def labelled_as_in_training(self, feature: str) -> "Batches":
    sizes = self.context.vocab_sizes
    return self.labelled(feature, sizes.get(feature, sizes.get("labels")))

  @property
  def _seed(self) -> int:
    """Seed of random ops."""
    return 0

  @functools.cached_property
  def input(self) -> eval_input.EvalInput:
    result = eval_input.make_eval(
      data=dict(self.data),
      pp=self.pp,
      batch_size=self.batch_size or self.context.batch_size,
      mesh=self.context.mesh,
      num_examples=self.num_examples,
      cache=self.cache,
      pp_modules=self.context.pp_modules,
      path=self.context.path,
      seed=self._seed,
    )
    result.limit_ids(self.context.vocab_sizes, self.context.negative_ids)
    return result

  def map(self, fn: PredictFn) -> Callable[[Variables], list[Any]]:
    """Like `each`, but returns the results of all batches together."""
    run = self.each(fn)
    return lambda variables: list(run(variables))

  def each(self, fn: PredictFn) -> Callable[[Variables], Iterator[Any]]:
    """Compiles fn(variables, batch), which returns a tree of arrays.

    Returns a function that maps variables to the results for the batches, one
    after the other, on the host. The feature "_mask" [B] of a batch is 0 for
    padding.
    """
    data = self.input
    spec = sharding.batch_spec(data.spec, self.context.mesh)
    compiled = compile_fn(self.context, fn, spec)

    def run(variables: Variables) -> Iterator[Any]:
      calls = (compiled(variables, batch) for batch in data.batches())
      return in_flight(calls, data.num_batches, self.context)

    return run

  def collect(self, fn: PredictFn) -> Callable[[Variables], Any]:
    """Like `map`, but joins arrays [B, ...] into [N, ...], without padding."""

    def with_mask(variables: Variables, batch: Batch) -> tuple[Any, jax.Array]:
      return fn(variables, batch), batch["_mask"]

    run = self.map(with_mask)

    def collected(variables: Variables) -> Any:
      results, masks = zip(*run(variables))
      real = np.concatenate(masks) > 0
      return jax.tree.map(lambda *xs: np.concatenate(xs)[real], *results)

    return collected


def compile_fn(
  context: Context, fn: PredictFn, batch_spec: Any, out_shardings: Any = None
) -> Callable[[Variables, Batch], Any]:
  """Compiles fn(variables, batch); by default every device gets the results."""

  def fn_of_features(variables: Variables, batch: Batch) -> Any:
    return fn(variables, Features(batch, context.path))

  out_shardings = out_shardings or sharding.replicated(context.mesh)
  if context.compile is None or context.variables is None:
    return jax.jit(fn_of_features, out_shardings=out_shardings)
  return context.compile(
    context.name,
    fn_of_features,
    context.variables,
    batch_spec,
    out_shardings=out_shardings,
  )


def in_flight(
  calls: Iterable[Any], number: int, context: Context
) -> Iterator[Any]:
  """Yields the results of `number` calls on the host, in order.

  A few calls run ahead to keep the device busy; not all of them, because their
  results could fill its memory.
  """
  waiting: collections.deque[Any] = collections.deque()
  for i, result in enumerate(calls):
    waiting.append(result)
    if len(waiting) > _BATCHES_IN_FLIGHT:
      yield jax.device_get(waiting.popleft())
    context.progress(i + 1, number)
  while waiting:
    yield jax.device_get(waiting.popleft())


class Evaluation(NamedTuple):
  """One entry of config.evals."""

  name: str
  log_steps: int  # It is due at multiples of this, and at the last step.
  weights: str  # "params" or "ema".
  # Makes the evaluator, which loads data and compiles. It can be called in any
  # thread: processes do not wait for one another in it.
  build: Callable[[], Any]
  at_start: bool = False

  def owns(self, metric: str) -> bool:
    return metric.startswith(f"{self.name}/")

  def due(self, step: int, total_steps: int) -> bool:
    if step == 0:
      return self.at_start
    return step == total_steps or step % self.log_steps == 0

  def due_later(self, step: int, last_step: int, total_steps: int) -> bool:
    """Whether it is due at a step from `step` to `last_step`."""
    num_before = max(step - 1, 0) // self.log_steps
    return last_step == total_steps or last_step // self.log_steps > num_before


def from_config(
  config: settings.Config,
  predict_fns: Mapping[str, PredictFn],
  units: lengths.Units,
  context: Context,
  weights: Mapping[str, Any],
) -> list[Evaluation]:
  """Checks all entries of config.evals; builds no evaluator.

  `weights` has specs of the model's variables for each part of the state that
  can be evaluated: "params" and perhaps "ema".
  """
  evaluations = []
  class_names = {
    feature: names
    for feature, names in context.class_names.items()
    if isinstance(context.vocab_sizes.get(feature), ClassCount)
  }
  eval_at_start = config.get("eval_at_start", False)
  for name in config.get("evals") or {}:
    path = f"config.evals.{name}"
    options = config.evals.kwargs(name)  # The rest is for the evaluator.
    if not options.pop("enabled", True):
      continue
    if not {"type", "pred"} & {*options}:
      # Perhaps a misspelled change of another entry on the command line.
      hint = did_you_mean(name, {*config.evals} - {name})
      raise ConfigError(f"{path}: has no type and no pred.{hint}")
    required = settings.Config(options, path)
    kind, pred = required["type"], required["pred"]
    del options["type"], options["pred"]
    module = find_module("evaluators", kind, f"{path}.type")
    pred_kw = options.pop("pred_kw", {})
    predict_fn = _predict_fn(predict_fns, pred, pred_kw, path)
    log_steps = lengths.steps(options, "log", units, path=path)
    part = options.pop("weights", "params")
    check_choice(f"{path}.weights", part, weights, "the state has no")
    at_start = options.pop("at_start", eval_at_start)
    entry_context = context._replace(
      name=name, variables=weights[part], class_names=class_names
    )
    evaluations.append(
      Evaluation(
        name,
        log_steps or units.total_steps or 1,
        part,
        _bind(module, predict_fn, entry_context, options),
        at_start,
      )
    )
  return evaluations


def _predict_fn(
  predict_fns: Mapping[str, PredictFn],
  name: str | Sequence[str],
  options: Mapping[str, Any],
  path: str,
) -> PredictFn:
  """The predict function that an entry names, with the entry's options.

  If the entry names several, the function returns a dict of their results.
  """
  if not isinstance(name, str):
    check_keys(f"{path}.pred_kw", options, name)
    fns = {
      one: _predict_fn(predict_fns, one, options.get(one, {}), path)
      for one in name
    }

    def predict_all(variables: Variables, batch: Batch) -> dict[str, Any]:
      return {one: each(variables, batch) for one, each in fns.items()}

    return predict_all
  problem = "the task has no predict function"
  check_choice(f"{path}.pred", name, predict_fns, problem)
  fn = predict_fns[name]
  check_kwargs(fn, options, f"{path}.pred_kw", ("variables", "batch"))

  def predict_fn(variables: Variables, batch: Batch, **more: Any) -> Any:
    features = Features(batch, path)
    return fn(variables, features, **{**options, **more})

  return predict_fn


def batches_of(parameters: Mapping[str, inspect.Parameter]) -> type[Batches]:
  """The class of an evaluator's argument `batches`: its annotation."""
  given: Any = getattr(parameters.get("batches"), "annotation", None)
  is_own = isinstance(given, type) and issubclass(given, Batches)
  return given if is_own else Batches


def _bind(
  module: Any,
  predict_fn: PredictFn,
  context: Context,
  options: Mapping[str, Any],
) -> Callable[[], Any]:
  """Checks the options of an entry; returns a function that uses them."""
  parameters = inspect.signature(module.Evaluator).parameters
  batches_class = batches_of(parameters)
  # The options of the batches are those fields of their class that are not
  # parameters of the evaluator itself.
  batch_names: set[str] = set()
  if "batches" in parameters:
    batch_names = {field.name for field in dataclasses.fields(batches_class)}
    batch_names -= {"context", *parameters}
  batch_options = {k: v for k, v in options.items() if k in batch_names}
  own_options = {k: v for k, v in options.items() if k not in batch_names}
  check_kwargs(
    module.Evaluator,
    own_options,
    context.path,
    given=_GIVEN,
    others=(*_KEYS, *lengths.keys("log"), *batch_names),
  )
  if "batches" in parameters:
    check_kwargs(batches_class, batch_options, context.path, given=("context",))
  _check_batches(options, context)
  for name, limits in getattr(module, "LIMITS", {}).items():
    default = parameters[name].default
    check = check_numbers if isinstance(default, tuple) else check_number
    check(f"{context.path}.{name}", options.get(name, default), **limits)
  if hasattr(module, "check"):
    module.check(options, context, context.path)

  def build() -> Any:
    given: dict[str, Any] = {"predict_fn": predict_fn, "context": context}
    if "batches" in parameters:
      given["batches"] = batches_class(context, **batch_options)
    given = {name: x for name, x in given.items() if name in parameters}
    return module.Evaluator(**given, **own_options)

  return build


def _check_batches(options: Mapping[str, Any], context: Context) -> None:
  path = context.path
  if "data" in options:
    _check_exists(options["data"], f"{path}.data.path")
    eval_input.check(
      data=options["data"],
      pp=options.get("pp", ""),
      pp_modules=context.pp_modules,
      vocab_sizes=context.vocab_sizes,
      path=path,
    )
  for name in ("batch_size", "num_examples"):
    if options.get(name) is not None:
      check_number(f"{path}.{name}", options[name], least=1, whole=True)
  if size := options.get("batch_size"):
    sharding.check_batch(size, context.mesh, f"{path}.batch_size")


def _check_exists(data: Any, key: str) -> None:
  path = data.get("path") if isinstance(data, Mapping) else None
  if not isinstance(path, str) or set(path) & set("*?[{") or ":/" in path:
    return  # A pattern or remote: the source will check it when it opens it.
  path = paths.absolute(path)
  if not os.path.exists(path):
    raise ConfigError(f"{key}: {path}: no such file or directory.")


def check_class_names(
  options: Mapping[str, Any], context: Context, label_key: str = "labels"
) -> None:
  """Checks, where it can, that class numbers mean the same as in training."""
  names = context.class_names
  training = names.get(label_key, names.get("labels"))
  if training and "data" in options and not options.get("trust_class_numbers"):
    own = labels.of_source(
      options["data"],
      options.get("pp", ""),
      context.pp_modules,
      label_key,
      context.path,
    )
    labels.check_same(own or training, training, context.path)


def check_classes(
  options: Mapping[str, Any],
  context: Context,
  prompts: Sequence[str],
  key: str = "prompt",
) -> None:
  """Checks the options of an evaluator that classifies by class names."""
  path = context.path
  names = labels.read(options["class_names"], f"{path}.class_names")
  own = labels.of_source(
    options["data"],
    options.get("pp", ""),
    context.pp_modules,
    options.get("label_key", "label"),
    path,
  )
  if own:
    labels.check_order(names, own, f"{path}.class_names")
  texts = [labels.fill(p, names[:1], f"{path}.{key}")[0] for p in prompts]
  class_tokens(texts, options["pp_text"], context)
  check_numbers(f"{path}.top_k", options.get("top_k", (1, 5)), **COUNT)


def class_tokens(
  texts: Sequence[str], pp_text: str, context: Context
) -> np.ndarray:
  """Tokens int [texts, L] of texts with class names."""
  return labels.tokens(
    texts,
    pp_text,
    context.pp_modules,
    context.vocab_sizes,
    key=f"{context.path}.pp_text",
  )


def check_numbers(path: str, values: Any, **limits: Any) -> None:
  if not isinstance(values, list | tuple) or not values:
    raise ConfigError(f"{path}: expected a list of numbers, got {values!r}.")
  for value in values:
    check_number(path, value, **limits)


def tokenizer(spec: Any, context: Context) -> tokenizers.Tokenizer:
  try:
    return tokenizers.get(spec)
  except ConfigError as e:
    raise ConfigError(f"{context.path}.tokenizer: {e}") from e
