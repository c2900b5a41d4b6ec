"""Makes the batches for training, as global arrays on the mesh.

How a batch is made, for the rows that are on this host's devices:

1. `transfer.Placement` says which rows belong to this host.
2. `order.Schedule` gives the example of each row: source, index, epoch.
3. The source, a module of data/, reads these examples.
4. An `engine.Engine` runs the ops of config.input.pp on them.
5. `transfer.Prefetch`, a thread, puts the batch onto the devices a few steps
   before it is needed.

Nothing is kept from one step to the next, so checkpoints contain no state of
the input.
"""

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import hashing
from bigtrain.cluster import process
from bigtrain.config import lengths, settings
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.data.formats import files
from bigtrain.inputs import (
  checks,
  description,
  notices,
  order,
  sources,
  vocabulary,
  weights,
)
from bigtrain.inputs.cache import CachedSource
from bigtrain.inputs.engine import Batches, Engine, NumpyEngine, Part, Plan
from bigtrain.inputs.transfer import JoinedBatches, Placement, Prefetch
from bigtrain.pp import registry
from bigtrain.text import tokenizers

# More threads with numpy would only wait for the interpreter's lock.
_MAX_NUMPY_THREADS = 2


class Input:
  """Base class of the inputs of training and of evaluations.

  Attributes:
    num_examples: examples of an epoch, or of the evaluation set.
    spec: {feature: ShapeDtypeStruct of the global array}.
    fingerprint: digest of the data, regardless of their preprocessing.
    vocab_sizes: {feature: largest id + 1}, where known.
  """

  def __init__(
    self,
    engine: Engine,
    placement: Placement,
    num_examples: int,
    prefetch: int,
    path: str,
  ):
    self.engine, self.placement = engine, placement
    self._prefetch, self._path = prefetch, path
    self.num_examples, self.batch_size = num_examples, placement.batch_size
    self.spec = placement.spec(engine.spec)
    self.fingerprint = files.digest(
      *[part.source.fingerprint() for part in engine.parts]
    )
    self.vocab_sizes: dict[str, int] = {}
    for part in engine.parts:
      for name, size in checks.sizes(part.op, part.source).items():
        self.vocab_sizes[name] = max(size, self.vocab_sizes.get(name, 0))
    notices.log_turned(engine.parts, path)
    # Hosts may read separate copies, which must hold the same data. If they
    # disagreed on the number of batches, they would wait forever.
    process.require_equal(
      f"the data of {path}", f"{num_examples} examples, {self.fingerprint}"
    )

  def limit_ids(
    self, sizes: Mapping[str, int], negative: Collection[str] = ()
  ) -> None:
    """Refuses ids that the model does not know; see `Engine.limit_ids`."""
    self.engine.limit_ids(sizes, negative, self._path)

  def where(self, source: int, index: int) -> str:
    return self.engine.parts[source].source.where(index)

  def _ahead(self, batches: Callable[[threading.Event], Batches]) -> Prefetch:
    """Makes batches in a thread and puts them onto the devices."""
    stopping = threading.Event()

    def make() -> Iterator[dict[str, jax.Array]]:
      return self.placement.put_all(batches(stopping))

    return Prefetch(make, self._prefetch, self._path, stopping)


