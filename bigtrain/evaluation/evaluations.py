"""Evaluators from the config: checked at the start, built when first due.

An evaluator is a module in this folder, or a user's own by dotted path, with

  class Evaluator:
    def __init__(self, predict_fn, context, **options): ...
    def run(self, variables, step) -> dict of metric name -> float

and, if it likes, a function check(options, context, path) that raises
ConfigError for options which it can refuse without opening the data: above all
a file that is not there must not end a run when hours have passed.

`predict_fn` is one of the task's predict functions; the evaluator knows
neither task nor model. `context` says where it runs.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from bigtrain import lengths, parts, settings, sharding
from bigtrain.inputs import pipeline
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError

# What `from_config` reads of an entry; the rest is the evaluator's.
_KEYS = ("enabled", "log_steps", "pred", "pred_kw", "type", "weights")


class Context(NamedTuple):
  """What an evaluator may know of the run.

  Attributes:
    name: the evaluation's name in the config, the prefix of its metrics.
    workdir: folder of the run; "" if there is none.
    mesh: the device mesh.
    batch_size: of training, the default of evaluations.
    pp_modules: dotted names of the user's preprocessing modules.
    progress: called with (batches done, batches in all); raises to stop.
    vocab_sizes: {feature of a batch: ids that the model has for it}.
    variables: jax.ShapeDtypeStructs of what `run` will get, with shardings;
      None if that is not known.
    compile: (name, fn, *specs, **options of jax.jit) -> fn, compiled.
  """

  name: str
  workdir: str
  mesh: Mesh
  batch_size: int
  pp_modules: Sequence[str]
  progress: Callable[[int, int], None]
  vocab_sizes: Mapping[str, int] = {}
  variables: Any = None
  compile: Callable[..., Any] | None = None


class Evaluator(Protocol):
  """What the modules' `Evaluator` classes implement."""

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Evaluates variables of `step`; the same on every process."""


class Evaluation(NamedTuple):
  """One entry of config.evals.

  Attributes:
    name: its key there.
    log_steps: it is due at multiples of this and at the last step.
    weights: the part of the state it evaluates: "params" or "ema".
    build: makes the evaluator: loads data and compiles, in any thread; it
      does nothing that all processes would have to do together.
    at_start: whether it is due at step 0.
  """

  name: str
  log_steps: int
  weights: str
  build: Callable[[], Evaluator]
  at_start: bool = False

  def owns(self, metric: str) -> bool:
    """Whether a row's metric is one of its results."""
    return metric.startswith(f"{self.name}/")

  def due(self, step: int, total_steps: int) -> bool:
    """Whether it runs after `step` steps of training."""
    if step == 0:
      return self.at_start
    return step == total_steps or step % self.log_steps == 0

  def due_later(self, step: int, last_step: int, total_steps: int) -> bool:
    """Whether it is due at `step` or after it, but not after `last_step`."""
    behind = max(step - 1, 0) // self.log_steps
    return last_step == total_steps or last_step // self.log_steps > behind


def from_config(
  config: settings.Config,
  predict_fns: Mapping[str, Callable[..., Any]],
  units: lengths.Units,
  context: Context,
  weights: Mapping[str, Any],
) -> list[Evaluation]:
  """Checks every entry of config.evals and returns how to build it.

  Args:
    config: the whole config; `evals` maps names to dicts with `type`, `pred`,
      a length `log_*`, optionally `pred_kw` (options of the predict function)
      and `weights`, and the evaluator's own options.
    predict_fns: the task's predict functions by name.
    units: for the lengths.
    context: that of the run; the name is filled in for each.
    weights: {part of the state that can be evaluated: specs of the model's
      variables with it}.

  Raises:
    ConfigError: unknown module, predict function or option, or no length.
  """
  evaluations = []
  at_start = config.get("eval_at_start", False)
  for name in config.get("evals", {}):
    options = config.evals.kwargs(name)
    path = f"config.evals.{name}"
    # Tolerated, so that one line switches an evaluation off.
    if not options.pop("enabled", True):
      continue
    required = settings.Config(options, path)
    kind, pred = required["type"], required["pred"]
    module = parts.find_module("evaluators", kind, f"{path}.type")
    del options["type"], options["pred"]
    if pred not in predict_fns:
      hint = settings.did_you_mean(pred, predict_fns)
      raise ConfigError(
        f"{path}.pred: the task has no predict function {pred!r}.{hint}"
      )
    pred_kw = options.pop("pred_kw", {})
    settings.check_kwargs(
      predict_fns[pred], pred_kw, f"{path}.pred_kw", ("variables", "batch")
    )
    log_steps = lengths.steps(options, "log", units, path=path)
    part = options.pop("weights", "params")
    if part not in weights:
      hint = settings.did_you_mean(part, weights)
      raise ConfigError(f"{path}.weights: the state has no {part!r}.{hint}")
    settings.check_kwargs(
      module.Evaluator,
      options,
      path,
      given=("predict_fn", "context"),
      others=_KEYS,
    )
    of_entry = context._replace(name=name, variables=weights[part])
    if hasattr(module, "check"):
      module.check(options, of_entry, path)
    _check_input(options, context, path)
    build = functools.partial(
      module.Evaluator,
      functools.partial(predict_fns[pred], **pred_kw),
      of_entry,
      **options,
    )
    evaluations.append(
      Evaluation(
        name, log_steps or units.total_steps or 1, part, build, at_start
      )
    )
  return evaluations


