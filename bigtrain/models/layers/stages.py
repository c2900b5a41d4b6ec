"""A loop over layers as a pipeline over the mesh's axis `pipeline`.

With P stages and R rounds, the layers are R x P parts of k, and stage s has the
parts r P + s of all rounds r. The M microbatches of a batch follow each other
through the stages, and come back to the first one in the next round. In each of
R M + P - 1 ticks, every stage runs one part on one microbatch and sends the
result on; in P - 1 of them a stage is idle (Huang et al. 2019,
https://arxiv.org/abs/1811.06965; rounds: https://arxiv.org/abs/2104.04473).

Microbatches before their next round wait in a ring over all stages. A stage has
n = M / P of its places, and each tick moves one of them to the stage before. At
first, place j of stage s has the microbatch that enters in tick s n + j. Inputs
and outputs are split over the stages as the batch is outside of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import model_flops, trees
from bigtrain.config.errors import ConfigError

_AXIS = "pipeline"
_INPUT = "layer_input"  # Name of a layer's activations, which are kept.

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
    merge: makes one report out of all microbatches' reports, stacked.
    variables: arrays [N, ...] for the layers.
    shared: arguments of all layers; arrays [B, ...] in them, but not in the
      first `common` ones, are split into microbatches.
    schedule: for this batch.
    policy: which results of a layer the backward pass keeps.

  Each replica runs by itself, so that gradients are summed over them once.
  """
  depth = len(jax.tree.leaves(variables)[0])
  M = schedule.microbatches
  if depth % (parts := schedule.stages * schedule.rounds):
    raise ConfigError(
      f"config.mesh.pipeline_rounds={schedule.rounds}: expected a multiple of "
      f"{parts} layers, or periods of them, got {depth}."
    )
  leaves, treedef = jax.tree.flatten(shared)
  arrays = {i: a for i, a in enumerate(leaves) if isinstance(a, jax.Array)}
  first = len(jax.tree.leaves(shared[:common]))
  batched = {i for i, a in arrays.items() if a.shape[:1] == x.shape[:1]}
  of_batch = {i for i in batched if i >= first}
  arrays |= {i: sharding.to_microbatches(arrays[i], schedule) for i in of_batch}

  def run_part(
    variables_Rk: Any,
    r: jax.Array,
    first: jax.Array,
    x_b: jax.Array,
    arrays: Any,
    number: jax.Array,
  ) -> tuple[jax.Array, Any]:
    part = jax.tree.map(lambda w: w[r if len(w) > 1 else 0], variables_Rk)
    own = {i: a[number] if i in of_batch else a for i, a in arrays.items()}
    shared = [own.get(i, a) for i, a in enumerate(leaves)]

    def one_layer(x_b: jax.Array, of_layer: Any) -> Any:
      variables, i = of_layer
      x_b = checkpoint_name(x_b, _INPUT)
      of_both = key
      if key is not None:
        of_layer = jax.random.fold_in(key, first + i)
        replica = jax.lax.axis_index("replica")
        of_both = jax.random.fold_in(of_layer, M * replica + number)
      own = jax.tree.unflatten(treedef, shared)
      return layer(variables, first + i, of_both, x_b, own)

    k = len(jax.tree.leaves(part)[0])
    return jax.lax.scan(one_layer, x_b, (part, jnp.arange(k)))

  if schedule.rounds > 1:
    run_part = _without_weights(run_part, policy)
  by_stage = PartitionSpec(_AXIS, "replica")
  whole, by_example = PartitionSpec(), PartitionSpec(None, "replica")
  of_arrays = {i: by_example if i in of_batch else whole for i in arrays}
  x_Mb, outputs = jax.shard_map(
    functools.partial(_on_stage, run_part, schedule),
    in_specs=(PartitionSpec(_AXIS), by_stage, of_arrays),
    out_specs=(by_stage, PartitionSpec("replica", None, _AXIS)),
    axis_names={_AXIS, "replica"},
    check_vma=False,  # With it, jax fails on a shard_map inside of this one.
  )(variables, sharding.to_microbatches(x, schedule), arrays)
  flat = lambda y: y.reshape(len(y), depth, *y.shape[4:])
  reports, sums = jax.tree.map(flat, outputs)
  sums = trees.map_with_names(_merged, sums)
  return sharding.from_microbatches(x_Mb, schedule), (merge(reports), sums)


