"""Batches for training and evaluation, as global arrays on the mesh.

The batch of step s is a pure function of the config and s. `order` says which
examples it is made of, an engine makes the rows of it that belong to this
host, and a thread puts them onto the devices a few steps ahead:

  rows of this host -> source, index, epoch -> records -> ops -> device
                       (order.Schedule)        (source) (engine) (Placement)

There is no state between steps, so there is none to save.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from bigtrain import hashing, settings, sharding
from bigtrain.cluster import process
from bigtrain.data.formats import files
from bigtrain.inputs import order
from bigtrain.inputs.cache import CachedSource, available_bytes, readable
from bigtrain.inputs.engine import (
  Batch,
  Engine,
  Part,
  Plan,
  Skipped,
  default_num_threads,
)
from bigtrain.inputs.numpy_engine import NumpyEngine
from bigtrain.inputs.placement import Placement
from bigtrain.inputs.prefetch import Prefetch
from bigtrain.inputs.sources import (
  entries,
  find_source,
  make_source,
  parse_ops,
  whole_number,
)
from bigtrain.pp import registry
from bigtrain.settings import ConfigError, did_you_mean

# More threads than this only contend for the interpreter's lock.
_MAX_NUMPY_THREADS = 2


class TrainInput:
  """Endless batches, reached by their step. Made by `make_train`.

  Attributes:
    num_examples: an epoch: the length of the source, or of all of a mixture.
    batch_size: global.
    spec: {name: ShapeDtypeStruct of the global array}.
    fingerprint: changes with the data, not with how it is preprocessed.
    vocab_sizes: {name: one more than the largest id}, where ops or sources
      say so of a feature.
    fingerprints: {file: what changes with its content} of what ops have read,
      such as tokenizers.
  """

  def __init__(
    self,
    engine: Engine,
    placement: Placement,
    schedule: order.Schedule,
    prefetch: int,
  ):
    self._engine = engine
    self._placement = placement
    self._schedule = schedule
    self._prefetch = prefetch
    self.num_examples = sum(schedule.lengths)
    self.batch_size = placement.batch_size
    self.spec = placement.spec(engine.spec)
    self.fingerprint = files.digest(
      *[part.source.fingerprint() for part in engine.parts]
    )
    self.vocab_sizes: dict[str, int] = {}
    self.fingerprints: dict[str, str] = {}
    for part in engine.parts:
      self.fingerprints |= part.op.fingerprints
      for name, size in _vocab_sizes(part.op, part.source).items():
        self.vocab_sizes[name] = max(size, self.vocab_sizes.get(name, 0))

  @property
  def skipped(self) -> int:
    """Examples of this host that were left out because of errors."""
    return len(self._engine.skipped)

  def order(self, step: int) -> order.Order:
    """What the global batch of a step is made of; steps count from 0."""
    return self._schedule.batch(step, self.batch_size)

  def where(self, source: int, index: int) -> str:
    """File and position of an example, for messages."""
    return self._engine.parts[source].source.where(index)

  def start(self, first_step: int, last_step: int) -> Prefetch:
    """The batches of steps [first_step, last_step), made in the background.

    Returns:
      An iterator of {name: jax.Array}; `close` ends it early.

    Raises:
      DataError: by `next`: an example cannot be made.
    """
    return Prefetch(
      lambda: self._placement.put_all(
        self._engine.batches(first_step, last_step)
      ),
      self._prefetch,
      "train input",
    )


class EvalInput:
  """A fixed set in a fixed order. Made by `make_eval`.

  The last batch is filled up with copies of the last example; `_mask`,
  float32 [B], is 1 for examples and 0 for these.

  Attributes:
    num_examples: without the filling.
    num_batches: the same on every process.
    batch_size: global.
    spec: {name: ShapeDtypeStruct of the global array}, "_mask" included.
    vocab_sizes: as TrainInput has it.
  """

  def __init__(
    self,
    engine: Engine,
    placement: Placement,
    num_examples: int,
    prefetch: int,
    cache: bool,
    path: str,
  ):
    self._engine = engine
    self._placement = placement
    self._prefetch = prefetch
    self.num_examples = num_examples
    self.batch_size = placement.batch_size
    self.num_batches = -(-num_examples // self.batch_size)
    mask = jax.ShapeDtypeStruct((self.batch_size,), np.dtype(np.float32))
    self.spec = {**placement.spec(engine.spec), "_mask": mask}
    (part,) = engine.parts
    self.vocab_sizes = _vocab_sizes(part.op, part.source)
    self._kept: list[Batch] | None = None
    self._cache = cache and self._fits(path)

  def _fits(self, path: str) -> bool:
    row = sum(
      dtype.itemsize * int(np.prod(shape, dtype=np.int64))
      for dtype, shape in self._engine.spec.values()
    )
    size = row * self._engine.num_rows * self.num_batches
    free = available_bytes()
    fits = free is None or size <= free / 2
    logging.log(
      logging.INFO if fits else logging.WARNING,
      "%s: its %d batches take %s of this host's memory%s.",
      path,
      self.num_batches,
      readable(size),
      "" if fits else "; they are made again each time instead (cache=True)",
    )
    return fits

  def where(self, index: int) -> str:
    """File and position of an example, for messages."""
    return self._engine.parts[0].source.where(index)

  def batches(self) -> Prefetch:
    """All batches in order; `close` ends the iterator early."""
    return Prefetch(
      lambda: self._placement.put_all(self._local()),
      self._prefetch,
      "eval input",
    )

  def _local(self) -> Generator[Batch, None, None]:
    if self._kept is not None:
      yield from self._kept
      return
    kept = []
    for i, batch in enumerate(self._engine.batches(0, self.num_batches)):
      rows = i * self.batch_size + self._placement.rows
      batch["_mask"] = (rows < self.num_examples).astype(np.float32)
      if self._cache:
        kept.append(batch)
      yield batch
    if self._cache:
      self._kept = kept


def make_train(
  cfg: settings.Config, *, seed: int, mesh: Mesh, pp_modules: Sequence[str] = ()
) -> TrainInput:
  """The training input that a config's `input` describes.

  Keys of `cfg`:
    data: dict(type=..., ...): a module of bigtrain.data, or a dotted path,
      and the arguments of its Source.
    mixture: in place of `data`: {"name": dict(data=..., weight=..., pp=...)};
      weights are relative, `pp` is the one below unless given.
    pp: preprocessing, such as "decode|resize(224)|keep('image', 'label')".
    batch_size: global.
    shuffle: False keeps the order of the source.
    cache: "raw" keeps the records in memory once they are read.
    skip_errors: how many different examples may be left out, each replaced
      by another, because they are damaged or an op fails on them.
    prefetch: batches on the device ahead of the step.
    num_threads: threads that read and make examples; as many as cores unless
      given, more are better where files are slow to arrive.

  Args:
    cfg: the subtree.
    seed: of the order and of all random preprocessing.
    mesh: what the batches are spread over.
    pp_modules: modules that register further ops.

  Raises:
    ConfigError: a key or value is wrong, or the preprocessed examples cannot
      be batched.
    DataError: the data is empty or damaged.
  """
  batch_size = cfg.batch_size
  sharding.check_batch(batch_size, mesh, f"{cfg.path}.batch_size")
  placement = Placement(mesh, batch_size)
  engine, schedule = train_engine(
    cfg, seed=seed, rows=placement.rows, pp_modules=pp_modules
  )
  prefetch = whole_number(cfg.get("prefetch", 2), f"{cfg.path}.prefetch")
  made = TrainInput(engine, placement, schedule, prefetch)
  # Each host reads its own copy; their batches must be of the same data.
  told = f"{made.num_examples} examples, {made.fingerprint}"
  process.require_equal(f"the data of {cfg.path}", told)
  return made


def train_engine(
  cfg: settings.Config,
  *,
  seed: int,
  rows: np.ndarray,
  pp_modules: Sequence[str] = (),
) -> tuple[Engine, order.Schedule]:
  """What makes the given rows of each global batch, and the order of all.

  Args:
    cfg, seed, pp_modules: as in `make_train`.
    rows: int64 [local rows] of [0, batch_size).
  """
  path, batch_size = cfg.path, cfg.batch_size
  cache = cfg.get("cache", "none")
  if cache not in ("none", "raw"):
    hint = did_you_mean(cache, ("none", "raw"))
    raise ConfigError(f"{path}.cache={cache!r}: unknown.{hint}")
  parts, weights = [], []
  for k, (key, entry) in enumerate(entries(cfg).items()):
    source = make_source(entry["data"], f"{key}.data")
    if cache == "raw":
      source = CachedSource(source, f"{path}.cache")
    ops = parse_ops(entry["pp"], pp_modules, f"{key}.pp")
    op = registry.compose(ops)
    parts.append(Part(key, source, ops, op, hashing.stream(seed, k)))
    weights.append(float(entry["weight"]))
  try:
    schedule = order.Schedule(
      tuple(len(part.source) for part in parts),
      tuple(weights),
      seed=seed,
      shuffle=cfg.get("shuffle", True),
    )
  except ConfigError as e:
    raise type(e)(f"{path}.{e}") from e

  def plan(step: int, start: int, stop: int) -> order.Order:
    return schedule.batch(step, batch_size, rows[start:stop])

  cap = whole_number(cfg.get("skip_errors", 0), f"{path}.skip_errors")
  engine = make_engine(
    parts,
    plan,
    num_rows=len(rows),
    num_threads=cfg.get("num_threads"),
    skipped=Skipped(cap),
    path=path,
  )
  return engine, schedule


def make_eval(
  *,
  data: Mapping[str, Any],
  pp: str,
  batch_size: int,
  mesh: Mesh,
  num_examples: int | None = None,
  cache: bool = False,
  pp_modules: Sequence[str] = (),
  prefetch: int = 2,
  num_threads: int | None = None,
  path: str = "evaluation input",
) -> EvalInput:
  """The input of an evaluation.

  Args:
    data: source, as `input.data` of a config.
    pp: preprocessing. Its random ops draw the same each time.
    batch_size: global.
    mesh: what the batches are spread over.
    num_examples: only so many, from the start.
    cache: keep the finished batches in host memory, if they fit.
    pp_modules: modules that register further ops.
    prefetch: batches on the device ahead.
    num_threads: threads that make examples.
    path: where this is in the config, for messages.

  Raises:
    ConfigError, DataError: as `make_train`.
  """
  sharding.check_batch(batch_size, mesh, f"{path}.batch_size")
  source = make_source(data, f"{path}.data")
  if num_examples is None:
    num_examples = len(source)
  elif not 0 < num_examples <= len(source):
    raise ConfigError(
      f"{path}.num_examples={num_examples!r}: expected 1 to {len(source)}, "
      "which is what the source has."
    )
  ops = parse_ops(pp, pp_modules, f"{path}.pp")
  part = Part(path, source, ops, registry.compose(ops), seed=0)
  placement = Placement(mesh, batch_size)

  def plan(step: int, start: int, stop: int) -> order.Order:
    rows = step * batch_size + placement.rows[start:stop]
    index = np.minimum(rows, num_examples - 1)
    return order.Order(np.zeros(len(index), np.int32), index, 0 * index)

  engine = make_engine(
    [part],
    plan,
    num_rows=len(placement.rows),
    num_threads=num_threads,
    skipped=Skipped(0),
    path=path,
  )
  # Other numbers of batches on other hosts would keep them waiting for ever.
  told = f"{num_examples} examples, {files.digest(source.fingerprint())}"
  process.require_equal(f"the data of {path}", told)
  return EvalInput(engine, placement, num_examples, prefetch, cache, path)


def check(
  *,
  data: Mapping[str, Any],
  pp: str = "",
  pp_modules: Sequence[str] = (),
  vocab_sizes: Mapping[str, int] | None = None,
  path: str,
) -> None:
  """Checks the names in `make_eval`'s arguments; opens no data.

  Raises:
    ConfigError: an unknown source, op, or argument of one of them, or more
      ids than the model has, see `check_vocab_sizes`.
  """
  module, _ = find_source(data, f"{path}.data")
  op = registry.compose(parse_ops(pp, pp_modules, f"{path}.pp"))
  # Some sources know their ids before they are opened.
  check_vocab_sizes(_vocab_sizes(op, module.Source), vocab_sizes or {}, path)


def check_vocab_sizes(
  found: Mapping[str, int], model: Mapping[str, int], path: str
) -> None:
  """Refuses ids that the model does not have, before anything compiles.

  On a device an embedding of an id that is too large is no error: it is NaN,
  or another token's.

  Args:
    found: {feature: one more than the largest id}, of an input.
    model: the same, of what the model takes.
    path: where the input is in the config.

  Raises:
    ConfigError: a tokenizer does not match the model.
  """
  for name, size in found.items():
    if size > model.get(name, size):
      raise ConfigError(
        f"{path}: the ids of {name!r} go up to {size - 1}, but the model's "
        f"vocabulary has {model[name]}: give config.model a vocabulary of at "
        f"least {size}, or take the tokenizer that the model was made for."
      )


def _vocab_sizes(op: registry.Op, source: Any) -> dict[str, int]:
  return {**getattr(source, "vocab_sizes", {}), **op.vocab_sizes}


def make_engine(
  parts: Sequence[Part],
  plan: Plan,
  *,
  num_rows: int,
  num_threads: int | None,
  skipped: Skipped,
  path: str,
) -> Engine:
  """numpy where that is enough, else tf.data; tensorflow only then loads."""
  if num_threads is not None:
    whole_number(num_threads, f"{path}.num_threads", least=1)
  threads = num_threads or default_num_threads()
  if any(p.op.tensorflow or hasattr(p.source, "parse") for p in parts):
    from bigtrain.inputs.tf_engine import TfEngine

    kind: Callable[..., Engine] = TfEngine
  else:
    kind = NumpyEngine
    threads = num_threads or min(threads, _MAX_NUMPY_THREADS)
  return kind(
    parts, plan, num_rows=num_rows, num_threads=threads, skipped=skipped
  )


def tokens_per_example(
  spec: Mapping[str, jax.ShapeDtypeStruct],
) -> int | None:
  """The tokens that a model goes through for one example, padding included.

  The length L of the feature `tokens` [B, L]; where there is none, those of
  `inputs` and `targets` together, if both are ids. What a step counts is the
  same for every step, so lengths given in tokens are exact.

  Returns:
    None if the batch has no such features: captions do not count.
  """
  names = ("tokens",) if "tokens" in spec else ("inputs", "targets")
  found = [spec[name] for name in names if name in spec]
  ids = all(x.ndim == 2 and x.dtype.kind in "iu" for x in found)
  if len(found) < len(names) or not ids:
    return None
  return sum(x.shape[1] for x in found)
