"""Runs a stack of blocks, unrolled or as a loop.

All blocks may be alike, or they may repeat with a period, for example if every
second block has experts in place of its MLP. A few layers may come before the
first period, and the last period may be incomplete. With `first` = (a,), a
period (b, c) and a depth of 6 the layers are a b c b c b.

Unrolled, the parameters are blocks_0, blocks_1, ... With `scan` and one kind of
block they are one `blocks`, whose arrays have a leading axis of layers. With
`scan` and a period they are blocks/0, blocks/1, ..., one for each place in the
period. Layers outside of whole periods are never in the loop and keep names
like blocks_0. All of these layouts have the same initial values.

`run` is the only entry. The loop over whole periods is one of three: `_scan`,
flax's own; `_scan_turns`, if rematerialisation distinguishes several periods;
`_scan_stages`, over the stages of a pipeline (stages.py).
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import attention_logits, moe, remat, stages

# Collections that modules write while they run: sums over the tokens of a step,
# its largest logits, and statistics of activations (objective/activations.py).
_WRITTEN = (moe.STEP_SUMS, attention_logits.STEP_LARGEST, "activation_stats")


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
    carry: activations, or a tuple of activations, the cache in generation (else
      None), and perhaps arrays of the first layers that the loop only reads.
    shared: arguments of all blocks; the last is `train`.
    scan: whether to compile one period and loop over it.
    first: options of the blocks before the first period.
    common: number of leading shared arguments that have no batch axis.

  Returns:
    (the last carry, mean of the reports that are not None, or None). Beside the
    means, "by_layer" has what moe.of_layers returns.
  """
  layers = _Layers(tuple(first), tuple(kinds), depth)
  policy, policy_every = remat.read(remat_policy)
  if parent.is_initializing():
    if scan and layers.num_periods:
      _turns(layers, policy_every, carry)  # Refuses a policy that does not fit.
    _init(parent, block, layers, scan, (name, separator), carry, shared)
    return carry, None

  # Cached, because layers share a trace only if they share the class.
  @functools.cache
  def class_with_policy(policy: str, in_loop: bool) -> type[nn.Module]:
    # The block's arguments are self, carry, number and the shared ones.
    return remat.block_class(block, in_loop, policy, train=2 + len(shared))

  def block_class(layer: int, *, in_loop: bool) -> type[nn.Module]:
    has_policy = (layer + 1) % policy_every == 0
    return class_with_policy(policy if has_policy else "none", in_loop)

  reports: list[tuple[Any, int]] = []  # Each with the number of its layers.
  by_layer: dict[str, Any] = {}

  def run_unrolled(carry: Any, numbers: Iterable[int]) -> Any:
    for number in numbers:
      layer_class = block_class(number, in_loop=False)
      layer = layer_class(
        layers.options(number), name=f"{name}{separator}{number}"
      )
      carry, report = layer(carry, number, *shared)
      reports.append((report, 1))
      by_layer.update(moe.of_layers(report, [number], stacked=False))
    return carry

  if not scan or not layers.num_periods:
    carry = run_unrolled(carry, range(depth))
    return carry, _summary(reports, by_layer)

  carry = run_unrolled(carry, range(layers.first_of_loop))
  loop = _Loop(parent, name, layers, block_class)
  carry, stacked = _run_loop(loop, policy, policy_every, common, carry, shared)
  period = len(layers.period)
  for place, report in enumerate(stacked if period > 1 else [stacked]):
    mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), report)
    reports.append((mean, layers.num_periods))
    numbers = range(layers.first_of_loop + place, layers.first_of_rest, period)
    by_layer |= moe.of_layers(report, numbers, stacked=True)

  carry = run_unrolled(carry, range(layers.first_of_rest, depth))
  return carry, _summary(reports, by_layer)


class _Layers(NamedTuple):
  """Options of a stack's layers: first layers, whole periods, and a rest."""

  first: tuple[Any, ...]
  period: tuple[Any, ...]
  depth: int

  @property
  def num_periods(self) -> int:
    return (self.depth - len(self.first)) // len(self.period)

  @property
  def first_of_loop(self) -> int:
    return len(self.first)

  @property
  def first_of_rest(self) -> int:
    return len(self.first) + self.num_periods * len(self.period)

  def options(self, layer: int) -> Any:
    if layer < len(self.first):
      return self.first[layer]
    return self.period[(layer - len(self.first)) % len(self.period)]