class TrainInput(Input):
  """The batch of any step of training. Made by `make_train`.

  Attributes:
    drawn: the kinds of batches that steps may have, and the share of the steps
      that have each: [(spec as in `Input`, share)].
    tokens_per_example: padding included; None without tokens.
    tokenizers: (name, fingerprint) of the tokenizers of sources and ops.
    fingerprints: {path: digest} of files that must not change before a resume.
    of_tasks: inputs of single tasks, by the prefix of their features.
    saved: fields of `HostState` in checkpoints.
  """

  def __init__(
    self,
    engine: Engine,
    placement: Placement,
    schedule: order.Schedule,
    prefetch: int,
    path: str,
  ):
    super().__init__(engine, placement, sum(schedule.lengths), prefetch, path)
    self._schedule = schedule
    self.of_tasks: dict[str, TaskInput] = {}
    shares = schedule.by_step.weights if schedule.by_step else (1.0,)
    self.drawn = [
      (placement.spec(spec), share) for spec, share in zip(engine.specs, shares)
    ]
    self.tokens_per_example = tokens_per_example(engine.specs)
    # Names of the sources of a mixture; without a mixture, none.
    prefix = f"{path}.mixture."
    keys = dict.fromkeys(part.key for part in engine.parts)
    self._names = [
      key.removeprefix(prefix) for key in keys if key.startswith(prefix)
    ]
    self.tokenizers = [*vocabulary.used_by(engine.parts).values()]
    self.fingerprints: dict[str, str] = {}
    for part in engine.parts:
      self.fingerprints |= part.op.fingerprints
      self.fingerprints |= getattr(part.source, "fingerprints", {})
    self.saved = {
      "fingerprints": self.fingerprints,
      "data": description.describe(engine.parts, engine.spec),
    }

  def add(self, prefix: str, task_input: "TaskInput") -> None:
    """Adds the input of a task, whose features get the prefix in the batch."""
    self.of_tasks[prefix] = task_input
    own = task_input.input
    named = {f"{prefix}{name}": x for name, x in own.spec.items()}
    self.spec = {**self.spec, **named}
    self.drawn = [({**spec, **named}, share) for spec, share in self.drawn]
    self.fingerprints |= own.fingerprints
    self.tokenizers += own.tokenizers
    self.vocab_sizes |= {f"{prefix}{n}": x for n, x in own.vocab_sizes.items()}

  def limit_ids(
    self, sizes: Mapping[str, int], negative: Collection[str] = ()
  ) -> None:
    for prefix, task in self.of_tasks.items():
      own = {
        name.removeprefix(prefix): size
        for name, size in sizes.items()
        if name.startswith(prefix)
      }
      task.input.limit_ids(own, negative)
    shared = {name: n for name, n in sizes.items() if "/" not in name}
    super().limit_ids(shared, negative)

  def spec_at(
    self, step: int, spec: Mapping[str, Any] | None = None
  ) -> dict[str, Any]:
    """The features of `spec` that the batch of a step has."""
    spec = self.spec if spec is None else spec
    later = [p for p, x in self.of_tasks.items() if x.first_step > step]
    return {
      name: x
      for name, x in spec.items()
      if not any(name.startswith(prefix) for prefix in later)
    }

  @property
  def skipped(self) -> int:
    """Number of unusable examples that were replaced by others."""
    others = [len(x.input.engine.skipped) for x in self.of_tasks.values()]
    return len(self.engine.skipped) + sum(others)

  @property
  def unlimited(self) -> list[str]:
    """Features with one integer per example that `limit_ids` did not name."""
    return [
      name
      for name, (dtype, shape) in self.engine.spec.items()
      if dtype.kind in "iu" and not shape and name not in self.engine.id_limits
    ]

  def about(self) -> dict[str, Any]:
    """Returns what adds the state of a mixture to each log entry."""
    return {"sources_at": self.sources_at if self._names else None}

  def sources_at(self, step: int) -> dict[str, float]:
    """Returns "examples_seen/<name>", "epoch/<name>" after `step` batches."""
    counts = self._schedule.counts(step * self.batch_size).tolist()
    seen, epochs = {}, {}
    for name, count, size in zip(self._names, counts, self._schedule.lengths):
      seen[f"examples_seen/{name}"] = count
      epochs[f"epoch/{name}"] = count / size
    return seen | epochs

  def order(self, step: int) -> order.Order:
    return self._schedule.batch(step, self.batch_size)

  def start(
    self, first_step: int, last_step: int, ahead: int = 0
  ) -> Prefetch | JoinedBatches:
    """Yields the batches [first_step, last_step), until `close`.

    `ahead` is the number of batches that rollbacks have skipped: step s uses
    batch s + ahead.
    """

    def batches(stopping: threading.Event) -> Batches:
      return self.engine.batches(first_step, last_step, stopping)

    own = self._ahead(batches)
    if not self.of_tasks:
      return own
    others = {}
    for prefix, task in self.of_tasks.items():
      first = max(first_step, task.first_step + ahead)
      others[prefix] = first, task.input.start(first, max(first, last_step))
    return JoinedBatches(own, others, first_step)


