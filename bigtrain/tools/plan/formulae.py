"""Traffic of a step by the formulae of docs/scaling.md, without a compiler.

The letters are those of that page. The sizes of the mesh are

  R replica, P pipeline (its stages), F fsdp, Q sequence, T tensor

and the sizes of a step are

  m  microbatches                    b  bytes of a number that is computed with
  t  tokens of a microbatch on the   S  parameters of all layers
     devices that share examples     V  vocabulary
  N  layers                          D  width of the residual stream
  X  parameters of experts that `fsdp` splits as a whole

The formulae leave out gradients that are summed unsharded, such as those of
norms, which are a small part.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.models.layers import attention_backends, layer_kinds, mlp
from bigtrain.objective import building, published_sizes
from bigtrain.tools.plan import groups, meshes
from bigtrain.tools.plan.collectives import Collective

# Adds a collective: axes, kind, and the bytes of its arrays per step.
_Send = Callable[[str, str, float], None]


class Blocks(NamedTuple):
  """Sizes of a model that is one stack of layers."""

  vocab_size: int
  tied: bool  # The embedding is also the head.
  depth: int
  width: int  # Of the residual stream.
  heads: int
  kv_heads: int
  head_dim: int
  # Units of a layer's MLP that a token uses; a gate counts as one more each.
  hidden: float
  attention: str  # The name of its implementation.
  scan: bool
  repeats: bool  # The backward pass repeats transfers of the forward pass.
  # Of experts without a capacity that stay on the devices of `fsdp`: their
  # parameters, and the choices of a token, both in all layers.
  experts_size: int
  choices: int


def blocks(config: Mapping[str, Any]) -> Blocks | None:
  """Sizes of the config's decoder; None for other models."""
  if config.get("model_name") != "decoder":
    return None
  keys = ("model_name", "model", "logical_axes")
  return _blocks(json.dumps({k: config[k] for k in keys if k in config}))


@functools.cache  # A search asks thousands of times.
def _blocks(text: str) -> Blocks:
  config = settings.Config(json.loads(text))
  _, model = building.model(published_sizes.with_published_sizes(config))
  layers = layer_kinds.of_model(model).of_all(model.depth)

  experts_size = choices = 0
  for layer in layers:
    experts = layer.moe
    if experts is None or experts.axis != "fsdp" or experts.capacity_factor:
      continue
    kernels = 2 + int(mlp.is_gated(layer.mlp))
    width = experts.width(layer.mlp_dim)
    experts_size += experts.num_experts * kernels * width * model.width
    choices += experts.top_k

  def mean(name: str) -> int:
    return sum(getattr(layer, name) for layer in layers) // len(layers)

  return Blocks(
    vocab_size=model.vocab_size,
    tied=model.tied_head,
    depth=model.depth,
    width=model.width,
    heads=mean("num_heads"),
    kv_heads=mean("num_kv_heads"),
    head_dim=mean("head_dim"),
    hidden=sum(layer.hidden_units() for layer in layers) / len(layers),
    attention=model.attention,
    scan=model.scan,
    repeats=model.scan or model.remat_policy != "none",
    experts_size=experts_size,
    choices=choices,
  )


def itemsize(config: Mapping[str, Any]) -> int:
  """Bytes of a number in the dtype in which the model computes."""
  dtype = config.get("model", {}).get("dtype")
  return 2 if dtype in ("bfloat16", "float16") else 4


