"""Evaluations of a config: checked at the start, built when first due.

bigtrain/evaluators/__init__.py describes an evaluator.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
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

# Keys of an entry that `from_config` reads; the others are options.
_KEYS = ("at_start", "enabled", "pred", "pred_kw", "type", "weights")
# Limits of a number of something, for an evaluator's LIMITS.
COUNT: dict[str, Any] = dict(least=1, whole=True)
# Arguments that the program passes to evaluators with such parameters.
_GIVEN = ("predict_fn", "batches", "context")


class Context(NamedTuple):
  """What an evaluator can know about the run."""

  name: str
  workdir: str  # "" without a run.
  mesh: Mesh
  batch_size: int  # Global, of training; the default for evaluations.
  pp_modules: Sequence[str]  # The user's preprocessing modules.
  # Called with (finished batches, number of batches); can raise to stop.
  progress: Callable[[int, int], None]
  vocab_sizes: Mapping[str, int] = {}  # Ids that the model takes, by feature.
  class_names: Mapping[str, Sequence[str]] = {}  # Of training, by feature.
  negative_ids: frozenset[str] = frozenset()  # Features: < 0 is no label.
  variables: Any = None  # Specs of the argument of `run`, if known.
  compile: Callable[..., Any] | None = None  # Of `Programs`; None for jax.jit.

  @property
  def path(self) -> str:
    return f"config.evals.{self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
  """A fixed evaluation set, cut into batches on the devices."""

  context: Context
  data: Mapping[str, Any]  # Source, as in config.input.data.
  pp: str = ""
  batch_size: int | None = None  # Global; the one of training by default.
  num_examples: int | None = None  # From the start; all by default.
  cache: bool = True  # Keeps preprocessed batches in host memory.
  # Class numbers mean the same as in training even if their names differ.
  trust_class_numbers: bool = False

  def replace(self, **options: Any) -> "Batches":
    return dataclasses.replace(self, **options)

  def labelled(self, feature: str, num_classes: int | None) -> "Batches":
    """Batches in which a feature holds class numbers; negative for no label.

    Numbers of `num_classes` or more, if it is given, are errors.
    """
    sizes = {k: n for k, n in self.context.vocab_sizes.items() if k != feature}
    if num_classes is not None:
      sizes[feature] = num_classes
    context = self.context._replace(
      vocab_sizes=sizes, negative_ids=self.context.negative_ids | {feature}
    )
    return self.replace(context=context)

  def labelled_as_in_training(self, feature: str) -> "Batches":
    sizes = self.context.vocab_sizes
    return self.labelled(feature, sizes.get(feature, sizes.get("labels")))

  @functools.cached_property
  def input(self) -> eval_input.EvalInput:
    made = eval_input.make_eval(
      data=dict(self.data),
      pp=self.pp,
      batch_size=self.batch_size or self.context.batch_size,
      mesh=self.context.mesh,
      num_examples=self.num_examples,
      cache=self.cache,
      pp_modules=self.context.pp_modules,
      path=self.context.path,
    )
    made.limit_ids(self.context.vocab_sizes, self.context.negative_ids)
    return made

  def map(self, fn: PredictFn) -> Callable[[Variables], list[Any]]:
    """Compiles fn(variables, batch), which returns a tree of arrays.

    The result maps variables to fn's results for all batches, on the host. The
    batches' "_mask" [B] is 0 for padding.
    """
    context = self.context

    def fn_of_features(variables: Variables, batch: Batch) -> Any:
      return fn(variables, Features(batch, context.path))

    replicated = sharding.replicated(context.mesh)
    if context.compile is None or context.variables is None:
      compiled = jax.jit(fn_of_features, out_shardings=replicated)
    else:
      compiled = context.compile(
        context.name,
        fn_of_features,
        context.variables,
        sharding.batch_spec(self.input.spec, context.mesh),
        out_shardings=replicated,
      )
    data = self.input

    def run(variables: Variables) -> list[Any]:
      results = []
      for i, batch in enumerate(data.batches()):
        results.append(compiled(variables, batch))
        # A few in flight keep the device busy; all of them could fill it.
        if i >= 4:
          results[i - 4] = jax.device_get(results[i - 4])
        context.progress(i + 1, data.num_batches)
      return jax.device_get(results)

    return run

  def collect(self, fn: PredictFn) -> Callable[[Variables], Any]:
    """Like `map`, for [B, ...] arrays, which are joined without the padding."""
    run = self.map(lambda params, batch: (fn(params, batch), batch["_mask"]))

    def collected(variables: Variables) -> Any:
      results, masks = zip(*run(variables))
      real = np.concatenate(masks) > 0
      return jax.tree.map(lambda *xs: np.concatenate(xs)[real], *results)

    return collected


class Evaluation(NamedTuple):
  """One entry of config.evals."""

  name: str
  log_steps: int  # It is due at multiples of this, and at the last step.
  weights: str  # "params" or "ema".
  # Loads data and compiles; runs in any thread, nothing is collective.
  build: Callable[[], Any]
  at_start: bool = False

  def owns(self, metric: str) -> bool:
    return metric.startswith(f"{self.name}/")

  def due(self, step: int, total_steps: int) -> bool:
    if step == 0:
      return self.at_start
    return step == total_steps or step % self.log_steps == 0

  def due_later(self, step: int, last_step: int, total_steps: int) -> bool:
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

  `weights` are specs of the model's variables with each part of the state that
  can be evaluated.
  """
  evaluations = []
  sizes = context.vocab_sizes
  names = {
    feature: names
    for feature, names in context.class_names.items()
    if isinstance(sizes.get(feature), ClassCount)
  }
  at_start = config.get("eval_at_start", False)
  for name in config.get("evals") or {}:
    options = config.evals.kwargs(name)
    if not options.pop("enabled", True):
      continue
    path = f"config.evals.{name}"
    required = settings.Config(options, path)
    if not {"type", "pred"} & {*options}:  # Perhaps a change of another one.
      hint = did_you_mean(name, {*config.evals} - {name})
      raise ConfigError(f"{path}: has no type and no pred.{hint}")
    kind, pred = required["type"], required["pred"]
    module = find_module("evaluators", kind, f"{path}.type")
    del options["type"], options["pred"]
    pred_kw = options.pop("pred_kw", {})
    predict_fn = _predict_fn(predict_fns, pred, pred_kw, path)
    log_steps = lengths.steps(options, "log", units, path=path)
    part = options.pop("weights", "params")
    begins = options.pop("at_start", at_start)
    problem = "the state has no"
    check_choice(f"{path}.weights", part, weights, problem)
    entry_context = context._replace(
      name=name, variables=weights[part], class_names=names
    )
    build = _bind(module, predict_fn, entry_context, options)
    log_steps = log_steps or units.total_steps or 1
    evaluations.append(Evaluation(name, log_steps, part, build, begins))
  return evaluations


