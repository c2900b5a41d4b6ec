"""A loop over layers as a pipeline over the mesh's axis `pipeline`.

With P stages and R rounds, the layers are split into R x P parts of k layers,
and stage s has the parts r P + s of all rounds r. The M microbatches of a batch
follow each other through the stages, and return to the first stage for the next
round. In each of R M + P - 1 ticks, every stage runs one part on one microbatch
and sends the result on; in P - 1 of them a stage is idle (Huang et al. 2019,
https://arxiv.org/abs/1811.06965; rounds: https://arxiv.org/abs/2104.04473).

Microbatches that wait for their next round are in a ring over all stages. A
stage has n = M / P places of the ring, and each tick moves one of them to the
stage before. At first, place j of stage s has the microbatch that enters in
tick s n + j. Inputs and outputs are split over the stages like the batch
outside the pipeline.

Axes: B batch, b a microbatch's examples on a replica, and the letters above.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import model_flops, trees
from bigtrain.config.errors import ConfigError

_AXIS = "pipeline"
# Name of the activations before each layer, which the backward pass keeps.
_INPUT = "layer_input"

# (variables of a layer, its index, key or None, activations, shared arguments)
# -> (activations, (report, sums)).
Layer = Callable[..., tuple[jax.Array, Any]]


def run(
  layer: Layer,
  merge: Callable[[Any], Any],
  variables: Any,
  key: jax.Array | None,
  x: jax.Array,
  shared: tuple[Any, ...],
  common: int,
  schedule: sharding.Schedule,
  policy: Callable[..., bool],
) -> tuple[jax.Array, tuple[Any, Any]]:
  """Returns (x [B, ...] after all layers, (reports, sums)).

  Args:
    layer: called in a loop.
    merge: makes one report from the stacked reports of all microbatches.
    variables: arrays [N, ...] for the layers.
    shared: arguments of all layers; arrays [B, ...] in them, but not in the
      first `common` ones, are split into microbatches.
    schedule: for this batch.
    policy: which results of a layer the backward pass keeps.

  Each replica runs by itself, so that gradients are summed over replicas once.
  """
  depth = len(jax.tree.leaves(variables)[0])
  num_parts = schedule.stages * schedule.rounds
  if depth % num_parts:
    raise ConfigError(
      f"config.mesh.pipeline_rounds={schedule.rounds}: expected a multiple of "
      f"{num_parts} layers, or periods of them, got {depth}."
    )

  shared_leaves, arrays = _split(shared, common, len(x), schedule)
  run_part: Any = functools.partial(
    _run_part, layer, shared_leaves, schedule.microbatches, key
  )
  if schedule.rounds > 1:
    run_part = _without_weights(run_part, policy)
  by_stage = PartitionSpec(_AXIS, "replica")
  by_example = PartitionSpec(None, "replica")
  array_specs = {
    i: by_example if i in shared_leaves.of_batch else PartitionSpec()
    for i in arrays
  }
  x_Mb, outputs = jax.shard_map(
    functools.partial(_on_stage, run_part, schedule),
    in_specs=(PartitionSpec(_AXIS), by_stage, array_specs),
    out_specs=(by_stage, PartitionSpec("replica", None, _AXIS)),
    axis_names={_AXIS, "replica"},
    check_vma=False,  # With it, jax fails on a shard_map inside of this one.
  )(variables, sharding.to_microbatches(x, schedule), arrays)
  # [M, R, P, k, ...] to [M, N, ...].
  outputs = jax.tree.map(
    lambda y: y.reshape(len(y), depth, *y.shape[4:]), outputs
  )
  reports, sums = outputs
  sums = trees.map_with_names(_merged, sums)
  return sharding.from_microbatches(x_Mb, schedule), (merge(reports), sums)


class _Shared(NamedTuple):
  """The shared arguments; their arrays travel separately, by index."""

  leaves: list[Any]
  treedef: Any
  of_batch: set[int]  # Indices of the arrays that have an axis of the batch.

  def of_microbatch(self, arrays: dict[int, Any], number: jax.Array) -> Any:
    """The shared arguments for one microbatch."""
    own = list(self.leaves)
    for i, array in arrays.items():
      own[i] = array[number] if i in self.of_batch else array
    return jax.tree.unflatten(self.treedef, own)


def _split(
  shared: tuple[Any, ...],
  common: int,
  batch_size: int,
  schedule: sharding.Schedule,
) -> tuple[_Shared, dict[int, jax.Array]]:
  """Splits the arrays of the batch into microbatches.

  They follow their examples through the stages.
  """
  leaves, treedef = jax.tree.flatten(shared)
  num_common = len(jax.tree.leaves(shared[:common]))
  arrays: dict[int, jax.Array] = {}
  of_batch: set[int] = set()
  for i, leaf in enumerate(leaves):
    if isinstance(leaf, jax.Array):
      arrays[i] = leaf
      if i >= num_common and leaf.shape[:1] == (batch_size,):
        arrays[i] = sharding.to_microbatches(leaf, schedule)
        of_batch.add(i)
  return _Shared(leaves, treedef, of_batch), arrays


def _run_part(
  layer: Layer,
  shared: _Shared,
  num_microbatches: int,
  key: jax.Array | None,
  variables_Rk: Any,
  r: jax.Array,
  first: jax.Array,
  x_b: jax.Array,
  arrays: Any,
  microbatch: jax.Array,
) -> tuple[jax.Array, Any]:
  """Runs a part of k layers, from number `first` on, on a microbatch."""
  part = jax.tree.map(lambda w: w[r if len(w) > 1 else 0], variables_Rk)
  own_shared = shared.of_microbatch(arrays, microbatch)

  def one_layer(x_b: jax.Array, of_layer: Any) -> Any:
    variables, i = of_layer
    x_b = checkpoint_name(x_b, _INPUT)
    layer_key = None
    if key is not None:
      replica = jax.lax.axis_index("replica")
      group = num_microbatches * replica + microbatch
      layer_key = jax.random.fold_in(key, first + i)
      layer_key = jax.random.fold_in(layer_key, group)
    return layer(variables, first + i, layer_key, x_b, own_shared)

  k = len(jax.tree.leaves(part)[0])
  return jax.lax.scan(one_layer, x_b, (part, jnp.arange(k)))


def _merged(name: str, y: jax.Array) -> jax.Array:
  """A sum or a maximum over the microbatches, depending on the name."""
  if name.endswith("largest"):
    return jnp.max(y, axis=0)
  return jnp.sum(y, axis=0)


def _without_weights(run_part: Any, policy: Callable[..., bool]) -> Any:
  """The same, but the backward pass does not keep each tick's weights."""
  policies = jax.checkpoint_policies
  policy = policies.save_from_both_policies(
    policy, policies.save_only_these_names(_INPUT)
  )
  return jax.checkpoint(run_part, policy=policy, prevent_cse=False)