class TaskInput(NamedTuple):
  """An input that only one task uses, and that begins when the task does."""

  input: TrainInput
  first_step: int


def from_config(config: settings.Config, seed: int, mesh: Mesh) -> TrainInput:
  """The input of a run: config.input, and the inputs of tasks that have one.

  Lengths in epochs and examples count the examples of config.input.
  """
  pp_modules = config.get("pp_modules", ())
  options: dict[str, Any] = dict(mesh=mesh, pp_modules=pp_modules, run=config)
  result = make_train(config.input, seed=seed, **options)
  tasks = config.get("task")
  if not isinstance(tasks, settings.Config):
    return result
  for name in tasks:
    entry = tasks[name]
    if not isinstance(entry, settings.Config) or "input" not in entry:
      continue
    units = lengths.read(
      config, result.batch_size, result.num_examples, result.tokens_per_example
    ).units
    first_step = lengths.steps(entry, "from", units) or 0
    # Each input has its own order of examples and its own random numbers.
    own_seed = hashing.stream(seed, zlib.crc32(name.encode()))
    own = make_train(entry.input, seed=own_seed, **options)
    result.add(f"{name}/", TaskInput(own, first_step))
  return result


def make_train(
  cfg: settings.Config,
  *,
  seed: int,
  mesh: Mesh,
  pp_modules: Sequence[str] = (),
  run: settings.Config | None = None,
) -> TrainInput:
  """Makes the training input from config.input; docs/config.md has the keys.

  Args:
    run: the whole config. It gives the length of the run, for weights that
      change at percentages of it, and the published model whose tokenizer must
      match.
  """
  batch_size = cfg.batch_size
  sharding.check_batch(batch_size, mesh, f"{cfg.path}.batch_size")
  placement = Placement(mesh, batch_size)
  engine, schedule = train_engine(
    cfg, seed=seed, rows=placement.rows, pp_modules=pp_modules, run=run
  )
  if run is not None:
    init = run.get("model_init")
    folder = init.get("path") if isinstance(init, settings.Config) else init
    if tokenizers.is_folder(folder):
      vocabulary.check(vocabulary.used_by(engine.parts), folder)
  prefetch = settings.whole_number(cfg, "prefetch", 2, least=0)
  return TrainInput(engine, placement, schedule, prefetch, cfg.path)


