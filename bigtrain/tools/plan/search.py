"""Chooses mesh, pipeline rounds, microbatches and remat for some devices.

Every mesh that divides the devices, the batch and the model is estimated by
formula: its traffic as in formulae.py, its memory and FLOPs as below. The best
five are then compiled, as far as time allows. Because the formulae are rough,
each compiled program is also used to correct the temporary memory and the FLOPs
of the candidates that are not compiled.

  state       (params + opt) / (fsdp x tensor), and the gradients in float32
  kept        bytes that the backward pass needs of each layer
  at work     all results of one layer, and its gathered weights
  FLOPs       the model's, and a third more if each layer is repeated
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, nearest_divisors
from bigtrain.tools.plan import estimate, formulae, meshes
from bigtrain.tools.plan.formulae import Blocks
from bigtrain.tools.plan.hardware import Hardware
from bigtrain.tools.plan.program import Sizes

# Number of meshes to compile and to show.
BEST = 5


class Policy(NamedTuple):
  """Costs of a remat policy, by rule of thumb."""

  flops: float  # Executed FLOPs over the model's.
  kept: float  # Bytes that a layer keeps / bytes of its products.


POLICIES = {
  "none": Policy(flops=1.0, kept=2.5),
  "dots_with_no_batch_dims_saveable": Policy(flops=1.05, kept=1.0),
  "nothing_saveable": Policy(flops=4 / 3, kept=0.0),
}

# Least number of tokens of an example on a device, for `sequence`.
_MIN_TOKENS = 1024
# Largest size of `tensor`, `sequence` and `pipeline` to consider.
_MAX_AXIS_SIZE = 16
# Rounds of a circular pipeline to consider. Each round divides the idle time,
# but sends every activation once more; beyond four the traffic costs more than
# it saves.
_MAX_PIPELINE_ROUNDS = 4
# Logits of a chunk in float32, with their gradients: losses/linear_xent.py.
_LOGITS_BYTES = 3 * 4 * 2**26
# Bytes of all results of a layer over the bytes of its products.
_RESULTS_RATIO = 2.5


class Candidate(NamedTuple):
  """A way to run a config."""

  mesh: tuple[tuple[str, int], ...]  # Items of a meshes.Mesh, hashable.
  remat_policy: str | None  # None if the model has no such option.
  pipeline_rounds: int = 1

  @property
  def sizes(self) -> meshes.Mesh:
    return dict(self.mesh)

  @property
  def axes(self) -> tuple[int, ...]:
    return tuple(self.sizes[axis] for axis in sharding.AXES)

  def changes(self, config: Mapping[str, Any]) -> list[str]:
    """The changes of the config, as on a command line."""
    changes = meshes.changes(config, self.sizes)
    if self.sizes["pipeline"] > 1:
      changes.append(f"mesh.pipeline_rounds={self.pipeline_rounds}")
    if self.remat_policy is not None:
      changes.append(f"model.remat_policy={self.remat_policy}")
    return changes

  def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the changes that the formulae look at."""
    mesh = config.get("mesh", {})
    changed = {
      **config,
      "mesh": {**mesh, "pipeline_rounds": self.pipeline_rounds},
    }
    if self.remat_policy is not None:
      model = config.get("model", {})
      changed["model"] = {**model, "remat_policy": self.remat_policy}
    return changed


class Choice(NamedTuple):
  """The result of a search."""

  # Estimates of the best meshes, with "reasons"; if nothing fits, of the
  # meshes that need the least memory.
  best: list[dict[str, Any]]
  too_large: list[dict[str, Any]]  # Compiled candidates that do not fit.
  out_of_time: bool  # Some of the best are by formula for want of time.


class Correction(NamedTuple):
  """Factors from a formula to a compiled program."""

  temporary: float = 1.0  # Temporary memory.
  flops: float = 1.0  # Executed FLOPs.


Estimates = dict[Candidate, dict[str, Any]]
# Facts of a candidate, within a number of seconds, or None if they are up.
Compile = Callable[[Candidate, float], dict[str, Any] | None]


# Candidates.


