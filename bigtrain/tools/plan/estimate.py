"""Estimates the time of a step from the FLOPs and traffic of a program.

  compute    = executed FLOPs / (devices * peak * efficiency)
  network    = sum over collectives of hardware.seconds
  step       = the larger of both with perfect overlap, else their sum

`by_formula` needs no compiler: it has the bytes that a step sends by the
formulae of docs/scaling.md, with the same letters. They omit gradients that are
summed unsharded, such as those of norms.
"""

import collections
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.models.layers import layer_kinds
from bigtrain.objective import building, published_sizes
from bigtrain.runtime import device_memory
from bigtrain.tools.plan import hlo, meshes
from bigtrain.tools.plan.hardware import Hardware, seconds
from bigtrain.tools.plan.hlo import Collective

# Fraction of the peak that large matrix products reach, as in published runs
# that the network does not limit.
EFFICIENCY = 0.6

# Figures of a program or of a mesh, as values of JSON.
Facts = Mapping[str, Any]


def row(
  facts: Facts,
  config: Mapping[str, Any],
  target: Hardware,
  efficiency: float = EFFICIENCY,
) -> dict[str, Any]:
  """Returns all figures of one mesh, from facts of program.compile_update.

  Bytes are of each device, by kind or axes and per step; figures of a compiler
  are without kernels; rates have perfect overlap.
  """
  # The TPU's compiler places each buffer; others only add them up.
  peak_bytes = device_memory.needed_bytes(
    facts["memory"], by_peak=facts["compiler"] == "tpu"
  )
  by_kind = dict.fromkeys(hlo.KINDS, 0.0)
  by_axis: dict[str, float] = collections.defaultdict(float)
  times = []
  for one in (Collective(**one) for one in facts["collectives"]):
    by_kind[one.kind] += one.sent_bytes
    axes = axis_of(one, facts)
    if one.kind == "collective-permute":
      size, stride, *_ = group(axes, facts)
      one = one._replace(group_size=size, stride=stride)
    by_axis[axes] += one.sent_bytes
    times.append(seconds(one, target))
  sending = sum(time.secs for time in times)
  peak = facts["devices"] * target.peak_flops
  products, cycles = facts["products"], facts["cycles"]
  product_flops = products and products["flops"] * facts["devices"]
  executed_flops = max(facts["executed_flops"], product_flops or 0)
  compute = executed_flops / (peak * efficiency)
  step = max(compute, sending)
  compiler_secs = cycles and cycles["compute_secs"] + cycles["exposed_secs"]
  tokens = facts["tokens_per_example"]
  formula = by_formula(facts, blocks(config), config)
  formula_sent: dict[str, float] = collections.defaultdict(float)
  formula_sent |= dict.fromkeys(hlo.KINDS[:3], 0.0)
  for one in itertools.chain(*formula.values()):
    formula_sent[one.kind] += one.sent_bytes
  return {
    **facts,
    "peak_bytes": peak_bytes,
    "compiler_secs": compiler_secs,
    "compiler_mfu": compiler_secs
    and facts["model_flops"] / (peak * compiler_secs),
    "product_flops": product_flops,
    "fits": peak_bytes <= target.memory_bytes,
    "memory_fraction": peak_bytes / target.memory_bytes,
    "sent_bytes": by_kind,
    "formula": formula_sent,
    "sent_by_axis": by_axis,
    "formula_by_axis": {
      axes: sum(one.sent_bytes for one in ones)
      for axes, ones in formula.items()
    },
    "remat_policy": config.get("model", {}).get("remat_policy", "none"),
    "opt_sharding": config.get("opt_sharding", "fsdp"),
    "secs": {
      "compute": compute,
      "link": sum(time.link_secs for time in times),
      "network": sum(time.network_secs for time in times),
      "overlapped": step,
      "in_turn": compute + sending,
    },
    "examples_per_sec": facts["batch_size"] / step,
    "tokens_per_sec": tokens and facts["batch_size"] / step * tokens,
    "mfu": facts["model_flops"] / (peak * step),
  }