def _predict_fn(
  predict_fns: Mapping[str, PredictFn],
  name: str | Sequence[str],
  options: Mapping[str, Any],
  path: str,
) -> PredictFn:
  if not isinstance(name, str):  # Several, each with its options.
    check_keys(f"{path}.pred_kw", options, name)
    each = {
      one: _predict_fn(predict_fns, one, options.get(one, {}), path)
      for one in name
    }
    return lambda variables, batch: {
      one: fn(variables, batch) for one, fn in each.items()
    }
  problem = "the task has no predict function"
  check_choice(f"{path}.pred", name, predict_fns, problem)
  fn = predict_fns[name]
  check_kwargs(fn, options, f"{path}.pred_kw", ("variables", "batch"))

  def predict_fn(variables: Variables, batch: Batch, **more: Any) -> Any:
    features = Features(batch, path)
    return fn(variables, features, **{**options, **more})

  return predict_fn


def batches_of(parameters: Mapping[str, inspect.Parameter]) -> type[Batches]:
  """The class of an evaluator's argument `batches`."""
  given: Any = getattr(parameters.get("batches"), "annotation", None)
  is_own = isinstance(given, type) and issubclass(given, Batches)
  return given if is_own else Batches


def _bind(
  module: Any,
  predict_fn: PredictFn,
  context: Context,
  options: Mapping[str, Any],
) -> Callable[[], Any]:
  parameters = inspect.signature(module.Evaluator).parameters
  batches_class = batches_of(parameters)
  fields = {x.name for x in dataclasses.fields(batches_class)} - {"context"}
  batch_names = fields - {*parameters} if "batches" in parameters else set()
  own_options = dict(options)
  batch_options = {k: own_options.pop(k) for k in options if k in batch_names}
  check_kwargs(
    module.Evaluator,
    own_options,
    context.path,
    given=_GIVEN,
    others=(*_KEYS, *lengths.keys("log"), *batch_names),
  )
  if "batches" in parameters:
    path, others = context.path, ("context",)
    check_kwargs(batches_class, batch_options, path, others)
  _check_batches(options, context)
  for name, limits in getattr(module, "LIMITS", {}).items():
    several = isinstance(default := parameters[name].default, tuple)
    check = check_numbers if several else check_number
    check(f"{context.path}.{name}", options.get(name, default), **limits)
  if hasattr(module, "check"):
    module.check(options, context, context.path)

  def build() -> Any:
    given: dict[str, Any] = {"predict_fn": predict_fn, "context": context}
    if "batches" in parameters:
      given["batches"] = batches_class(context, **batch_options)
    asked = {k: v for k, v in given.items() if k in parameters}
    return module.Evaluator(**asked, **own_options)

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
    return  # A pattern, or remote: the source checks it when it is opened.
  path = paths.absolute(path)
  if not os.path.exists(path):
    raise ConfigError(f"{key}: {path}: no such file or directory.")


