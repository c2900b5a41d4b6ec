"""The bytes that a step sends, by the formulae of docs/scaling.md.

With S parameters of layers that are sharded over `fsdp`, b bytes per element of
the compute dtype, m microbatches, and a mesh of replica R x fsdp F x sequence Q
x tensor T, each device sends per step

  over fsdp      all-gather       2 m b S/T (F-1)/F      weights, in both passes
                 reduce-scatter   m b S/T (F-1)/F        gradients
  over replica   all-reduce       2 m b S/(F T) (n-1)/n  gradients; n = R Q

and for each microbatch of t tokens per Q devices, each of N layers with H heads
of queries and G of keys of width K, and width D:

  over sequence  all-gather       2 b t G/T K (Q-1)/Q    keys and values
                 reduce-scatter   the same               their gradients
                 permute          4 b t H/T K / Q        queries, outputs and
                                                         the gradients of both
  over tensor    all-gather       4 b t/Q D (T-1)/T      inputs and gradients
                 reduce-scatter   the same
  once           both over tensor 2 b t/Q D (T-1)/T      embedding and head

and of the V rows of an embedding and of a head, for each microbatch

  over fsdp      all-gather       b V/T D (F-1)/F        the head
                 reduce-scatter   b V/T D (F-1)/F        its gradient
                 all-to-all       2 b t/(Q T) D (F-1)/F  rows and gradients, and
                                  2 b V D/F (F-1)/F      columns of a table that
                                                         is split by rows
                 all-gather       4 t/Q (F-1)            numbers of the tokens
  over replica   all-reduce       4 b V D/(F T) (n-1)/n  gradients of both

With attention="ring", keys and values go around in place of the gather and the
scatter. With remat or scan the backward pass repeats the gather of keys, the
exchange of queries and outputs, and over `tensor` two gathers and one scatter.
With two devices per example half of the permutes is left. With ZeRO-1 gradients
are scattered over all axes but `tensor`, and the new parameters gathered over
`replica`, in float32. A device with at least V tokens gathers the embedding in
place of an exchange of rows (sharding/lookup.py). The formulae omit gradients
that are summed unsharded, such as the gradients of norms.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bigtrain import parts, settings, sharding
from bigtrain.tools.plan import collectives
from bigtrain.tools.plan.collectives import Collective

_BYTES = {"bfloat16": 2, "float16": 2}

# Collectives by the axes that they go over, such as "fsdp" or "replica,
# sequence".
ByAxis = dict[str, list[Collective]]


class Blocks(NamedTuple):
  """Sizes of a model that is one stack of layers.

  Attributes:
    vocab_size: number of rows of the embedding.
    tied: whether the embedding is the head as well.
    depth: number of layers.
    width: width of the residual stream.
    heads: number of heads of queries.
    kv_heads: number of heads of keys.
    head_dim: width of a head.
    hidden: hidden units of a layer's MLP that a token uses, gates included.
    ring: whether keys pass in a ring.
    repeats: whether the backward pass repeats transfers of the forward pass.
  """

  vocab_size: int
  tied: bool
  depth: int
  width: int
  heads: int
  kv_heads: int
  head_dim: int
  hidden: int
  ring: bool
  repeats: bool


def itemsize(config: Mapping[str, Any]) -> int:
  """Bytes of a number of the computation."""
  return _BYTES.get(config.get("model", {}).get("dtype", "float32"), 4)


def blocks(config: Mapping[str, Any]) -> Blocks | None:
  """Returns the sizes of the config's model.

  Returns:
    None for models other than decoders.
  """
  if config.get("model_name") != "decoder":
    return None
  keys = ("model_name", "model", "logical_axes")
  return _blocks(json.dumps({k: config[k] for k in keys if k in config}))


@functools.cache
def _blocks(text: str) -> Blocks:
  config = settings.Config(json.loads(text))
  _, model = parts.model(parts.with_published_sizes(config))
  hidden = (model.mlp_dim or 4 * model.width) * (1 + (model.mlp == "swiglu"))
  if model.moe:
    hidden *= model.moe.top_k
  return Blocks(
    vocab_size=model.vocab_size,
    tied=model.tied_head,
    depth=model.depth,
    width=model.width,
    heads=model.num_heads,
    kv_heads=model.num_kv_heads or model.num_heads,
    head_dim=model.head_dim or model.width // model.num_heads,
    hidden=hidden,
    ring=model.attention == "ring",
    repeats=model.scan or model.remat_policy != "none",
  )


def traffic(
  of: Mapping[str, Any], of_model: Blocks | None, config: Mapping[str, Any]
) -> ByAxis:
  """Returns the collectives of a step.

  Args:
    of: the mesh, batch_size, microbatches, sharded_parameters and
      tokens_per_example (or None).
    of_model: sizes of the model; without them, only what `fsdp` and `replica`
      send.
  """
  replica, fsdp, seq, ten = (of[axis] for axis in sharding.AXES)
  micro, b = of["microbatches"], itemsize(config)
  result: ByAxis = {}

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
  weights = micro * b * layers_size / ten
  add("fsdp", "all-gather", 2 * weights)
  names = [a for a in ("replica", "sequence") if of[a] > 1]
  others = ", ".join(names) or "replica"
  tables = 2 * micro * b * table / (fsdp * ten)
  if replica > 1 and config.get("opt_sharding", "fsdp") == "replica":
    # ZeRO-1: the updated parameters are gathered in float32.
    add("replica", "all-gather", 4 * of["sharded_parameters"] / (fsdp * ten))
    over = [a for a in sharding.AXES[:3] if of[a] > 1]
    add(", ".join(over), "reduce-scatter", weights)
    add(others, "all-reduce", tables)
  else:
    add("fsdp", "reduce-scatter", weights)
    add(others, "all-reduce", weights / fsdp + tables)
  if known is None:
    return result
  # Of a microbatch on the devices that share its examples.
  t = of["batch_size"] * tokens / (micro * replica * fsdp)
  for kind, nbytes in _of_tables(known, of, t / seq, b).items():
    add("fsdp", kind, micro * nbytes)
  times, repeated = micro * known.depth, 1 + known.repeats
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
  layers = known.depth
  again = (2 * layers, layers) if known.repeats else (0, 0)
  add("tensor", "all-gather", (4 * layers + 2 + again[0]) * stream)
  add("tensor", "reduce-scatter", (4 * layers + 2 + again[1]) * stream)
  return result


def _of_tables(
  of_model: Blocks, of: Mapping[str, Any], tokens: float, b: int
) -> dict[str, float]:
  """Bytes over `fsdp` of an embedding and a head, for a microbatch.

  Args:
    b: bytes of a number.
  """
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
  """Returns size and stride of a group of devices over some axes.

  Args:
    axes: names of axes, such as "replica, sequence", the slowest first, or
      "others" for all.

  Returns:
    (group_size, stride, inner, span) of a Collective; the last two only if the
    distances in the group differ.
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
  return collectives.distances(devices.ravel().tolist())


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


def by_axis(traffic_of: ByAxis) -> dict[str, float]:
  """Returns {axes: bytes that a device sends in a step}."""
  return {
    axes: sum(one.sent_bytes for one in ones)
    for axes, ones in traffic_of.items()
  }


def by_kind(traffic_of: ByAxis) -> dict[str, float]:
  """Returns {kind of collective: bytes that a device sends in a step}."""
  result = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0.0)
  for ones in traffic_of.values():
    for one in ones:
      result[one.kind] = result.get(one.kind, 0.0) + one.sent_bytes
  return result