def candidates(
  config: Mapping[str, Any], devices: int, traced: Sizes, target: Hardware
) -> list[Candidate]:
  batch_size = config["input"]["batch_size"]
  at_once = config.get("mesh", {}).get("pipeline_microbatches", 0)
  policies: Sequence[str | None] = [None]
  if traced.has_remat_policy:
    policies = list(POLICIES)
  model = formulae.blocks(config)
  result = []
  for axes in _meshes(devices, traced, target, model):
    share, rest = divmod(batch_size, meshes.batch_ways(axes))
    stages = axes["pipeline"]
    if rest or at_once % stages:
      continue
    rounds = [1]
    if model and stages > 1:
      layers_per_stage = model.depth // stages
      rounds = [
        n for n in _divisors(layers_per_stage) if n <= _MAX_PIPELINE_ROUNDS
      ]
    for microbatches, policy, pipeline_rounds in itertools.product(
      _divisors(share), policies, rounds
    ):
      mesh = {
        "devices": devices,
        **axes,
        "batch_size": batch_size,
        "microbatches": microbatches,
      }
      result.append(Candidate(tuple(mesh.items()), policy, pipeline_rounds))
  if not result:
    raise ConfigError(
      f"--devices={devices}: config.input.batch_size={batch_size} divides "
      "among the devices of no mesh; the nearest numbers that divide "
      f"the batch: {nearest_divisors(devices, batch_size)}."
    )
  return result


def _meshes(
  devices: int, traced: Sizes, target: Hardware, model: Blocks | None
) -> Iterator[dict[str, int]]:
  """Yields the sizes of all axes.

  `tensor`, `sequence` and `pipeline` stay at 1 for models for whose traffic
  over them there is no formula.
  """
  # `tensor` and `sequence` send in every layer, so they stay within a domain.
  max_size = min(_MAX_AXIS_SIZE, target.domain)
  tensor_sizes = sequence_sizes = pipeline_sizes = [1]
  if model:
    tensor_sizes = [n for n in traced.tensor_sizes if n <= max_size]
  if model and traced.tokens_per_example:
    pieces = traced.tokens_per_example // _MIN_TOKENS
    most = max(1, min(max_size, pieces))
    sequence_sizes = [n for n in _divisors(devices) if n <= most]
  # Stages send little, so a pipeline is for groups that leave a domain. It
  # needs the layers in a scan.
  if model and model.scan and devices > target.domain:
    divisors = _divisors(model.depth)
    pipeline_sizes = [n for n in divisors if n <= _MAX_AXIS_SIZE]
  for tensor, sequence in itertools.product(tensor_sizes, sequence_sizes):
    left, rest = divmod(devices, tensor * sequence)
    if rest:
      continue
    for fsdp, stages in itertools.product(_divisors(left), pipeline_sizes):
      if left % (fsdp * stages) == 0:
        yield {
          "replica": left // (fsdp * stages),
          "pipeline": stages,
          "fsdp": fsdp,
          "sequence": sequence,
          "tensor": tensor,
        }


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]


# Facts by formula.


def by_formula(
  candidate: Candidate,
  config: Mapping[str, Any],
  traced: Sizes,
  correction: Correction = Correction(),
) -> dict[str, Any]:
  """Returns the facts for estimate.from_facts, without a compiler."""
  mesh, config = candidate.sizes, candidate.apply(config)
  model = formulae.blocks(config)
  policy = _policy(candidate)
  state = _state_bytes(mesh, config, traced, model)
  state_bytes = sum(state.values())
  temporary = _temporary_bytes(mesh, config, traced, model, policy, state)
  temporary *= correction.temporary
  batch = traced.batch_bytes / meshes.batch_ways(mesh)
  # Idle stages of a pipeline compute as well, on nothing.
  busy = 1 + formulae.schedule_of(mesh, config).idle()
  executed_flops = traced.model_flops * policy.flops * busy * correction.flops
  facts = {
    **mesh,
    "parameters": traced.parameters,
    "sharded_parameters": traced.parameters,
    "parameter_bytes": 4 * traced.parameters,
    "state_bytes": state,
    "host_state_bytes": 0,
    "batch_bytes": batch,
    "tokens_per_example": traced.tokens_per_example,
    "model_flops": traced.model_flops,
    "executed_flops": executed_flops,
    "memory": {
      "argument_bytes": state_bytes + batch,
      "output_bytes": state_bytes,
      "alias_bytes": state_bytes,
      "temporary_bytes": temporary,
      "peak_bytes": state_bytes + batch + temporary,
    },
    "unknown_loops": 0,
    "cycles": None,
    "products": None,
    "figures": "formula",
    "compiler": "cpu",
  }
  by_axes = formulae.traffic(facts, model, config)
  sent = itertools.chain(*by_axes.values())
  return {**facts, "collectives": [one._asdict() for one in sent]}