def check_class_names(
  options: Mapping[str, Any], context: Context, label_key: str = "labels"
) -> None:
  """Checks that class numbers mean the same as in training, if it is known."""
  names = context.class_names
  training = names.get(label_key, names.get("labels"))
  if training and "data" in options and not options.get("trust_class_numbers"):
    pp, modules, path = options.get("pp", ""), context.pp_modules, context.path
    own = labels.of_source(options["data"], pp, modules, label_key, path)
    labels.check_same(own or training, training, path)


def check_classes(
  options: Mapping[str, Any],
  context: Context,
  prompts: Sequence[str],
  key: str = "prompt",
) -> None:
  path = context.path
  names = labels.read(options["class_names"], f"{path}.class_names")
  label_key = options.get("label_key", "label")
  pp, modules = options.get("pp", ""), context.pp_modules
  if own := labels.of_source(options["data"], pp, modules, label_key, path):
    labels.check_order(names, own, f"{path}.class_names")
  texts = [labels.fill(p, names[:1], f"{path}.{key}")[0] for p in prompts]
  class_tokens(texts, options["pp_text"], context)
  check_numbers(f"{path}.top_k", options.get("top_k", (1, 5)), **COUNT)


def class_tokens(
  texts: Sequence[str], pp_text: str, context: Context
) -> np.ndarray:
  key, sizes = f"{context.path}.pp_text", context.vocab_sizes
  return labels.tokens(texts, pp_text, context.pp_modules, sizes, key=key)


def check_numbers(path: str, values: Any, **limits: Any) -> None:
  if not isinstance(values, list | tuple) or not values:
    raise ConfigError(f"{path}: expected a list of numbers, got {values!r}.")
  for value in values:
    check_number(path, value, **limits)


def tokenizer(spec: str, context: Context) -> tokenizers.Tokenizer:
  try:
    return tokenizers.get(spec)
  except ConfigError as e:
    raise ConfigError(f"{context.path}.tokenizer: {e}") from e
