"""Runs a stack of blocks, unrolled or as a loop.

All blocks may be alike, or they repeat with a period, as where every second
block has experts in place of its MLP. Some layers may come before the first
period, and the last period may not be whole. Parameters are blocks_0, blocks_1,
...; with `scan` one `blocks` whose arrays have a leading axis of layers; with
`scan` and a period, blocks/0, blocks/1, ..., one for each place in the period.
Layers outside of whole periods keep their numbers, as blocks_0. The same key
initialises all of these to the same values.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import moe, remat, stages


class _Period(nn.Module):
  block: Any
  kinds: tuple[Any, ...]

  @nn.compact
  def __call__(
    self, carry: Any, first: jax.Array, *shared: Any
  ) -> tuple[Any, Any]:
    reports = []
    for place, options in enumerate(self.kinds):
      block = self.block(options, name=str(place))
      carry, report = block(carry, first + place, *shared)
      reports.append(report)
    return carry, reports


def run(
  parent: nn.Module,
  block: type[nn.Module],
  kinds: Sequence[Any],
  depth: int,
  carry: Any,
  *shared: Any,
  scan: bool,
  remat_policy: str,
  first: Sequence[Any] = (),
  common: int = 0,
  name: str = "blocks",
  separator: str = "_",
) -> tuple[Any, Any]:
  """Passes `carry` through `depth` blocks.

  Args:
    parent: module that gets the parameters; called from its compact method.
    block: class that is constructed with options and called with (carry, number
      of the layer, *shared), and returns (carry, report or None).
    kinds: options of the blocks of one period.
    shared: arguments of all blocks; the last is `train`.
    scan: whether to compile one period and loop over it.
    first: options of the blocks before the first period.
    common: number of the first shared arguments without an axis of the batch.

  Returns:
    (the last carry, mean of the reports that are not None, or None).
  """
  layers = _Layers(tuple(first), tuple(kinds), depth)
  if parent.is_initializing():
    _init(parent, block, layers, scan, (name, separator), carry, *shared)
  # The block's arguments are self, carry, number and the shared ones.
  block_class = lambda in_loop: remat.block_class(
    block, in_loop, remat_policy, train=2 + len(shared)
  )
  reports: list[tuple[Any, int]] = []

  def unrolled(carry: Any, numbers: Iterable[int]) -> Any:
    separate = block_class(False)
    for i in numbers:
      layer = separate(layers.options(i), name=f"{name}{separator}{i}")
      carry, report = layer(carry, i, *shared)
      reports.append((report, 1))
    return carry

  if not scan or not layers.periods:
    return unrolled(carry, range(depth)), _mean(reports)
  carry = unrolled(carry, range(len(first)))
  period, periods = layers.period, layers.periods
  in_loop = block_class(True)
  arguments = period if len(period) == 1 else (in_loop, period)
  looped: Any = in_loop if len(period) == 1 else _Period
  starts = len(first) + jnp.arange(periods) * len(period)
  x, *cache = jax.tree.leaves(carry)
  schedule = None if cache else sharding.schedule(len(x))
  if schedule and not parent.is_initializing():
    module = looped(*arguments, parent=None)
    policy = remat.policy(remat_policy, scan)
    in_stages = functools.partial(_in_stages, parent, schedule, policy, common)
    carry, stacked = in_stages(module, name, starts, carry, shared)
  else:
    looped = nn.scan(
      looped,
      variable_axes={"params": 0, moe.STATE: 0, moe.STEP_SUMS: 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=(0, *[nn.broadcast] * len(shared)),
      length=periods,
    )
    carry, stacked = looped(*arguments, name=name)(carry, starts, *shared)
  of_places = stacked if len(period) > 1 else [stacked]
  reports += [
    (jax.tree.map(lambda x: jnp.mean(x, axis=0), report), periods)
    for report in of_places
  ]
  carry = unrolled(carry, range(layers.first_of_rest, depth))
  return carry, _mean(reports)


def _in_stages(
  parent: nn.Module,
  schedule: sharding.Schedule,
  policy: Any,
  common: int,
  module: nn.Module,
  name: str,
  starts: jax.Array,
  carry: Any,
  shared: tuple[Any, ...],
) -> tuple[Any, Any]:
  """The loop over `module`, whose variables are arrays of all layers."""
  of_parent = {k: v for k, v in parent.variables.items() if name in v}
  variables = {k: of_parent[k][name] for k in of_parent if k != moe.STEP_SUMS}
  (x,), treedef = jax.tree.flatten(carry)
  writes = parent.is_mutable_collection(moe.STEP_SUMS)

  def layer(
    variables: Any, index: jax.Array, key: Any, x: jax.Array, shared: Any
  ) -> tuple[jax.Array, Any]:
    scope = flax.core.Scope(
      variables,
      rngs={} if key is None else {"dropout": key},
      mutable=[moe.STEP_SUMS] if writes else [],
      path=(*parent.path, name),  # As adapters know it.
    )
    with scope.temporary():
      carry, report = module.clone(parent=scope)(
        jax.tree.unflatten(treedef, [x]), starts[index], *shared
      )
    return jax.tree.leaves(carry)[0], (report, scope.mutable_variables())

  key = parent.make_rng("dropout") if parent.has_rng("dropout") else None
  x, (reports, sums) = stages.run(
    layer, moe.merged, variables, key, x, shared, common, schedule, policy
  )
  for collection, value in sums.items():
    parent.put_variable(collection, name, value)
  return jax.tree.unflatten(treedef, [x]), reports


class _Layers(NamedTuple):
  """Options of a stack's layers: the first ones, then whole periods, a rest."""

  first: tuple[Any, ...]
  period: tuple[Any, ...]
  depth: int

  @property
  def periods(self) -> int:
    return (self.depth - len(self.first)) // len(self.period)

  @property
  def first_of_rest(self) -> int:
    return len(self.first) + self.periods * len(self.period)

  def options(self, layer: int) -> Any:
    if layer < len(self.first):
      return self.first[layer]
    return self.period[(layer - len(self.first)) % len(self.period)]


