"""Chooses mesh, rounds, microbatches and remat for a number of devices.

Every mesh that divides the devices, the batch and the model is estimated by
formula: the traffic as in estimate.py, memory and FLOPs as below. The best five
are then compiled, as far as the time allows; each program also corrects the
temporary memory and the FLOPs of the candidates that are not compiled.

  state       (params + opt) / (fsdp x tensor), and the gradients in float32
  kept        bytes that the backward pass needs of each layer
  at work     all results of one layer, and its gathered weights
  FLOPs       the model's, and a third more if each layer is repeated
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.tools.plan import estimate, meshes
from bigtrain.tools.plan.hardware import Hardware
from bigtrain.tools.plan.program import Sizes

BEST = 5

# Executed FLOPs over the model's, and bytes kept of a layer over its products'
# bytes.
POLICIES = {
  "none": (1.0, 2.5),
  "dots_with_no_batch_dims_saveable": (1.05, 1.0),
  "nothing_saveable": (4 / 3, 0.0),
}

# A device needs this number of tokens of an example for `sequence` to be
# considered, and an axis within layers has at most this size.
_LEAST_TOKENS = 1024
_MOST_WITHIN = 16
_MOST_ROUNDS = 4  # Of a pipeline: more idle little less, and send more.

# Logits of a chunk in float32, with their gradients: losses/linear_xent.py.
_LOGITS_BYTES = 3 * 4 * 2**26


class Candidate(NamedTuple):
  """A way to run a config; without a remat policy if the model has none."""

  mesh: tuple[tuple[str, int], ...]
  remat_policy: str | None
  pipeline_rounds: int = 1

  @property
  def sizes(self) -> dict[str, int]:
    return dict(self.mesh)

  @property
  def axes(self) -> tuple[int, ...]:
    return tuple(self.sizes[axis] for axis in sharding.AXES)

  def changes(self, config: Mapping[str, Any]) -> list[str]:
    changes = meshes.changes(config, self.sizes)
    if self.sizes["pipeline"] > 1:
      changes.append(f"mesh.pipeline_rounds={self.pipeline_rounds}")
    if self.remat_policy is not None:
      changes.append(f"model.remat_policy={self.remat_policy}")
    return changes

  def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
    rounds = {"pipeline_rounds": self.pipeline_rounds}
    config = {**config, "mesh": {**config.get("mesh", {}), **rounds}}
    if self.remat_policy is None:
      return config
    model = {**config.get("model", {}), "remat_policy": self.remat_policy}
    return {**config, "model": model}


class Choice(NamedTuple):
  """Rows of the best meshes, with "reasons"; the smallest ones if none fits."""

  best: list[dict[str, Any]]
  too_large: list[dict[str, Any]]  # Compiled candidates that do not fit.
  out_of_time: bool  # Some of the best are by formula for want of time.


class Correction(NamedTuple):
  """Factors from a formula to a compiled program: memory, executed FLOPs."""

  temporary: float = 1.0
  flops: float = 1.0


Rows = dict[Candidate, dict[str, Any]]
Compile = Callable[[Candidate, float], dict[str, Any] | None]


def candidates(
  config: Mapping[str, Any], devices: int, traced: Sizes, target: Hardware
) -> list[Candidate]:
  size = config["input"]["batch_size"]
  policies = POLICIES if traced.has_remat_policy else [None]
  of_model = estimate.blocks(config)
  result = []
  for axes in _meshes(devices, traced, target, of_model):
    share, rest = divmod(size, meshes.batch_ways(axes))
    if rest:
      continue
    rounds, stages = [1], axes["pipeline"]
    if of_model and stages > 1:
      parts = _divisors(of_model.depth // stages)
      rounds = [n for n in parts if n <= _MOST_ROUNDS]
    for ways in itertools.product(_divisors(share), policies, rounds):
      mesh = {"devices": devices, **axes, "batch_size": size}
      mesh["microbatches"], *rest = ways
      result.append(Candidate(tuple(mesh.items()), *rest))
  if not result:
    raise ConfigError(
      f"--devices={devices}: config.input.batch_size={size} divides among the "
      "devices of no mesh; expected a multiple of a larger divisor of "
      f"{devices}."
    )
  return result


def _meshes(
  devices: int,
  traced: Sizes,
  target: Hardware,
  of_model: estimate.Blocks | None,
) -> Iterator[dict[str, int]]:
  """Sizes of the axes; those within examples only where formulae know them."""
  most = min(_MOST_WITHIN, target.domain)
  tensors = [n for n in traced.tensor_sizes if n <= most] if of_model else [1]
  sequences, pipelines = [1], [1]
  if of_model and of_model.scan and devices > target.domain:
    parts = _divisors(of_model.depth)
    pipelines = [n for n in parts if n <= _MOST_WITHIN]
  if of_model and traced.tokens_per_example:
    share = traced.tokens_per_example // _LEAST_TOKENS
    sequences = [n for n in _divisors(devices) if n <= max(1, min(most, share))]
  for tensor, sequence in itertools.product(tensors, sequences):
    left, rest = divmod(devices, tensor * sequence)
    for fsdp in _divisors(left) if not rest else ():
      for stages in pipelines:
        if left % (fsdp * stages) == 0:
          sizes = (left // (fsdp * stages), stages, fsdp, sequence, tensor)
          yield dict(zip(sharding.AXES, sizes))


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]


def by_formula(
  candidate: Candidate,
  config: Mapping[str, Any],
  traced: Sizes,
  correction: Correction = Correction(),
) -> dict[str, Any]:
  """Returns the facts of estimate.row, without a compiler."""
  of, config = candidate.sizes, candidate.apply(config)
  b, of_model = estimate.itemsize(config), estimate.blocks(config)
  # Embedding and head are in all stages.
  table = of_model.vocab_size * of_model.width if of_model else 0
  rest = max(0, traced.parameters - 2 * table)
  in_stages = traced.parameters - rest + rest / of["pipeline"]
  parts = of["fsdp"] * of["tensor"] * traced.parameters / in_stages
  zero = config.get("opt_sharding", "fsdp") == "replica"
  state = {
    "params": 4 * traced.parameters / parts,
    "opt": traced.opt_bytes / (parts * (of["replica"] if zero else 1)),
  }
  policy = candidate.remat_policy or "none"
  # The copies of sharding/tensor.py are a batch dimension of all products.
  if of["tensor"] > 1 and policy == "dots_with_no_batch_dims_saveable":
    policy = "nothing_saveable"
  flops, kept = POLICIES.get(policy, (4 / 3, 0.0))
  busy = 1 + estimate.schedule_of(of, config).idle()
  split = of["devices"] * of["microbatches"] / busy
  # Elements that the products of a microbatch compute on a device.
  width = of_model.width if of_model else 1024
  depth = of_model.depth if of_model else 12
  if of_model and traced.tokens_per_example:
    tokens = of["batch_size"] * traced.tokens_per_example / split
    heads = of_model.heads + of_model.kv_heads
    layer = 2 * heads * of_model.head_dim + of_model.hidden + 2 * width
    of_products, stream = depth * tokens * layer, depth * tokens * width
    # Inside of a layer, the devices of a tensor group have the same tokens.
    of_products += depth * tokens * width * (of["tensor"] - 1)
  else:
    of_products = traced.model_flops / 3 / split / (2 * width)
    stream = of_products / 8
  gradients = state["params"] * (1 + (of["microbatches"] > 1))
  weights = 2 * b * traced.parameters / depth / of["tensor"]
  logits = min(_LOGITS_BYTES, b * of_products)  # Of a small model: less.
  at_work = 2.5 * b * of_products / depth + weights + logits
  temporary = correction.temporary * (
    gradients + b * (stream + kept * of_products) + at_work
  )
  batch = traced.batch_bytes / meshes.batch_ways(of)
  total = sum(state.values())
  facts = {
    **of,
    "parameters": traced.parameters,
    "sharded_parameters": traced.parameters,
    "parameter_bytes": 4 * traced.parameters,
    "state_bytes": state,
    "host_state_bytes": 0,
    "batch_bytes": batch,
    "tokens_per_example": traced.tokens_per_example,
    "model_flops": traced.model_flops,
    "executed_flops": traced.model_flops * flops * busy * correction.flops,
    "memory": {
      "argument_bytes": total + batch,
      "output_bytes": total,
      "alias_bytes": total,
      "temporary_bytes": temporary,
      "peak_bytes": total + batch + temporary,
    },
    "unknown_loops": 0,
    "cycles": None,
    "products": None,
    "figures": "formula",
    "compiler": "cpu",
  }
  sent = estimate.by_formula(facts, of_model, config)
  ones = [one._asdict() for of_axis in sent.values() for one in of_axis]
  return {**facts, "collectives": ones}


def score(row: Mapping[str, Any]) -> float:
  """Seconds of a step, in the middle between perfect overlap and none."""
  return float(row["secs"]["overlapped"] + row["secs"]["in_turn"]) / 2


def choose(
  config: Mapping[str, Any],
  ways: Iterable[Candidate],
  traced: Sizes,
  target: Hardware,
  compile_one: Compile | None,
  end: float,
  efficiency: float = estimate.EFFICIENCY,
) -> Choice:
  """Compiles the best candidates until time.monotonic() is `end`.

  `compile_one`, if given, returns facts, or None if the time is up.
  """
  compiled: Rows = {}
  ways, out_of_time = list(ways), False

  def row(candidate: Candidate, facts: Mapping[str, Any]) -> dict[str, Any]:
    result = estimate.row(facts, candidate.apply(config), target, efficiency)
    result["has_policy"] = candidate.remat_policy is not None
    return result | {"pipeline_rounds": candidate.pipeline_rounds}

  def rows() -> Rows:
    factors = _corrections(compiled, config, traced)
    return {
      c: compiled.get(c)
      or row(c, by_formula(c, config, traced, _nearest(factors, c)))
      for c in ways
    }

  while True:
    all_rows = rows()
    best = _best(all_rows)
    todo = [c for c in best if c not in compiled]
    left = end - time.monotonic()
    if not todo or compile_one is None or left <= 0:
      out_of_time = bool(todo) and compile_one is not None
      break
    facts = compile_one(todo[0], left)
    if facts is None:
      out_of_time = True
      break
    compiled[todo[0]] = row(todo[0], facts)
  too_large = [r for r in compiled.values() if not r["fits"]]
  chosen = [
    all_rows[c] | {"reasons": _reasons(c, all_rows, target)} for c in best
  ]
  return Choice(
    chosen, too_large if any(r["fits"] for r in chosen) else [], out_of_time
  )


def _best(rows: Rows) -> list[Candidate]:
  fit = {c: r for c, r in rows.items() if r["fits"]}
  if fit:
    # Among equals the one with larger microbatches, which are more efficient.
    order = sorted(fit, key=lambda c: (score(fit[c]), c.sizes["microbatches"]))
  else:
    order = sorted(rows, key=lambda c: rows[c]["peak_bytes"])
  of_mesh: dict[tuple[int, ...], Candidate] = {}
  for candidate in order:
    of_mesh.setdefault(candidate.axes, candidate)
  return list(of_mesh.values())[:BEST]


def _corrections(
  compiled: Rows, config: Mapping[str, Any], traced: Sizes
) -> dict[Candidate, Correction]:
  result = {}
  for candidate, row in compiled.items():
    guess = by_formula(candidate, config, traced)
    memory = [r["memory"]["temporary_bytes"] for r in (row, guess)]
    flops = row["executed_flops"] / guess["executed_flops"]
    result[candidate] = Correction(memory[0] / memory[1], flops)
  return result


def _nearest(
  factors: Mapping[Candidate, Correction], to: Candidate
) -> Correction:
  """The correction of the most similar program; the last one among equals."""

  def unlike(one: Candidate) -> tuple[float, ...]:
    far = {
      name: abs(math.log2(one.sizes[name] / to.sizes[name]))
      for name in (*sharding.AXES, "microbatches")
    }
    within = far["tensor"] + far["sequence"] + far["pipeline"]
    other = one.remat_policy != to.remat_policy
    return other, within, far["microbatches"], far["fsdp"]

  if not factors:
    return Correction()
  nearest = min(reversed(list(factors)), key=unlike)
  if nearest.remat_policy != to.remat_policy:
    return factors[nearest]._replace(flops=1.0)
  return factors[nearest]


def _reasons(candidate: Candidate, rows: Rows, target: Hardware) -> list[str]:
  row = rows[candidate]
  if not row["fits"]:
    return [f"Nothing fits; this needs {gb(row['peak_bytes'])} GB."]
  compute, by_axis = row["secs"]["compute"], row["sent_by_axis"]
  sent = row["secs"]["in_turn"] - compute
  if row["secs"]["overlapped"] > compute:
    first = f"Communication takes {sent:.3g} s, more than the {compute:.3g} s "
    first += "of computation"
  else:
    first = f"Computation takes {compute:.3g} s and hides {sent:.2g} s of "
    first += "communication"
  if by_axis:
    largest = max(by_axis, key=lambda axes: by_axis[axes])
    first += f"; most of it goes over {largest}: {gb(by_axis[largest])} GB"
  alike = [
    c
    for c, r in rows.items()
    if c.axes == candidate.axes and not r["fits"] and score(r) < score(row)
  ]
  if not alike:
    return [f"{first}."]
  smallest = min(alike, key=lambda c: rows[c]["peak_bytes"])
  other = rows[smallest]
  return [
    f"{first}.",
    f"Faster on this mesh, but too large: microbatches={other['microbatches']},"
    f" remat_policy={smallest.remat_policy!r} needs {gb(other['peak_bytes'])} "
    f"of {gb(target.memory_bytes)} GB ({other['figures']}).",
  ]


def gb(nbytes: float) -> str:
  value = nbytes / 1e9
  return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