def schedule_of(
  mesh: Mapping[str, int], config: Mapping[str, Any]
) -> sharding.Schedule:
  """The pipeline's schedule for a microbatch of the step."""
  stages = mesh["pipeline"]
  if stages == 1:
    return sharding.Schedule(stages=1, rounds=1, microbatches=1)
  options = config.get("mesh", {})
  asked = sharding.Schedule(
    stages,
    options.get("pipeline_rounds", 1),
    options.get("pipeline_microbatches", 0),
  )
  shares = mesh["microbatches"] * mesh["replica"] * mesh["fsdp"]
  schedule = asked.split(mesh["batch_size"] // shares)
  return schedule or asked._replace(microbatches=stages)


class _Step(NamedTuple):
  """The letters of the formulae."""

  R: int
  P: int
  F: int
  Q: int
  T: int
  m: int
  b: int
  S: float
  X: float
  VD: int  # Size of an embedding or a head; 0 if it is unknown.
  schedule: sharding.Schedule

  @property
  def busy(self) -> float:
    """Ticks of a stage over those with work: it also sends in idle ticks."""
    return 1 + self.schedule.idle()


def traffic(
  facts: Mapping[str, Any], model: Blocks | None, config: Mapping[str, Any]
) -> dict[str, list[Collective]]:
  """Returns the collectives of a step by axes, such as "replica, sequence".

  Without sizes of the model, it has only what `fsdp` and `replica` send.

  Args:
    facts: the mesh and its batch, `sharded_parameters`, `tokens_per_example`.
  """
  result: dict[str, list[Collective]] = {}

  def send(axes: str, kind: str, nbytes: float) -> None:
    group = groups.over_axes(axes, facts)
    if group.size > 1 and nbytes:
      one = Collective(
        kind=kind,
        group_size=group.size,
        stride=group.stride,
        runs=0,
        nbytes=round(nbytes),
        inner=group.inner,
        span=group.span,
      )
      result.setdefault(axes, []).append(one)

  tokens_per_example = facts["tokens_per_example"]
  if not tokens_per_example:
    model = None
  layers_size = facts["sharded_parameters"]
  table_size = 0
  if model and layers_size:
    table_size = model.vocab_size * model.width
    layers_size -= table_size * (1 if model.tied else 2)
  step = _Step(
    R=facts["replica"],
    P=facts["pipeline"],
    F=facts["fsdp"],
    Q=facts["sequence"],
    T=facts["tensor"],
    m=facts["microbatches"],
    b=itemsize(config),
    S=layers_size,
    X=model.experts_size if model and facts["fsdp"] > 1 else 0,
    VD=table_size,
    schedule=schedule_of(facts, config),
  )
  zero_1 = config.get("opt_sharding", "fsdp") == "replica"
  _send_weights(send, step, zero_1, facts["sharded_parameters"])
  if model:
    examples = facts["batch_size"] / (step.m * meshes.batch_ways(facts))
    t = examples * tokens_per_example
    _send_table_rows(send, step, model, t / step.Q)
    ring = _is_ring(model, tokens_per_example, step.b, facts)
    _send_keys_and_queries(send, step, model, t, ring)
    _send_stream(send, step, model, t)
    _send_choices(send, step, model, t)
  return result


def _send_weights(
  send: _Send, step: _Step, zero_1: bool, sharded_parameters: int
) -> None:
  """Weights before each microbatch, and gradients after it."""
  R, P, F, T, m, b = step.R, step.P, step.F, step.T, step.m, step.b
  # A stage gathers its layers for each microbatch that passes it.
  passes = step.busy * step.schedule.microbatches / P
  weights = m * passes * b * step.S / T
  gathered = weights - m * passes * b * step.X / T
  send("fsdp", "all-gather", 2 * gathered)  # Forward and backward.
  # A device's part of the layers, or of their gradients, in float32.
  part = m * 4 * step.S / (P * F * T)
  if step.schedule.rounds > 1:
    # Layers go to the stages that use them, and gradients come back.
    send("pipeline", "collective-permute", 2 * part * (P - 1) / P)
  if P > 1:
    # Replicas sum the gradients of a stage once, in float32.
    send("replica", "all-reduce", part)
    summed_over = "sequence"
  else:
    summed_over = _names(("replica", "sequence"), step)
  if R > 1 and zero_1:
    # The updated parameters are gathered in float32.
    send("replica", "all-gather", 4 * sharded_parameters / (F * T))
    everywhere = _names(("replica", "fsdp", "sequence"), step)
    send(everywhere, "reduce-scatter", weights)
  else:
    send("fsdp", "reduce-scatter", gathered)
    send(summed_over, "all-reduce", weights / F)
  # Embedding and head are in all stages.
  tables = 2 * m * b * step.VD / (F * T)
  send(_names(("replica", "pipeline", "sequence"), step), "all-reduce", tables)


def _names(axes: tuple[str, ...], step: _Step) -> str:
  """Names of the axes with several devices, or "replica" if there are none."""
  sizes = {
    "replica": step.R,
    "pipeline": step.P,
    "fsdp": step.F,
    "sequence": step.Q,
  }
  return ", ".join(axis for axis in axes if sizes[axis] > 1) or "replica"


def _send_table_rows(
  send: _Send, step: _Step, model: Blocks, tokens: float
) -> None:
  """Rows of the embedding, the head, and their gradients.

  `tokens` are those of a microbatch on one device.
  """
  F, T, m, b = step.F, step.T, step.m, step.b
  V, D = model.vocab_size, model.width
  # `tensor` splits the vocabulary if it can, and fsdp what is left.
  by_rows = T > 1 and V % T == 0
  placed = {0: ("tensor",)} if by_rows else {}
  fsdp_dim = sharding.largest_free((V, D), F, placed)
  if fsdp_dim is None:
    return  # Neither dimension divides: it is replicated.
  head = b * V * D / (T if by_rows else 1)
  looked_up = tokens if by_rows else tokens / T
  if D % F or looked_up >= V:
    # The embedding is gathered whole, as the head is.
    send("fsdp", "all-gather", m * 2 * head)
    send("fsdp", "reduce-scatter", m * 2 * head)
    return
  # Each device looks up its columns for the tokens of its fsdp group. A table
  # that is split by rows first becomes one by columns.
  columns = b * V * D / F if fsdp_dim == 0 else 0
  numbers_of_tokens = 4 * looked_up * F
  send("fsdp", "all-gather", m * (head + numbers_of_tokens))
  send("fsdp", "reduce-scatter", m * head)
  send("fsdp", "all-to-all", m * 2 * (b * tokens * D / T + columns))


def _is_ring(
  model: Blocks, tokens_per_example: int, b: int, facts: Mapping[str, Any]
) -> bool:
  """Whether attention passes keys and values around a ring."""
  if model.attention != "auto":
    return model.attention == "ring"
  # Splash, on TPUs, gathers them.
  return facts.get("compiler") != "tpu" and attention_backends.prefers_ring(
    tokens_per_example, model.kv_heads, model.head_dim, b
  )


def _send_keys_and_queries(
  send: _Send, step: _Step, model: Blocks, t: float, ring: bool
) -> None:
  """Adds the traffic of attention over `sequence`."""
  Q, T, b = step.Q, step.T, step.b
  layers = step.m * model.depth * step.busy  # Runs of a layer.
  passes = 1 + model.repeats  # Forward, and again in the backward pass.
  # `tensor` needs a multiple of its size, so it copies key-value heads.
  kv_heads = math.lcm(model.kv_heads, T)
  keys = 2 * b * t * kv_heads / T * model.head_dim * layers
  queries = 4 * b * t * model.heads / T * model.head_dim * layers
  exchanged = queries * (1 + passes) / 2
  moved = 0.0
  if ring:
    exchanged += keys * (1 + passes)
    # Gradients pass around in float32.
    moved = keys * (1 + passes) * (Q - 1) / Q + keys * 4 / b
  else:
    send("sequence", "all-gather", keys * passes)
    send("sequence", "reduce-scatter", keys)
  # With two devices, one of the two parts of each stays where it is.
  permuted = moved + exchanged / Q / (2 if Q == 2 else 1)
  send("sequence", "collective-permute", permuted)


def _send_choices(send: _Send, step: _Step, model: Blocks, t: float) -> None:
  """Tokens to the devices of their experts, and back, if loads are even.

  The hidden units of experts are split over `tensor`, so its devices have the
  same tokens.
  """
  runs = step.m * model.choices * step.busy
  ways = 4 + 2 * model.repeats  # There and back, forward and backward.
  send("fsdp", "all-to-all", ways * step.b * t / step.Q * model.width * runs)


def _send_stream(send: _Send, step: _Step, model: Blocks, t: float) -> None:
  """The residual stream within layers, and from stage to stage."""
  P, Q, T = step.P, step.Q, step.T
  stream = step.b * t / Q * model.width * step.m
  layers = model.depth * step.busy
  # Four in each layer, forward and backward, and two outside of the layers.
  gathers = 4 * layers + 2
  scatters = 4 * layers + 2
  if model.repeats:
    gathers += 2 * layers
    scatters += layers
  send("tensor", "all-gather", gathers * stream)
  send("tensor", "reduce-scatter", scatters * stream)
  at_once = step.schedule.microbatches
  moves = 2 + (at_once < P * P)
  moved = moves * step.schedule.rounds * step.busy * P
  moved += min(1, P * (P - 1) / at_once)  # To the outputs' places.
  send("pipeline", "collective-permute", 2 * moved * stream / T)