def basis(compiled: Sequence[Facts], mesh: Mapping[str, int]) -> Facts | None:
  def traits(of: Mapping[str, int]) -> tuple[Any, ...]:
    ways = meshes.batch_ways(of)
    at_once = of["batch_size"] / (ways * of["microbatches"])
    split = of["replica"] > 1, of["fsdp"] > 1
    return at_once, *split, of["pipeline"], of["sequence"], of["tensor"]

  similar = [facts for facts in compiled if traits(facts) == traits(mesh)]
  return similar[-1] if similar else None


def compare(guess: Facts, row: Facts) -> dict[str, float]:
  sent = [sum(r["sent_bytes"].values()) for r in (guess, row)]
  return {
    "memory": guess["peak_bytes"] / row["peak_bytes"] - 1,
    "sent": sent[0] / sent[1] - 1 if sent[1] else 0.0,
  }


def extrapolate(compiled: Facts, mesh: Mapping[str, int]) -> dict[str, Any]:
  """Returns facts about a mesh that was not compiled, from a smaller mesh.

  With the same examples per device and microbatch, and the same `sequence` and
  `tensor`, a collective moves the same arrays on any number of devices: its
  groups grow, and it runs once per microbatch. Arrays that are sharded over
  `fsdp` shrink with its size. Temporary memory stays the same.
  """
  microbatch_ratio = mesh["microbatches"] / compiled["microbatches"]
  fsdp_ratio = mesh["fsdp"] / compiled["fsdp"]
  batch_ratio = mesh["batch_size"] / compiled["batch_size"]
  scaled = []
  for one in (Collective(**one) for one in compiled["collectives"]):
    axes = axis_of(one, compiled)
    size, stride, *gaps = group(axes, mesh)
    # Sums of what fsdp splits, its gradients, are over other axes.
    over_replica = "replica" in axes and "fsdp" not in axes
    shrinkage = fsdp_ratio if over_replica else 1.0
    runs = round(one.runs * microbatch_ratio)
    nbytes = round(one.nbytes * microbatch_ratio / shrinkage)
    large = Collective(one.kind, size, stride, runs, nbytes, *gaps)
    scaled.append(large._asdict())
  state = {n: x / fsdp_ratio for n, x in compiled["state_bytes"].items()}
  saved = sum(compiled["state_bytes"].values()) - sum(state.values())
  memory = dict(compiled["memory"])
  for name in ("argument_bytes", "output_bytes", "alias_bytes", "peak_bytes"):
    memory[name] -= saved
  return {
    **compiled,
    **mesh,
    "figures": f"from {compiled['devices']:,}",
    "cycles": None,
    "products": None,
    "state_bytes": state,
    "host_state_bytes": compiled["host_state_bytes"] / fsdp_ratio,
    "memory": memory,
    "batch_bytes": compiled["batch_bytes"]
    * (batch_ratio * compiled["devices"] / mesh["devices"]),
    "collectives": scaled,
    "model_flops": compiled["model_flops"] * batch_ratio,
    "executed_flops": compiled["executed_flops"] * batch_ratio,
  }


# Formulae.


class Blocks(NamedTuple):
  """Sizes of a model that is one stack of layers."""

  vocab_size: int
  tied: bool  # The embedding is the head as well.
  depth: int
  width: int  # Of the residual stream.
  heads: int
  kv_heads: int
  head_dim: int
  hidden: float  # Of a layer's MLP, as far as a token uses it, with gates.
  ring: bool  # Keys pass in a ring.
  scan: bool
  repeats: bool  # The backward pass repeats transfers of the forward pass.


def itemsize(config: Mapping[str, Any]) -> int:
  half = ("bfloat16", "float16")
  return 2 if config.get("model", {}).get("dtype") in half else 4


def blocks(config: Mapping[str, Any]) -> Blocks | None:
  if config.get("model_name") != "decoder":
    return None
  keys = ("model_name", "model", "logical_axes")
  return _blocks(json.dumps({k: config[k] for k in keys if k in config}))