def _check_input(
  options: Mapping[str, Any], context: Context, path: str
) -> None:
  """Checks what evaluators hand on to `Batches`, without opening the data."""
  if "data" in options:
    _check_path(options["data"], f"{path}.data.path")
    pipeline.check(
      data=options["data"],
      pp=options.get("pp", ""),
      pp_modules=context.pp_modules,
      vocab_sizes=context.vocab_sizes,
      path=path,
    )
  if options.get("batch_size"):
    sharding.check_batch(
      options["batch_size"], context.mesh, f"{path}.batch_size"
    )


def _check_path(data: Any, key: str) -> None:
  """Tells at the start, and not when an evaluation is due, what is missing."""
  path = data.get("path") if isinstance(data, Mapping) else None
  if not isinstance(path, str) or set(path) & set("*?[{") or ":/" in path:
    return  # A pattern, or not of this machine: the source will see.
  if not os.path.exists(os.path.expanduser(path)):
    raise ConfigError(f"{key}: {path}: no such file or directory.")


def tokenizer(spec: str, context: Context) -> tokenizers.Tokenizer:
  """The tokenizer at an entry's key `tokenizer`.

  Raises:
    ConfigError: there is no such file, or it is none.
  """
  try:
    return tokenizers.get(spec)
  except ConfigError as e:
    raise ConfigError(f"config.evals.{context.name}.tokenizer: {e}") from e


class Batches:
  """A fixed evaluation set and a function over its batches, compiled here.

  Args:
    fn: (variables, batch) -> tree of arrays; the result is replicated.
    context: as evaluators get it.
    data: source, as in config.input.data.
    pp: preprocessing string.
    batch_size: that of training unless given.
    num_examples: only so many from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    fn: Callable[[Any, Any], Any],
    context: Context,
    *,
    data: Mapping[str, Any],
    pp: str,
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    self._context = context
    self.input = pipeline.make_eval(
      data=dict(data),
      pp=pp,
      batch_size=batch_size or context.batch_size,
      mesh=context.mesh,
      num_examples=num_examples,
      cache=cache,
      pp_modules=context.pp_modules,
      path=f"config.evals.{context.name}",
    )
    pipeline.check_vocab_sizes(
      self.input.vocab_sizes,
      context.vocab_sizes,
      f"config.evals.{context.name}",
    )
    replicated = sharding.replicated(context.mesh)
    if context.compile is None or context.variables is None:
      self._fn = jax.jit(fn, out_shardings=replicated)
    else:
      self._fn = context.compile(
        context.name,
        fn,
        context.variables,
        sharding.batch_spec(self.input.spec, context.mesh),
        out_shardings=replicated,
      )

  def map(self, variables: Any) -> list[Any]:
    """The function's result for each batch, fetched, in order."""
    results = []
    for i, batch in enumerate(self.input.batches()):
      results.append(self._fn(variables, batch))
      # A few in flight keep the device busy; all of them could fill it.
      if i >= 4:
        results[i - 4] = jax.device_get(results[i - 4])
      self._context.progress(i + 1, self.input.num_batches)
    return jax.device_get(results)