def _policy(candidate: Candidate) -> Policy:
  name = candidate.remat_policy or "none"
  tensor = candidate.sizes["tensor"]
  if tensor > 1 and name == "dots_with_no_batch_dims_saveable":
    # With `tensor`, all products have a batch dimension: the copies of
    # sharding/tensor.py. So this policy keeps nothing.
    name = "nothing_saveable"
  return POLICIES[name]


def _state_bytes(
  mesh: meshes.Mesh,
  config: Mapping[str, Any],
  traced: Sizes,
  model: Blocks | None,
) -> dict[str, float]:
  """Bytes of the state on each device, which is in float32."""
  # A pipeline splits the layers; embedding and head are in all stages.
  table_size = model.vocab_size * model.width if model else 0
  in_layers = max(0, traced.parameters - 2 * table_size)
  in_tables = traced.parameters - in_layers
  in_a_stage = in_tables + in_layers / mesh["pipeline"]
  parts = mesh["fsdp"] * mesh["tensor"] * traced.parameters / in_a_stage
  zero_1 = config.get("opt_sharding", "fsdp") == "replica"
  opt_parts = parts * (mesh["replica"] if zero_1 else 1)
  return {
    "params": 4 * traced.parameters / parts,
    "opt": traced.opt_bytes / opt_parts,
  }


def _temporary_bytes(
  mesh: meshes.Mesh,
  config: Mapping[str, Any],
  traced: Sizes,
  model: Blocks | None,
  policy: Policy,
  state: Mapping[str, float],
) -> float:
  """Bytes of gradients and activations on each device."""
  busy = 1 + formulae.schedule_of(mesh, config).idle()
  # Over this a step's work is split: a device has one microbatch at a time.
  split = mesh["devices"] * mesh["microbatches"] / busy
  # Numbers that a device computes for a microbatch: `products` of all matrix
  # products, `stream` of the residual stream at the ends of layers.
  if model and traced.tokens_per_example:
    depth = model.depth
    tokens = mesh["batch_size"] * traced.tokens_per_example / split
    heads = model.heads + model.kv_heads
    per_token = 2 * heads * model.head_dim + model.hidden + 2 * model.width
    products = depth * tokens * per_token
    stream = depth * tokens * model.width
    # Within a layer, the devices of a tensor group have the same tokens.
    products += depth * tokens * model.width * (mesh["tensor"] - 1)
  else:
    # A guess for other models: from the FLOPs, with a usual width and depth.
    depth = model.depth if model else 12
    width = model.width if model else 1024
    products = traced.model_flops / 3 / split / (2 * width)
    stream = products / 8
  itemsize = formulae.itemsize(config)
  # One copy in use and, with several microbatches, one for the sum.
  gradients = state["params"] * (1 + (mesh["microbatches"] > 1))
  kept = itemsize * (stream + policy.kept * products)
  # The layer that is computed, with its gathered weights and their gradients.
  weights = 2 * itemsize * traced.parameters / depth / mesh["tensor"]
  logits = min(_LOGITS_BYTES, itemsize * products)  # A small model has fewer.
  at_work = _RESULTS_RATIO * itemsize * products / depth + weights + logits
  return gradients + kept + at_work


# The search.