def _on_stage(
  run_part: Callable[..., tuple[jax.Array, Any]],
  schedule: sharding.Schedule,
  variables: Any,
  x_nb: jax.Array,
  arrays: Any,
) -> tuple[jax.Array, Any]:
  """A stage's places of the ring, and its layers' outputs [M, R, 1, k, ...]."""
  P, R, M = schedule.stages, schedule.rounds, schedule.microbatches
  n = M // P
  stage = jax.lax.axis_index(_AXIS)
  variables_Rk = jax.tree.map(lambda w: _of_rounds(w, stage, R), variables)
  k = len(jax.tree.leaves(variables)[0]) // R
  last = P - 1
  # The stage whose place gets a result of the last stage: from there, the ring
  # brings it to the first stage for the tick in which it enters again.
  place_stage = P - math.ceil(P / n)
  num_ticks = R * M + P - 1

  def tick(carry: Any, t: jax.Array) -> Any:
    x_b, ring_nb = carry
    j, microbatch = t % n, (t - stage) % M
    r = jnp.clip((t - stage) // M, 0, R - 1)
    # The first stage takes the next microbatch out of the ring, which moves on;
    # the others got theirs from the stage before.
    x_b = jnp.where(stage == 0, ring_nb[j], x_b)
    ring_nb = ring_nb.at[j].set(_moved(ring_nb[j], -1))

    first = (r * P + stage) * k
    x_b, outputs = run_part(variables_Rk, r, first, x_b, arrays, microbatch)

    # The last stage puts its result into the ring, for the next round.
    done_b = x_b
    if place_stage < last:
      done_b = jax.lax.ppermute(x_b, _AXIS, [(last, place_stage)])
    j = (t - last) % n
    is_place = (stage == place_stage) & (t >= last)
    ring_nb = ring_nb.at[j].set(jnp.where(is_place, done_b, ring_nb[j]))
    x_b = jax.lax.ppermute(x_b, _AXIS, [(s, s + 1) for s in range(last)])
    return (x_b, ring_nb), outputs

  with model_flops.share(R * M, num_ticks):
    # Stages that wait compute with real numbers, and so with finite ones.
    carry = x_nb[0], x_nb
    (_, ring_nb), outputs = jax.lax.scan(tick, carry, jnp.arange(num_ticks))
  # The last ticks moved places from which nothing enters any more: back again.
  turns = [max(0, math.ceil((last - j) / n)) for j in range(n)]
  ring_nb = jnp.stack([_moved(x, by) for x, by in zip(ring_nb, turns)])

  def by_microbatch(y: jax.Array) -> jax.Array:
    # Without the ticks in which this stage was idle.
    y = jax.lax.dynamic_slice_in_dim(y, stage, R * M)
    return y.reshape(R, M, 1, *y.shape[1:]).swapaxes(0, 1)

  return ring_nb, jax.tree.map(by_microbatch, outputs)


def _moved(x: jax.Array, by: int) -> jax.Array:
  """Sends x to the stage that is `by` further, around the ring."""
  P = jax.lax.axis_size(_AXIS)
  if by % P == 0:
    return x
  return jax.lax.ppermute(x, _AXIS, [(s, (s + by) % P) for s in range(P)])


def _of_rounds(w: jax.Array, stage: jax.Array, R: int) -> jax.Array:
  """A stage's layers, [R, k, ...], in the order of its rounds.

  The mesh gives stage s the consecutive parts s R to s R + R - 1, but it needs
  the parts r P + s. They move in R permutations: in each, every stage sends one
  of its parts to the stage that needs it, and no two stages send to the same
  one.
  """
  P = jax.lax.axis_size(_AXIS)
  w = w.reshape(R, -1, *w.shape[1:])
  if R == 1:
    return w
  common = math.gcd(R, P)
  stages = np.arange(P)
  result = w
  for i in range(R):
    # Index of the part that each stage sends, among its own.
    index = i // common * common + (i + stages // (P // common)) % common
    part = stages * R + index
    receiver = part % P
    round_at_receiver = np.zeros(P, int)
    round_at_receiver[receiver] = part // P
    sent = jax.lax.ppermute(
      w[jnp.asarray(index)[stage]],
      _AXIS,
      list(zip(stages.tolist(), receiver.tolist())),
    )
    result = result.at[jnp.asarray(round_at_receiver)[stage]].set(sent)
  return result
