"""Batches for training, as global arrays on the mesh.

The order gives the examples of a batch, an engine makes this host's rows, and a
thread puts them onto the devices a few steps ahead:

  rows of this host -> source, index, epoch -> records -> ops -> device
                       (order.Schedule)        (source) (engine) (Placement)

There is no state between steps, so a checkpoint stores none.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import hashing
from bigtrain.cluster import process
from bigtrain.config import lengths, settings
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.data.formats import files
from bigtrain.inputs import checks, description, order, sources, weights
from bigtrain.inputs.cache import CachedSource
from bigtrain.inputs.engine import Batches, Engine, NumpyEngine, Part, Plan
from bigtrain.inputs.transfer import Placement, Prefetch
from bigtrain.pp import registry
from bigtrain.text import tokenizers

# Beyond this, numpy threads only contend for the interpreter's lock.
_MAX_NUMPY_THREADS = 2


class Input:
  """Base class of the inputs of training and of evaluations.

  `num_examples` are of the set, or of an epoch; `spec` has ShapeDtypeStructs of
  global arrays; `fingerprint` is of the data, without their preprocessing.
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
    self.vocab_sizes: dict[str, int] = {}  # {name: largest id + 1}.
    for part in engine.parts:
      for name, size in checks.sizes(part.op, part.source).items():
        self.vocab_sizes[name] = max(size, self.vocab_sizes.get(name, 0))
    # Hosts may read separate copies, which must hold the same data. If they
    # disagreed on the number of batches, they would wait forever.
    process.require_equal(
      f"the data of {path}", f"{num_examples} examples, {self.fingerprint}"
    )

  def limit_ids(
    self, sizes: Mapping[str, int], negative: Collection[str] = ()
  ) -> None:
    self.engine.limit_ids(sizes, negative, self._path)

  def where(self, source: int, index: int) -> str:
    return self.engine.parts[source].source.where(index)

  def _ahead(self, batches: Callable[[threading.Event], Batches]) -> Prefetch:
    stopping = threading.Event()
    make = lambda: self.placement.put_all(batches(stopping))
    return Prefetch(make, self._prefetch, self._path, stopping)


class TrainInput(Input):
  """Endless batches, addressed by step. Made by `make_train`."""

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
    # The batches that steps draw from: their global arrays, and their shares.
    shares = schedule.by_step.weights if schedule.by_step else (1.0,)
    self.drawn = [
      (placement.spec(spec), share) for spec, share in zip(engine.specs, shares)
    ]
    self.tokens_per_example = tokens_per_example(engine.specs)
    prefix = f"{path}.mixture."
    keys = dict.fromkeys(part.key for part in engine.parts)
    self._names = [k.removeprefix(prefix) for k in keys if k.startswith(prefix)]
    self.fingerprints: dict[str, str] = {}  # Of files that must not change.
    for part in engine.parts:
      self.fingerprints |= part.op.fingerprints
      self.fingerprints |= getattr(part.source, "fingerprints", {})
    self.saved = {  # Fields of a checkpoint's HostState.
      "fingerprints": self.fingerprints,
      "data": description.describe(engine.parts, engine.spec),
    }

  @property
  def skipped(self) -> int:
    return len(self.engine.skipped)

  @property
  def unlimited(self) -> list[str]:
    """Features with an integer per example that `limit_ids` does not limit."""
    return [
      name
      for name, (dtype, shape) in self.engine.spec.items()
      if dtype.kind in "iu" and not shape and name not in self.engine.id_limits
    ]

  def about(self) -> dict[str, Any]:
    return {"sources_at": self.sources_at if self._names else None}

  def sources_at(self, step: int) -> dict[str, float]:
    """Returns "examples_seen/<name>" and "epoch/<name>" after some batches."""
    counts = self._schedule.counts(step * self.batch_size).tolist()
    seen = {f"examples_seen/{k}": n for k, n in zip(self._names, counts)}
    epochs = zip(self._names, counts, self._schedule.lengths)
    return seen | {f"epoch/{name}": n / size for name, n, size in epochs}

  def order(self, step: int) -> order.Order:
    return self._schedule.batch(step, self.batch_size)

  def start(self, first_step: int, last_step: int) -> Prefetch:
    """Makes batches of steps [first_step, last_step); `close` ends it early."""
    make = self.engine.batches
    return self._ahead(lambda stopping: make(first_step, last_step, stopping))


def make_train(
  cfg: settings.Config,
  *,
  seed: int,
  mesh: Mesh,
  pp_modules: Sequence[str] = (),
  run: settings.Config | None = None,
) -> TrainInput:
  """Makes the training input from config.input, whose keys docs/config.md has.

  `run` is the whole config, for weights that change at points in percent.
  """
  batch_size = cfg.batch_size
  sharding.check_batch(batch_size, mesh, f"{cfg.path}.batch_size")
  placement = Placement(mesh, batch_size)
  engine, schedule = train_engine(
    cfg, seed=seed, rows=placement.rows, pp_modules=pp_modules, run=run
  )
  if run is not None:
    _check_tokenizer(engine.parts, run)
  prefetch = settings.whole_number(cfg, "prefetch", 2, least=0)
  return TrainInput(engine, placement, schedule, prefetch, cfg.path)