def score(figures: Mapping[str, Any]) -> float:
  """Seconds of a step, halfway between perfect overlap and none."""
  secs = figures["secs"]
  return float(secs["overlapped"] + secs["in_turn"]) / 2


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

  Without `compile_one`, all figures are by formula.
  """
  ways = list(ways)
  compiled: Estimates = {}

  def estimated(candidate: Candidate, facts: estimate.Facts) -> dict[str, Any]:
    changed = candidate.apply(config)
    return {
      **estimate.from_facts(facts, changed, target, efficiency),
      "has_policy": candidate.remat_policy is not None,
      "pipeline_rounds": candidate.pipeline_rounds,
    }

  def estimate_all() -> Estimates:
    corrections = _corrections(compiled, config, traced)
    result = dict(compiled)
    for candidate in ways:
      if candidate not in compiled:
        correction = _nearest(corrections, candidate)
        facts = by_formula(candidate, config, traced, correction)
        result[candidate] = estimated(candidate, facts)
    return {candidate: result[candidate] for candidate in ways}

  out_of_time = False
  while True:
    estimates = estimate_all()
    best = _best(estimates)
    todo = [candidate for candidate in best if candidate not in compiled]
    if not todo or compile_one is None:
      break
    left = end - time.monotonic()
    facts = compile_one(todo[0], left) if left > 0 else None
    if facts is None:
      out_of_time = True
      break
    # This may change the order, because it corrects the other candidates.
    compiled[todo[0]] = estimated(todo[0], facts)

  chosen = [
    {**estimates[one], "reasons": _reasons(one, estimates, target)}
    for one in best
  ]
  too_large = []
  if any(one["fits"] for one in chosen):
    too_large = [one for one in compiled.values() if not one["fits"]]
  return Choice(chosen, too_large, out_of_time)


def _best(estimates: Estimates) -> list[Candidate]:
  """The best candidate of each of the best meshes."""
  fitting = {c: one for c, one in estimates.items() if one["fits"]}
  if fitting:
    # Among equals, fewer and larger microbatches are more efficient.
    ordered = sorted(
      fitting, key=lambda c: (score(fitting[c]), c.sizes["microbatches"])
    )
  else:
    ordered = sorted(estimates, key=lambda c: estimates[c]["peak_bytes"])
  first_of_mesh: dict[tuple[int, ...], Candidate] = {}
  for candidate in ordered:
    first_of_mesh.setdefault(candidate.axes, candidate)
  return list(first_of_mesh.values())[:BEST]


def _corrections(
  compiled: Estimates, config: Mapping[str, Any], traced: Sizes
) -> dict[Candidate, Correction]:
  result = {}
  for candidate, real in compiled.items():
    guess = by_formula(candidate, config, traced)
    real_temporary = real["memory"]["temporary_bytes"]
    result[candidate] = Correction(
      temporary=real_temporary / guess["memory"]["temporary_bytes"],
      flops=real["executed_flops"] / guess["executed_flops"],
    )
  return result


def _nearest(
  corrections: Mapping[Candidate, Correction], to: Candidate
) -> Correction:
  """The correction of the most similar program; the last one among equals."""

  def difference(one: Candidate) -> tuple[float, ...]:
    """In the order in which differences matter for memory."""
    factors = {
      name: abs(math.log2(one.sizes[name] / to.sizes[name]))
      for name in (*sharding.AXES, "microbatches")
    }
    return (
      one.remat_policy != to.remat_policy,
      factors["tensor"] + factors["sequence"] + factors["pipeline"],
      factors["microbatches"],
      factors["fsdp"],
    )

  if not corrections:
    return Correction()
  nearest = min(reversed(list(corrections)), key=difference)
  if nearest.remat_policy != to.remat_policy:
    # Policies differ in what they compute again.
    return corrections[nearest]._replace(flops=1.0)
  return corrections[nearest]


def _reasons(
  candidate: Candidate, estimates: Estimates, target: Hardware
) -> list[str]:
  """Sentences: what limits a step, and why not a faster way on this mesh."""
  chosen = estimates[candidate]
  if not chosen["fits"]:
    return [f"Nothing fits; this needs {gb(chosen['peak_bytes'])} GB."]
  compute = chosen["secs"]["compute"]
  sending = chosen["secs"]["in_turn"] - compute
  if chosen["secs"]["overlapped"] > compute:
    first = (
      f"Communication takes {sending:.3g} s, more than the {compute:.3g} s of "
      "computation"
    )
  else:
    first = (
      f"Computation takes {compute:.3g} s and hides {sending:.2g} s of "
      "communication"
    )
  if sent := chosen["sent_by_axis"]:
    largest = max(sent, key=sent.__getitem__)
    first += f"; most of it goes over {largest}: {gb(sent[largest])} GB"
  reasons = [f"{first}."]
  faster = [
    other
    for other, one in estimates.items()
    if other.axes == candidate.axes
    and not one["fits"]
    and score(one) < score(chosen)
  ]
  if faster:
    smallest = min(faster, key=lambda other: estimates[other]["peak_bytes"])
    one = estimates[smallest]
    reasons.append(
      "Faster on this mesh, but too large: "
      f"microbatches={one['microbatches']}, "
      f"remat_policy={smallest.remat_policy!r} needs {gb(one['peak_bytes'])} "
      f"of {gb(target.memory_bytes)} GB ({one['figures']})."
    )
  return reasons


def gb(nbytes: float) -> str:
  value = nbytes / 1e9
  return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