def train_engine(
  cfg: settings.Config,
  *,
  seed: int,
  rows: np.ndarray,
  pp_modules: Sequence[str] = (),
  run: settings.Config | None = None,
) -> tuple[Engine, order.Schedule]:
  """Makes the engine for some rows of each batch, and the order of examples."""
  path, batch_size = cfg.path, cfg.batch_size
  entries = sources.entries(cfg)
  drawn = sources.draws(cfg, entries)  # Values that steps draw, with shares.
  parts = _make_parts(cfg, entries, drawn, seed, pp_modules)

  def plan(step: int, start: int, stop: int) -> order.Order:
    return schedule.batch(step, batch_size, rows[start:stop])

  skip_errors = settings.whole_number(cfg, "skip_errors", 0, least=0)
  num_threads = cfg.get("num_threads")
  engine = make_engine(parts, plan, len(rows), num_threads, path, skip_errors)

  # The weights may change at lengths in tokens. The number of tokens per
  # example is known from here on, because the engine has made an example.
  num_examples = tuple(len(part.source) for part in parts[:: len(drawn)])
  total, tokens = sum(num_examples), tokens_per_example(engine.specs)
  units = lengths.Units(batch_size, total, tokens)
  if run is not None:
    units = lengths.read(run, batch_size, total, tokens).units
  source_weights = [
    weights.read(entry["weight"], units, f"{key}.weight")
    for key, entry in entries.items()
  ]
  stages = weights.stages(source_weights, f"{path}.mixture")
  repeats = settings.whole_number(cfg, "repeats", 1, least=1)
  if batch_size % repeats:
    raise ConfigError(
      f"{path}.repeats={repeats}: expected a divisor of {path}.batch_size="
      f"{batch_size}."
    )
  by_step = None
  if len(drawn) > 1:
    # A mixture of "sources" with one example each: only the source counts.
    by_step = order.Schedule(
      lengths=(1,) * len(drawn),
      weights=tuple(share for _, share in drawn),
      seed=hashing.stream(seed, -1),
    )
  shuffle = cfg.get("shuffle", True)
  (_, first_weights), *changes = stages
  try:
    schedule = order.Schedule(
      num_examples,
      first_weights,
      seed=seed,
      shuffle=shuffle,
      changes=tuple(
        (step * batch_size // repeats, weights_from_step)
        for step, weights_from_step in changes
      ),
      repeats=repeats,
      by_step=by_step,
    )
  except ConfigError as e:
    raise type(e)(f"{path}.{e}") from e
  return engine, schedule


def _make_parts(
  cfg: settings.Config,
  entries: Mapping[str, Mapping[str, Any]],
  drawn: Sequence[tuple[dict[str, Any], float]],
  seed: int,
  pp_modules: Sequence[str],
) -> list[Part]:
  """Opens each source, with the ops for every value that steps may draw."""
  cache = cfg.get("cache", "none")
  check_choice(f"{cfg.path}.cache", cache, ("none", "raw"))
  parts = []
  for k, (key, entry) in enumerate(entries.items()):
    source = sources.make_source(entry["data"], f"{key}.data")
    if cache == "raw":
      source = CachedSource(source, f"{cfg.path}.cache")
    for i, (values, _) in enumerate(drawn):
      spec = sources.fill(entry["pp"], values)
      ops = sources.parse_ops(spec, pp_modules, f"{key}.pp")
      part = Part(
        key=key,
        source=source,
        ops=ops,
        op=registry.compose(ops),
        seed=hashing.stream(seed, k),
        drawn=i,
      )
      parts.append(part)
  return parts


def make_engine(
  parts: Sequence[Part],
  plan: Plan,
  num_rows: int,
  num_threads: int | None,
  path: str,
  skip_errors: int = 0,
) -> Engine:
  """Makes the engine that can run the ops of all parts.

  Args:
    num_rows: rows of this host in each batch.
    path: location of the input in the config.
    skip_errors: number of unusable examples to replace by others.
  """
  if num_threads is not None:
    key = f"{path}.num_threads"
    check_number(key, num_threads, least=1, whole=True)
  cores = process.num_cores()
  if any(p.op.tensorflow or hasattr(p.source, "parse") for p in parts):
    # Imported here, because tensorflow takes seconds and is often not needed.
    from bigtrain.inputs.tf_engine import TfEngine

    return TfEngine(parts, plan, num_rows, num_threads or cores, skip_errors)
  threads = num_threads or min(cores, _MAX_NUMPY_THREADS)
  return NumpyEngine(parts, plan, num_rows, threads, skip_errors)


def tokens_per_example(specs: Sequence[checks.Spec]) -> int | None:
  """Returns the number of tokens of an example, padding included.

  These are the `tokens` [L], or else the `inputs` and `targets`; captions of
  pictures do not count. Returns None if examples have no tokens, or differ in
  their number.
  """
  numbers = set()
  for spec in specs:
    names = ("tokens",) if "tokens" in spec else ("inputs", "targets")
    number = 0
    for name in names:
      dtype, shape = spec.get(name, (None, ()))
      if dtype is None or dtype.kind not in "iu" or len(shape) != 1:
        return None
      number += shape[0]
    numbers.add(number)
  return numbers.pop() if len(numbers) == 1 else None