@functools.cache
def _blocks(text: str) -> Blocks:
  config = settings.Config(json.loads(text))
  _, model = building.model(published_sizes.with_published_sizes(config))
  layers = layer_kinds.of_model(model).of_all(model.depth)
  hidden = sum(layer.hidden_units() for layer in layers) / len(layers)
  mean = lambda name: sum(getattr(x, name) for x in layers) // len(layers)
  return Blocks(
    vocab_size=model.vocab_size,
    tied=model.tied_head,
    depth=model.depth,
    width=model.width,
    heads=mean("num_heads"),
    kv_heads=mean("num_kv_heads"),
    head_dim=mean("head_dim"),
    hidden=hidden,
    ring=model.attention == "ring",
    scan=model.scan,
    repeats=model.scan or model.remat_policy != "none",
  )


def by_formula(
  of: Mapping[str, Any], of_model: Blocks | None, config: Mapping[str, Any]
) -> dict[str, list[Collective]]:
  """Returns the collectives of a step by axes, such as "replica, sequence".

  Without sizes of the model, only what `fsdp` and `replica` send.
  """
  replica, stages, fsdp, seq, ten = (of[axis] for axis in sharding.AXES)
  micro, b = of["microbatches"], itemsize(config)
  schedule = schedule_of(of, config)
  # A stage gathers its layers for each microbatch, in idle ticks as well.
  busy = 1 + schedule.idle()
  passes = busy * schedule.microbatches / stages
  result: dict[str, list[Collective]] = {}

  def add(axes: str, kind: str, nbytes: float) -> None:
    size, stride, *gaps = group(axes, of)
    if size > 1 and nbytes:
      one = Collective(kind, size, stride, 0, round(nbytes), *gaps)
      result.setdefault(axes, []).append(one)

  tokens = of["tokens_per_example"]
  known = of_model if tokens else None
  layers_size = of["sharded_parameters"]
  table = 0  # Size of the embedding, and of the head.
  if known and layers_size:
    table = known.vocab_size * known.width
    layers_size -= table * (1 if known.tied else 2)
  weights = micro * passes * b * layers_size / ten
  add("fsdp", "all-gather", 2 * weights)
  part = micro * 4 * layers_size / (stages * fsdp * ten)
  if schedule.rounds > 1:  # To the stages that use them, and gradients back.
    add("pipeline", "collective-permute", 2 * part * (stages - 1) / stages)
  names = [a for a in ("replica", "pipeline", "sequence") if of[a] > 1]
  of_tables = ", ".join(names) or "replica"
  if stages > 1:  # Replicas sum the gradients of a stage once, in float32.
    names = ["sequence"]
    add("replica", "all-reduce", part)
  others = ", ".join(names) or "replica"
  tables = 2 * micro * b * table / (fsdp * ten)
  if replica > 1 and config.get("opt_sharding", "fsdp") == "replica":
    # ZeRO-1: the updated parameters are gathered in float32.
    add("replica", "all-gather", 4 * of["sharded_parameters"] / (fsdp * ten))
    over = [a for a in ("replica", "fsdp", "sequence") if of[a] > 1]
    add(", ".join(over), "reduce-scatter", weights)
  else:
    add("fsdp", "reduce-scatter", weights)
    add(others, "all-reduce", weights / fsdp)
  add(of_tables, "all-reduce", tables)
  if known is None:
    return result
  # Of a microbatch on the devices that share its examples.
  t = of["batch_size"] * tokens / (micro * meshes.batch_ways(of))
  for kind, nbytes in _of_tables(known, of, t / seq, b).items():
    add("fsdp", kind, micro * nbytes)
  times, repeated = micro * known.depth * busy, 1 + known.repeats
  kv_heads = math.lcm(known.kv_heads, ten)
  keys = 2 * b * t * kv_heads / ten * known.head_dim * times
  queries = 4 * b * t * known.heads / ten * known.head_dim * times
  if known.ring:
    moved = keys * (1 + repeated) * (seq - 1) / seq + keys * 4 / b
    exchanged = queries + 2 * keys
  else:
    moved = 0.0
    exchanged = queries * (1 + repeated) / 2
    add("sequence", "all-gather", keys * repeated)
    add("sequence", "reduce-scatter", keys)
  # With two devices, one of the two parts of each stays where it is.
  permuted = moved + exchanged / seq / (2 if seq == 2 else 1)
  add("sequence", "collective-permute", permuted)
  stream = b * t / seq * known.width * micro
  layers = known.depth * busy
  again = (2 * layers, layers) if known.repeats else (0, 0)
  add("tensor", "all-gather", (4 * layers + 2 + again[0]) * stream)
  add("tensor", "reduce-scatter", (4 * layers + 2 + again[1]) * stream)
  at_once = schedule.microbatches
  moved = (2 + (at_once < stages * stages)) * schedule.rounds * busy * stages
  moved += min(1, stages * (stages - 1) / at_once)  # To the outputs' places.
  add("pipeline", "collective-permute", 2 * moved * stream / ten)
  return result