def _merged(name: str, y: jax.Array) -> jax.Array:
  return (jnp.max if name.endswith("largest") else jnp.sum)(y, axis=0)


def _without_weights(run_part: Any, policy: Callable[..., bool]) -> Any:
  """The same, but a tick does not keep the weights of its round."""
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
  stage, n = jax.lax.axis_index(_AXIS), M // P
  variables_Rk = jax.tree.map(lambda w: _of_rounds(w, stage, R), variables)
  k = len(jax.tree.leaves(variables)[0]) // R
  place = P - math.ceil(P / n)  # The stage with the places of the outputs.

  def tick(carry: Any, t: jax.Array) -> Any:
    x_b, ring_nb = carry
    j, number = t % n, (t - stage) % M
    r = jnp.clip((t - stage) // M, 0, R - 1)
    x_b = jnp.where(stage == 0, ring_nb[j], x_b)
    ring_nb = ring_nb.at[j].set(_moved(ring_nb[j], -1))
    args = variables_Rk, r, (r * P + stage) * k, x_b, arrays, number
    x_b, outputs = run_part(*args)
    done_b = x_b
    if place < P - 1:
      done_b = jax.lax.ppermute(x_b, _AXIS, [(P - 1, place)])
    j = (t - (P - 1)) % n
    kept = jnp.where((stage == place) & (t >= P - 1), done_b, ring_nb[j])
    ring_nb = ring_nb.at[j].set(kept)
    x_b = jax.lax.ppermute(x_b, _AXIS, [(s, s + 1) for s in range(P - 1)])
    return (x_b, ring_nb), outputs

  ticks = R * M + P - 1
  with model_flops.share(R * M, ticks):
    # Stages that wait compute with real numbers, and so with finite ones.
    carry = x_nb[0], x_nb
    (_, ring_nb), outputs = jax.lax.scan(tick, carry, jnp.arange(ticks))
  # The last ticks moved places from which nothing enters any more.
  turns = [max(0, math.ceil((P - 1 - j) / n)) for j in range(n)]
  ring_nb = jnp.stack([_moved(x, by) for x, by in zip(ring_nb, turns)])
  valid = lambda y: jax.lax.dynamic_slice_in_dim(y, stage, R * M)
  by_M = lambda y: valid(y).reshape(R, M, 1, *y.shape[1:]).swapaxes(0, 1)
  return ring_nb, jax.tree.map(by_M, outputs)


def _moved(x: jax.Array, by: int) -> jax.Array:
  P = jax.lax.axis_size(_AXIS)
  if not by % P:
    return x
  return jax.lax.ppermute(x, _AXIS, [(s, (s + by) % P) for s in range(P)])


def _of_rounds(w: jax.Array, stage: jax.Array, R: int) -> jax.Array:
  """The parts r P + s of a stage from its own, s R to s R + R - 1."""
  P = jax.lax.axis_size(_AXIS)
  w = w.reshape(R, -1, *w.shape[1:])
  if R == 1:
    return w
  common, s, result = math.gcd(R, P), np.arange(P), w
  for i in range(R):
    c = i // common * common + (i + s // (P // common)) % common
    part = s * R + c
    to = part % P
    round_of = np.zeros(P, int)
    round_of[to] = part // P
    sent = jax.lax.ppermute(
      w[jnp.asarray(c)[stage]], _AXIS, [*zip(s.tolist(), to.tolist())]
    )
    result = result.at[jnp.asarray(round_of)[stage]].set(sent)
  return result