def _init(
  parent: nn.Module,
  block: type[nn.Module],
  layers: _Layers,
  scan: bool,
  names: tuple[str, str],
  carry: Any,
  *shared: Any,
) -> None:
  name, separator = names
  first, period = len(layers.first), len(layers.period)
  stacked: dict[str, dict[str, Any]] = {}  # By collection and place.
  for options, numbers in _alike(layers):
    module = block(options, parent=None)
    init = lambda key, module=module: module.init(key, carry, 0, *shared)
    keys = jax.random.split(parent.make_rng("params"), len(numbers))
    # One compiled initialiser loops over the layers: compiling the random
    # numbers of each layer takes far longer than drawing them.
    place = str((numbers[0] - first) % period)
    in_loop = layers.periods if scan and numbers[0] >= first else 0
    for collection, arrays in jax.lax.map(init, keys).items():
      if in_loop:
        of_loop = jax.tree.map(lambda x, n=in_loop: x[:n], arrays)
        stacked.setdefault(collection, {})[place] = of_loop
      for row in range(in_loop, len(numbers)):
        one = jax.tree.map(lambda x, row=row: x[row], arrays)
        layer = f"{name}{separator}{numbers[row]}"
        parent.put_variable(collection, layer, one)
  for collection, by_place in stacked.items():
    value = by_place if period > 1 else by_place["0"]
    parent.put_variable(collection, name, value)


def _alike(layers: _Layers) -> list[tuple[Any, list[int]]]:
  """Options and numbers of the layers of each place, and of the first ones."""
  first, period = len(layers.first), len(layers.period)
  groups = [
    (options, list(range(first + place, layers.depth, period)))
    for place, options in enumerate(layers.period)
  ]
  for options in dict.fromkeys(layers.first):
    numbers = [i for i in range(first) if layers.first[i] == options]
    groups.append((options, numbers))
  return [group for group in groups if group[1]]


def _mean(reports: Sequence[tuple[Any, int]]) -> Any:
  """Mean of the reports that are not None, each with its weight."""
  reports = [(x, weight) for x, weight in reports if x is not None]
  if not reports:
    return None
  total = sum(weight for _, weight in reports)
  mean = lambda *xs: (
    sum(x if n == 1 else x * n for x, (_, n) in zip(xs, reports)) / total
  )
  if len(reports) == 1:
    return reports[0][0]
  return jax.tree.map(mean, *[x for x, _ in reports])