class _Period(nn.Module):
  """The blocks of one period, as one module."""

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


class _Loop(NamedTuple):
  """The whole periods of a stack, which run in a loop."""

  parent: nn.Module
  name: str  # Of their variables in the parent.
  layers: _Layers
  block_class: Callable[..., type[nn.Module]]

  def starts(self) -> jax.Array:
    """Number of the first layer of each period."""
    periods = jnp.arange(self.layers.num_periods)
    return self.layers.first_of_loop + periods * len(self.layers.period)

  def period(self, number: int) -> tuple[type[nn.Module], tuple[Any, ...]]:
    """Class and arguments of a period, or of its block if it has only one."""
    options = self.layers.period
    start = self.layers.first_of_loop + number * len(options)
    blocks = tuple(
      self.block_class(start + place, in_loop=True)
      for place in range(len(options))
    )
    if len(options) == 1:
      return blocks[0], options
    return _Period, (blocks, options)

  def inputs(self) -> tuple[dict[str, Any], Any]:
    """Variables of the loop, arrays of all layers, and the key of dropout."""
    parent, name = self.parent, self.name
    variables = {
      collection: content[name]
      for collection, content in parent.variables.items()
      if name in content and collection not in _WRITTEN
    }
    key = parent.make_rng("dropout") if parent.has_rng("dropout") else None
    return variables, key

  def put(self, written: Mapping[str, Any]) -> None:
    for collection, value in written.items():
      self.parent.put_variable(collection, self.name, value)


