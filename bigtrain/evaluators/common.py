"""Evaluators from the config: checked at the start, built when first due.

An evaluator is a module in this folder, or a user's own by dotted path, with

  class Evaluator:
    def __init__(self, predict_fn, context, **options): ...
    def run(self, variables, step) -> dict of metric name -> float

`predict_fn` is one of the task's predict functions; the evaluator knows
neither task nor model. `context` says where it runs.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from bigtrain import input_pipeline, settings, sharding
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
  """

  name: str
  workdir: str
  mesh: Mesh
  batch_size: int
  pp_modules: Sequence[str]
  progress: Callable[[int, int], None]


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
    build: makes the evaluator (loads data, compiles later).
  """

  name: str
  log_steps: int
  weights: str
  build: Callable[[], Evaluator]

  def owns(self, metric: str) -> bool:
    """Whether a row's metric is one of its results."""
    return metric.startswith(f"{self.name}/")

  def due(self, step: int, total_steps: int) -> bool:
    """Whether it runs after `step` steps of training."""
    return step == total_steps or (step > 0 and step % self.log_steps == 0)


def from_config(
  config: settings.Config,
  predict_fns: Mapping[str, Callable[..., Any]],
  units: settings.Units,
  context: Context,
  weights: Sequence[str],
) -> list[Evaluation]:
  """Checks every entry of config.evals and returns how to build it.

  Args:
    config: the whole config; `evals` maps names to dicts with `type`, `pred`,
      a length `log_*`, optionally `pred_kw` (options of the predict function)
      and `weights`, and the evaluator's own options.
    predict_fns: the task's predict functions by name.
    units: for the lengths.
    context: that of the run; the name is filled in for each.
    weights: the parts of the state that can be evaluated.

  Raises:
    ConfigError: unknown module, predict function or option, or no length.
  """
  evaluations = []
  for name in config.get("evals", {}):
    options = config.evals.kwargs(name)
    path = f"config.evals.{name}"
    # Tolerated, so that one line switches an evaluation off.
    if not options.pop("enabled", True):
      continue
    required = settings.Config(options, path)
    kind, pred = required["type"], required["pred"]
    module = settings.find_module("evaluators", kind, f"{path}.type")
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
    log_steps = settings.steps(options, "log", units, path=path)
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
    _check_input(options, context, path)
    build = functools.partial(
      module.Evaluator,
      functools.partial(predict_fns[pred], **pred_kw),
      context._replace(name=name),
      **options,
    )
    evaluations.append(
      Evaluation(name, log_steps or units.total_steps or 1, part, build)
    )
  return evaluations


def _check_input(
  options: Mapping[str, Any], context: Context, path: str
) -> None:
  """Checks what evaluators hand on to `Batches`, without opening the data."""
  if "data" in options:
    input_pipeline.check(
      data=options["data"],
      pp=options.get("pp", ""),
      pp_modules=context.pp_modules,
      path=path,
    )
  if options.get("batch_size"):
    sharding.check_batch(
      options["batch_size"], context.mesh, f"{path}.batch_size"
    )


class Batches:
  """A fixed evaluation set and a compiled function over its batches.

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
    self.input = input_pipeline.make_eval(
      data=dict(data),
      pp=pp,
      batch_size=batch_size or context.batch_size,
      mesh=context.mesh,
      num_examples=num_examples,
      cache=cache,
      pp_modules=context.pp_modules,
      path=f"config.evals.{context.name}",
    )
    self._fn = jax.jit(fn, out_shardings=sharding.replicated(context.mesh))

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
