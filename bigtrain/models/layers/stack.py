"""Runs a stack of blocks, unrolled or as a loop.

All blocks may be alike, or they repeat with a period, as where every second
block has experts in place of its MLP. Parameters are blocks_0, blocks_1, ...;
with `scan` one `blocks` whose arrays have a leading axis of layers; with `scan`
and a period, blocks/0, blocks/1, ..., one for each place in the period. The
same key initialises all of these to the same values.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import remat


class _Period(nn.Module):
  block: Any
  kinds: tuple[Any, ...]

  @nn.compact
  def __call__(
    self, carry: Any, number: jax.Array, *shared: Any
  ) -> tuple[Any, Any]:
    reports = []
    for place, options in enumerate(self.kinds):
      layer = number * len(self.kinds) + place
      block = self.block(options, name=str(place))
      carry, report = block(carry, layer, *shared)
      reports.append(report)
    return carry, _mean(reports)


def run(
  parent: nn.Module,
  block: type[nn.Module],
  kinds: Sequence[Any],
  depth: int,
  carry: Any,
  *shared: Any,
  scan: bool,
  remat_policy: str,
  name: str = "blocks",
  separator: str = "_",
) -> tuple[Any, Any]:
  """Passes `carry` through `depth` blocks.

  Args:
    parent: module that gets the parameters; called from its compact method.
    block: class that is constructed with options and called with (carry, number
      of the layer, *shared), and returns (carry, report or None).
    kinds: options of the blocks of one period; its length divides `depth`.
    shared: arguments of all blocks; the last is `train`.
    scan: whether to compile one period and loop over it.

  Returns:
    (the last carry, mean of the reports that are not None, or None).
  """
  kinds, period = tuple(kinds), len(kinds)
  if parent.is_initializing():
    places = _init(parent, block, kinds, depth, carry, *shared)
    if not scan:
      for i in range(depth):
        pick = lambda x, i=i: x[i // period]
        params = jax.tree.map(pick, places[i % period])
        parent.put_variable("params", f"{name}{separator}{i}", params)
    elif period > 1:
      params = {str(place): params for place, params in enumerate(places)}
      parent.put_variable("params", name, params)
    else:
      parent.put_variable("params", name, places[0])
  # The block's arguments are self, carry, number and the shared ones.
  block = remat.block_class(block, scan, remat_policy, train=2 + len(shared))
  if not scan:
    reports = []
    for i in range(depth):
      layer = block(kinds[i % period], name=f"{name}{separator}{i}")
      carry, report = layer(carry, i, *shared)
      reports.append(report)
    return carry, _mean(reports)
  looped: Any = nn.scan(
    block if period == 1 else _Period,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, *[nn.broadcast] * len(shared)),
    length=depth // period,
  )
  arguments = kinds if period == 1 else (block, kinds)
  blocks = looped(*arguments, name=name)
  carry, reports = blocks(carry, jnp.arange(depth // period), *shared)
  return carry, jax.tree.map(lambda x: jnp.mean(x, axis=0), reports)


def _init(
  parent: nn.Module,
  block: type[nn.Module],
  kinds: Sequence[Any],
  depth: int,
  carry: Any,
  *shared: Any,
) -> list[Any]:
  places = []
  for options in kinds:
    module = block(options, parent=None)
    init = lambda key, module=module: module.init(key, carry, 0, *shared)
    keys = jax.random.split(parent.make_rng("params"), depth // len(kinds))
    # One compiled initialiser loops over the layers: compiling the random
    # numbers of each layer takes far longer than drawing them.
    places.append(jax.lax.map(init, keys)["params"])
  return places


def _mean(reports: Sequence[Any]) -> Any:
  reports = [report for report in reports if report is not None]
  if not reports:
    return None
  return jax.tree.map(lambda *x: sum(x) / len(x), *reports)