def _run_loop(
  loop: _Loop,
  policy: str,
  policy_every: int,
  common: int,
  carry: Any,
  shared: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Returns (the last carry, the reports of all periods, stacked)."""
  num_periods, schedule = _turns(loop.layers, policy_every, carry)
  if schedule is not None:
    keeps = remat.policy(policy, scan=True)
    return _scan_stages(loop, schedule, keeps, common, carry, shared)
  if num_periods > 1:
    return _scan_turns(loop, num_periods, carry, shared)
  return _scan(loop, carry, shared)


def _turns(
  layers: _Layers, policy_every: int, carry: Any
) -> tuple[int, sharding.Schedule | None]:
  """Number of periods in a turn of the loop, and the schedule of a pipeline."""
  activations = jax.tree.leaves(carry)[0]
  cache = carry[1] if isinstance(carry, tuple) else None
  # Generation, which has caches, runs period by period: it has no backward
  # pass, and a pipeline would need several microbatches.
  if jax.tree.leaves(cache):
    return 1, None
  schedule = sharding.schedule(len(activations))
  num_periods = _periods_per_turn(layers, policy_every)
  _check_turns(layers, policy_every, num_periods, schedule)
  return num_periods, schedule


def _periods_per_turn(layers: _Layers, policy_every: int) -> int:
  """Number of periods in a turn of the loop, so that all turns are alike.

  For example, with a period of 2 layers and a policy for every third layer, the
  layers repeat after 6, which is 3 periods.
  """
  period = len(layers.period)
  return math.lcm(policy_every, period) // period


def _check_turns(
  layers: _Layers,
  policy_every: int,
  num_periods: int,
  schedule: sharding.Schedule | None,
) -> None:
  if num_periods == 1:
    return
  if schedule is not None or layers.num_periods % num_periods:
    num_layers = layers.num_periods * len(layers.period)
    raise ConfigError(
      f"config.model.remat_policy: every={policy_every}: expected a divisor of "
      f"the {num_layers} layers in a loop, and no config.mesh.pipeline."
    )


def _scan(loop: _Loop, carry: Any, shared: tuple[Any, ...]) -> tuple[Any, Any]:
  """The loop, with one period per turn."""
  period_class, args = loop.period(0)
  looped = nn.scan(
    period_class,
    variable_axes=dict.fromkeys(("params", moe.STATE, *_WRITTEN), 0),
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, *[nn.broadcast] * len(shared)),
    length=loop.layers.num_periods,
  )
  return looped(*args, name=loop.name)(carry, loop.starts(), *shared)


def _scan_turns(
  loop: _Loop, num_periods: int, carry: Any, shared: tuple[Any, ...]
) -> tuple[Any, Any]:
  """The loop, with several periods per iteration, each with its own classes."""
  calls = []
  for number in range(num_periods):
    period_class, args = loop.period(number)
    calls.append(_as_function(period_class(*args, parent=None), loop))
  variables, key = loop.inputs()
  leaves, treedef = jax.tree.flatten((variables, loop.starts()))

  def turn(carry: Any, leaves: Any) -> Any:
    # `leaves` are arrays [num_periods, ...]: those of the periods of one turn.
    outputs = []
    slices = [jax.lax.split(leaf, [1] * num_periods) for leaf in leaves]
    for number, call in enumerate(calls):
      of_period = [slices_of_leaf[number][0] for slices_of_leaf in slices]
      variables, start = jax.tree.unflatten(treedef, of_period)
      period_key = None if key is None else jax.random.fold_in(key, start)
      carry, output = call(variables, period_key, carry, start, *shared)
      outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)

  by_turn = [leaf.reshape(-1, num_periods, *leaf.shape[1:]) for leaf in leaves]
  carry, outputs = jax.lax.scan(turn, carry, by_turn)
  reports, written = jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[2:]), outputs
  )
  loop.put(written)
  return carry, reports


def _scan_stages(
  loop: _Loop,
  schedule: sharding.Schedule,
  policy: Any,
  common: int,
  carry: Any,
  shared: tuple[Any, ...],
) -> tuple[Any, Any]:
  """The loop, over the stages of a pipeline."""
  period_class, args = loop.period(0)
  call = _as_function(period_class(*args, parent=None), loop)
  variables, key = loop.inputs()
  starts = loop.starts()
  # A pipeline passes a single array from stage to stage. So the stream and any
  # copies of it in the carry, such as taps, become one array (B, 1 + number, L,
  # D). The other arrays of the carry are only read.
  leaves, treedef = jax.tree.flatten(carry)
  stream, *others = leaves
  has_copies = any(_is_copy(leaf, stream) for leaf in others)
  constants = [leaf for leaf in others if not _is_copy(leaf, stream)]

  def packed(carry: Any) -> jax.Array:
    stream, *others = jax.tree.leaves(carry)
    if not has_copies:
      return stream
    copies = others[0]
    return jnp.concatenate([stream[:, None], copies], 1)

  def unpacked(x: jax.Array, constants: Sequence[Any]) -> Any:
    if not has_copies:
      return jax.tree.unflatten(treedef, [x, *constants])
    stream, copies = x[:, 0], x[:, 1:]
    return jax.tree.unflatten(treedef, [stream, copies, *constants])

  def layer(
    variables: Any, index: jax.Array, key: Any, x: jax.Array, shared: Any
  ) -> tuple[jax.Array, Any]:
    *shared, constants = shared
    carry = unpacked(x, constants)
    carry, outputs = call(variables, key, carry, starts[index], *shared)
    return packed(carry), outputs

  # They follow their microbatch through the stages, as the shared arguments do.
  shared = (*shared, constants)
  x, (reports, written) = stages.run(
    layer,
    moe.merged,
    variables,
    key,
    packed(carry),
    shared,
    common,
    schedule,
    policy,
  )
  loop.put(written)
  return unpacked(x, constants), reports


def _is_copy(leaf: jax.Array, x_BLD: jax.Array) -> bool:
  """Whether an array has copies of the stream, (B, number, L, D)."""
  shape = (*leaf.shape[:1], *leaf.shape[2:])
  return leaf.ndim == 4 and shape == x_BLD.shape and leaf.dtype == x_BLD.dtype


def _as_function(module: nn.Module, loop: _Loop) -> Callable[..., Any]:
  """(variables, key of dropout, carry, ...) -> (carry, (report, written)).

  jax's transformations need a function without flax's state: `written` has the
  collections that the module would have changed in place.
  """
  parent = loop.parent
  mutable = [name for name in _WRITTEN if parent.is_mutable_collection(name)]

  def call(variables: Any, key: Any, *args: Any) -> Any:
    scope = flax.core.Scope(
      variables,
      rngs={} if key is None else {"dropout": key},
      mutable=mutable,
      path=(*parent.path, loop.name),  # Adapters find their kernels by it.
    )
    with scope.temporary():
      carry, report = module.clone(parent=scope)(*args)
    return carry, (report, scope.mutable_variables())

  return call


def _init(
  parent: nn.Module,
  block: type[nn.Module],
  layers: _Layers,
  scan: bool,
  names: tuple[str, str],
  carry: Any,
  shared: tuple[Any, ...],
) -> None:
  """Draws the parameters of all layers, without running them.

  A layer's output has the shape of its input, and later modules need only this
  shape to draw their own parameters.

  Layers that are alike share one compiled initialiser, which loops over them:
  compiling the random numbers of each layer takes far longer than drawing them.
  """
  name, separator = names
  period = len(layers.period)
  stacked: dict[str, dict[str, Any]] = {}  # By collection and place.
  for options, numbers in _alike(layers):
    module = block(options, parent=None)

    def init(key: jax.Array, module: nn.Module = module) -> Any:
      return module.init(key, carry, 0, *shared)

    # Arrays [number of these layers, ...] by collection.
    keys = jax.random.split(parent.make_rng("params"), len(numbers))
    variables = jax.lax.map(init, keys)
    # The first `num_looped` of these layers are in the loop and keep their
    # common array; each of the others gets its own.
    in_loop = scan and numbers[0] >= layers.first_of_loop
    num_looped = layers.num_periods if in_loop else 0
    place = str((numbers[0] - layers.first_of_loop) % period)
    for collection, arrays in variables.items():
      if num_looped:
        looped = _at(arrays, slice(num_looped))
        stacked.setdefault(collection, {})[place] = looped
      for index in range(num_looped, len(numbers)):
        layer_name = f"{name}{separator}{numbers[index]}"
        parent.put_variable(collection, layer_name, _at(arrays, index))
  # The loop's variables: of each place in the period, or of the only block.
  for collection, by_place in stacked.items():
    value = by_place if period > 1 else by_place["0"]
    parent.put_variable(collection, name, value)


def _at(arrays: Any, index: int | slice) -> Any:
  """Some layers, or one, of a tree of arrays [layers, ...]."""
  return jax.tree.map(lambda x: x[index], arrays)


def _alike(layers: _Layers) -> list[tuple[Any, list[int]]]:
  """Groups of layers with equal parameters: their options and their numbers.

  The layers in the same place of a period form a group, and so do the first
  layers that have equal options.
  """
  groups: list[tuple[Any, list[int]]] = []
  period = len(layers.period)
  for place, options in enumerate(layers.period):
    numbers = range(layers.first_of_loop + place, layers.depth, period)
    if numbers:  # A stack may be shorter than its period.
      groups.append((options, list(numbers)))
  of_first: dict[Any, list[int]] = {}
  for number, options in enumerate(layers.first):
    of_first.setdefault(options, []).append(number)
  return [*groups, *of_first.items()]


def _summary(
  reports: Sequence[tuple[Any, int]], by_layer: Mapping[str, Any]
) -> Any:
  """The mean of the reports, and what they say about each layer."""
  with_report = []
  for report, num_layers in reports:
    if report is not None:
      # Layers of several kinds need not all have a bias.
      report = {name: x for name, x in report.items() if name != "bias"}
      with_report.append((report, num_layers))
  if not with_report:
    return None
  return {**_mean(with_report), "by_layer": dict(by_layer)}


def _mean(reports: Sequence[tuple[Any, int]]) -> Any:
  """Mean of reports, each weighted by its number of layers."""
  if len(reports) == 1:
    return reports[0][0]
  weights = [num_layers for _, num_layers in reports]

  def mean(*values: jax.Array) -> Any:
    total: Any = 0
    for value, weight in zip(values, weights):
      total = total + (value if weight == 1 else value * weight)
    return total / sum(weights)

  return jax.tree.map(mean, *[report for report, _ in reports])
