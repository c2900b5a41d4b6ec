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
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import moe, remat, stages

# Collections that modules write while they run. The second has statistics of
# activations, see objective/activations.py.
_WRITTEN = (moe.STEP_SUMS, "activation_stats")


class _Period(nn.Module):
  blocks: tuple[Any, ...]
  kinds: tuple[Any, ...]

  @nn.compact
  def __call__(
    self, carry: Any, first: jax.Array, *shared: Any
  ) -> tuple[Any, Any]:
    reports = []
    for place, options in enumerate(self.kinds):
      block = self.blocks[place](options, name=str(place))
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
  policy, every = remat.read(remat_policy)
  policy_of = lambda layer: "none" if (layer + 1) % every else policy
  # The block's arguments are self, carry, number and the shared ones.
  block_class = functools.cache(
    lambda in_loop, policy: remat.block_class(
      block, in_loop, policy, train=2 + len(shared)
    )
  )
  reports: list[tuple[Any, int]] = []

  def unrolled(carry: Any, numbers: Iterable[int]) -> Any:
    for i in numbers:
      separate = block_class(False, policy_of(i))
      layer = separate(layers.options(i), name=f"{name}{separator}{i}")
      carry, report = layer(carry, i, *shared)
      reports.append((report, 1))
    return carry

  if not scan or not layers.periods:
    return unrolled(carry, range(depth)), _mean(reports)
  carry = unrolled(carry, range(len(first)))
  period, periods = layers.period, layers.periods

  def in_loop(start: int) -> tuple[Any, tuple[Any, ...]]:
    """Class and arguments of the period that starts with a layer."""
    places = range(start, start + len(period))
    blocks = tuple(block_class(True, policy_of(i)) for i in places)
    return (_Period, (blocks, period)) if period[1:] else (blocks[0], period)

  starts = len(first) + jnp.arange(periods) * len(period)
  x, *cache = jax.tree.leaves(carry)
  schedule = None if cache else sharding.schedule(len(x))
  num = 1 if cache else _at_once(every, layers, schedule is not None)
  keeps = remat.policy(policy, scan)
  loop = functools.partial(_loop, parent, in_loop, layers, num, common)
  carry, stacked = loop(schedule, keeps, name, starts, carry, shared)
  of_places = stacked if len(period) > 1 else [stacked]
  reports += [
    (jax.tree.map(lambda x: jnp.mean(x, axis=0), report), periods)
    for report in of_places
  ]
  carry = unrolled(carry, range(layers.first_of_rest, depth))
  return carry, _mean(reports)


def _loop(
  parent: nn.Module,
  in_loop: Callable[[int], tuple[Any, Any]],
  layers: "_Layers",
  num: int,
  common: int,
  schedule: sharding.Schedule | None,
  keeps: Any,
  name: str,
  starts: jax.Array,
  carry: Any,
  shared: tuple[Any, ...],
) -> tuple[Any, Any]:
  """The loop over whole periods, `num` of them in a turn."""
  first, period = len(layers.first), len(layers.period)
  if (schedule or num > 1) and not parent.is_initializing():
    made = [in_loop(i) for i in range(first, layers.depth, period)[:num]]
    modules = [cls(*args, parent=None) for cls, args in made]
    run_loop = functools.partial(_in_turns, modules)
    if schedule:
      run_loop = functools.partial(
        _in_stages, modules[0], schedule, keeps, common
      )
    carry, (reports, sums) = run_loop(parent, name, starts, carry, shared)
    for collection, value in sums.items():
      parent.put_variable(collection, name, value)
    return carry, reports
  cls, args = in_loop(first)
  looped = nn.scan(
    cls,
    variable_axes=dict.fromkeys(("params", moe.STATE, *_WRITTEN), 0),
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, *[nn.broadcast] * len(shared)),
    length=layers.periods,
  )
  return looped(*args, name=name)(carry, starts, *shared)


def _at_once(every: int, layers: "_Layers", in_stages: bool) -> int:
  """Number of periods in a turn of the loop, so that all turns are alike."""
  period = len(layers.period)
  num = math.lcm(every, period) // period
  if num > 1 and (in_stages or layers.periods % num):
    raise ConfigError(
      f"config.model.remat_policy: every={every}: expected a divisor of the "
      f"{layers.periods * period} layers in a loop, and no "
      "config.mesh.pipeline."
    )
  return num


def _as_function(
  module: nn.Module, parent: nn.Module, name: str
) -> Callable[..., Any]:
  """(variables, key of dropout, carry, ...) -> (carry, (report, sums))."""
  mutable = [name for name in _WRITTEN if parent.is_mutable_collection(name)]

  def call(variables: Any, key: Any, *args: Any) -> Any:
    scope = flax.core.Scope(
      variables,
      rngs={} if key is None else {"dropout": key},
      mutable=mutable,
      path=(*parent.path, name),  # As adapters know it.
    )
    with scope.temporary():
      carry, report = module.clone(parent=scope)(*args)
    return carry, (report, scope.mutable_variables())

  return call


def _inputs(parent: nn.Module, name: str) -> tuple[Any, Any]:
  """Variables of the loop, arrays of all layers, and the key of dropout."""
  variables = {
    collection: content[name]
    for collection, content in parent.variables.items()
    if name in content and collection not in _WRITTEN
  }
  key = parent.make_rng("dropout") if parent.has_rng("dropout") else None
  return variables, key


def _in_turns(
  modules: Sequence[nn.Module],
  parent: nn.Module,
  name: str,
  starts: jax.Array,
  carry: Any,
  shared: tuple[Any, ...],
) -> tuple[Any, Any]:
  """The loop over periods, one for each of the modules in a turn.

  Returns, as `_in_stages`, (carry, (reports, sums to put into variables)).
  """
  variables, key = _inputs(parent, name)
  calls = [_as_function(module, parent, name) for module in modules]
  leaves, treedef = jax.tree.flatten((variables, starts))

  def turn(carry: Any, leaves: Any) -> Any:
    outputs = []
    split = [jax.lax.split(w, [1] * len(calls)) for w in leaves]
    for call, *own in zip(calls, *split):
      variables, start = jax.tree.unflatten(treedef, [w[0] for w in own])
      own_key = None if key is None else jax.random.fold_in(key, start)
      carry, output = call(variables, own_key, carry, start, *shared)
      outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)

  by_turn = [w.reshape(-1, len(calls), *w.shape[1:]) for w in leaves]
  carry, outputs = jax.lax.scan(turn, carry, by_turn)
  return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def _in_stages(
  module: nn.Module,
  schedule: sharding.Schedule,
  policy: Any,
  common: int,
  parent: nn.Module,
  name: str,
  starts: jax.Array,
  carry: Any,
  shared: tuple[Any, ...],
) -> tuple[Any, Any]:
  """The loop over `module`, over the stages of a pipeline."""
  variables, key = _inputs(parent, name)
  call = _as_function(module, parent, name)
  (x,), treedef = jax.tree.flatten(carry)

  def layer(
    variables: Any, index: jax.Array, key: Any, x: jax.Array, shared: Any
  ) -> tuple[jax.Array, Any]:
    carry = jax.tree.unflatten(treedef, [x])
    carry, outputs = call(variables, key, carry, starts[index], *shared)
    return jax.tree.leaves(carry)[0], outputs

  x, outputs = stages.run(
    layer, moe.merged, variables, key, x, shared, common, schedule, policy
  )
  return jax.tree.unflatten(treedef, [x]), outputs


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