def _check_tokenizer(parts: Sequence[Part], run: settings.Config) -> None:
  init = run.get("model_init")
  folder = init.get("path") if isinstance(init, settings.Config) else init
  if not tokenizers.is_folder(folder):
    return
  own = tokenizers.get(folder)
  for part in parts:
    of_source = getattr(part.source, "tokenizer", None)
    name, fingerprint = registry.tokenizer(part.ops) or of_source or ("", None)
    if fingerprint in (None, own.fingerprint()):
      continue
    size = tokenizers.get(name).vocab_size
    raise ConfigError(
      f"{part.key}: its tokenizer {name!r} ({size} ids) is not that of "
      f"config.model_init={folder!r} ({own.vocab_size} ids), whose ids the "
      "model knows. Use the folder's, or put yours into the folder."
    )


def train_engine(
  cfg: settings.Config,
  *,
  seed: int,
  rows: np.ndarray,
  pp_modules: Sequence[str] = (),
  run: settings.Config | None = None,
) -> tuple[Engine, order.Schedule]:
  path, batch_size = cfg.path, cfg.batch_size
  cache = cfg.get("cache", "none")
  check_choice(f"{path}.cache", cache, ("none", "raw"))
  parts, given = [], []
  entries = sources.entries(cfg)
  drawn = sources.draws(cfg, entries)
  for k, (key, entry) in enumerate(entries.items()):
    source = sources.make_source(entry["data"], f"{key}.data")
    if cache == "raw":
      source = CachedSource(source, f"{path}.cache")
    for i, (values, _) in enumerate(drawn):
      spec = sources.fill(entry["pp"], values)
      ops = sources.parse_ops(spec, pp_modules, f"{key}.pp")
      op = registry.compose(ops)
      parts.append(Part(key, source, ops, op, hashing.stream(seed, k), i))
    given.append((entry["weight"], f"{key}.weight"))

  def plan(step: int, start: int, stop: int) -> order.Order:
    return schedule.batch(step, batch_size, rows[start:stop])

  skip_errors = settings.whole_number(cfg, "skip_errors", 0, least=0)
  num_threads = cfg.get("num_threads")
  engine = make_engine(parts, plan, len(rows), num_threads, path, skip_errors)

  # Only now the tokens of an example are known, a unit of lengths.
  num_examples = tuple(len(part.source) for part in parts[:: len(drawn)])
  total, tokens = sum(num_examples), tokens_per_example(engine.specs)
  units = lengths.Units(batch_size, total, tokens)
  if run is not None:
    units = lengths.read(run, batch_size, total, tokens).units
  of_sources = [weights.read(weight, units, key) for weight, key in given]
  stages = weights.stages(of_sources, f"{path}.mixture")
  repeats = settings.whole_number(cfg, "repeats", 1, least=1)
  if batch_size % repeats:
    raise ConfigError(
      f"{path}.repeats={repeats}: expected a divisor of {path}.batch_size="
      f"{batch_size}."
    )
  shares, shuffle = tuple(x for _, x in drawn), cfg.get("shuffle", True)
  ones, drawn_seed = (1,) * len(drawn), hashing.stream(seed, -1)
  try:
    schedule = order.Schedule(
      num_examples,
      stages[0][1],
      seed=seed,
      shuffle=shuffle,
      changes=tuple(
        (step * batch_size // repeats, w) for step, w in stages[1:]
      ),
      repeats=repeats,
      by_step=order.Schedule(ones, shares, drawn_seed) if shares[1:] else None,
    )
  except ConfigError as e:
    raise type(e)(f"{path}.{e}") from e
  return engine, schedule


def make_engine(
  parts: Sequence[Part],
  plan: Plan,
  num_rows: int,
  num_threads: int | None,
  path: str,
  skip_errors: int = 0,
) -> Engine:
  if num_threads is not None:
    key = f"{path}.num_threads"
    check_number(key, num_threads, least=1, whole=True)
  cores = process.num_cores()
  if any(p.op.tensorflow or hasattr(p.source, "parse") for p in parts):
    from bigtrain.inputs.tf_engine import TfEngine

    return TfEngine(parts, plan, num_rows, num_threads or cores, skip_errors)
  threads = num_threads or min(cores, _MAX_NUMPY_THREADS)
  return NumpyEngine(parts, plan, num_rows, threads, skip_errors)


def tokens_per_example(specs: Sequence[checks.Spec]) -> int | None:
  """Returns the number of tokens per example, padding included, if it has one.

  Captions do not count: only `tokens` [L], or else `inputs` and `targets`.
  """
  numbers = set()
  for spec in specs:
    names = ("tokens",) if "tokens" in spec else ("inputs", "targets")
    features = [spec[name] for name in names if name in spec]
    are_ids = all(len(x) == 1 and dtype.kind in "iu" for dtype, x in features)
    if len(features) < len(names) or not are_ids:
      return None
    numbers.add(sum(length for _, (length,) in features))
  return numbers.pop() if len(numbers) == 1 else None