def schedule_of(
  of: Mapping[str, int], config: Mapping[str, Any]
) -> sharding.Schedule:
  """The pipeline's schedule for a microbatch of the step."""
  if of["pipeline"] == 1:
    return sharding.Schedule(1, 1, 1)
  given = config.get("mesh", {})
  rounds = given.get("pipeline_rounds", 1)
  at_once = given.get("pipeline_microbatches", 0)
  asked = sharding.Schedule(of["pipeline"], rounds, at_once)
  groups = of["microbatches"] * of["replica"] * of["fsdp"]
  return asked.split(of["batch_size"] // groups) or asked._replace(
    microbatches=of["pipeline"]
  )


def _of_tables(
  of_model: Blocks, of: Mapping[str, Any], tokens: float, b: int
) -> dict[str, float]:
  """Bytes over `fsdp` of an embedding and a head, for a microbatch."""
  V, D = of_model.vocab_size, of_model.width
  fsdp, ten = of["fsdp"], of["tensor"]
  by_rows = ten > 1 and V % ten == 0
  head = b * V * D / (ten if by_rows else 1)
  dim = sharding.largest_free((V, D), fsdp, {0: ("tensor",)} if by_rows else {})
  if dim is None:
    return {}
  own = tokens if by_rows else tokens / ten
  if D % fsdp or own >= V:
    return {"all-gather": 2 * head, "reduce-scatter": 2 * head}
  columns = b * V * D / fsdp if dim == 0 else 0
  return {
    "all-gather": head + 4 * own * fsdp,
    "reduce-scatter": head,
    "all-to-all": 2 * (b * tokens * D / ten + columns),
  }


def group(axes: str, of: Mapping[str, int]) -> tuple[int, ...]:
  """Returns (group_size, stride) of the devices that share some axes.

  With inner and span, as in Collective, if distances in the group differ. The
  axes are names such as "replica, sequence", the slowest first, or "others".
  """
  return _group(axes, tuple(of[axis] for axis in sharding.AXES))


@functools.cache
def _group(axes: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
  names = sharding.AXES if axes == "others" else axes.split(", ")
  grid = np.arange(math.prod(sizes)).reshape(sizes)
  first = [slice(None) if a in names else 0 for a in sharding.AXES]
  kept = [a for a in sharding.AXES if a in names]
  order = [kept.index(a) for a in names]
  devices = grid[tuple(first)].transpose(order)
  return hlo.distances(devices.ravel().tolist())


def axis_of(one: Collective, of: Mapping[str, int]) -> str:
  """Returns the axes that a collective goes over, or "others"."""
  axes = [axis for axis in sharding.AXES if of[axis] > 1]
  if one.kind == "collective-permute":  # Its size counts all groups.
    strides = {axis: group(axis, of)[1] for axis in axes}
    near = [axis for axis in axes if strides[axis] <= one.stride]
    return max(near, key=lambda axis: strides[axis]) if near else "others"
  known = (one.group_size, one.stride, one.inner, one.span)
  for number in range(1, len(axes) + 1):
    for names in itertools.combinations(axes, number):
      # Where two axes split one dimension of an array, the partitioner orders
      # the devices of a group by the dimension.
      for order in itertools.permutations(names):
        if (*group(", ".join(order), of), 0, 0)[:4] == known:
          return ", ".join(names)
  return "others"
