"""Runs the blocks that a model stacks, unrolled or as a loop.

All may be alike, or they repeat in a period, as where every second has experts
in the place of its MLP.

Parameters are blocks_0, blocks_1, ...; with `scan` one `blocks` whose arrays
have a leading axis of layers; with `scan` and a period, blocks/0, blocks/1,
..., the places in a period, each with an axis of all layers that are there.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import common


class _Period(nn.Module):
  """Blocks of different kinds, one after the other.

  Attributes:
    block: the class.
    kinds: options of each.
  """

  block: Any
  kinds: tuple[Any, ...]

  @nn.compact
  def __call__(self, carry: Any, number: Any, *shared: Any) -> tuple[Any, Any]:
    """See `run`; `number` is that of the period."""
    reports = []
    for place, options in enumerate(self.kinds):
      index = number * len(self.kinds) + place
      block = self.block(options, name=str(place))
      carry, report = block(carry, index, *shared)
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
) -> tuple[Any, Any]:
  """Passes `carry` through `depth` blocks.

  Args:
    parent: the module in whose compact method this is; it gets the parameters.
    block: the class: made of options, and called with (carry, number of the
      layer, *shared); it returns (carry, report), whose report may be None.
    kinds: options of the blocks of a period, whose length divides `depth`.
    depth: number of blocks.
    carry: what flows through them.
    *shared: what is the same for all; the last says whether this is training.
    scan: one compiled period, and a loop.
    remat_policy: what the backward pass keeps, see common.Encoder.

  Returns:
    (the carry, the mean of the reports that are not None, or None).
  """
  period = len(kinds)
  if parent.is_initializing():
    _init(parent, block, kinds, depth, scan, carry, *shared)
  # Arguments are self, carry, number, and these.
  kept = common.block_class(block, scan, remat_policy, train=2 + len(shared))
  if not scan:
    reports = []
    for i in range(depth):
      one = kept(kinds[i % period], name=f"blocks_{i}")
      carry, report = one(carry, i, *shared)
      reports.append(report)
    return carry, _mean(reports)
  looped: Any = nn.scan(
    kept if period == 1 else _Period,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, *[nn.broadcast] * len(shared)),
    length=depth // period,
  )
  made_of = kinds if period == 1 else (kept, tuple(kinds))
  blocks = looped(*made_of, name="blocks")
  carry, reports = blocks(carry, jnp.arange(depth // period), *shared)
  return carry, jax.tree.map(lambda x: jnp.mean(x, axis=0), reports)


def _init(
  parent: nn.Module,
  block: type[nn.Module],
  kinds: Sequence[Any],
  depth: int,
  scan: bool,
  carry: Any,
  *shared: Any,
) -> None:
  period = len(kinds)
  places = []
  for options in kinds:
    one = block(options, parent=None)
    number = depth // period
    places.append(common.stacked_params(parent, number, one, carry, 0, *shared))
  if not scan:
    for i in range(depth):
      pick = lambda x, i=i: x[i // period]
      params = jax.tree.map(pick, places[i % period])
      parent.put_variable("params", f"blocks_{i}", params)
    return
  named = {str(place): params for place, params in enumerate(places)}
  parent.put_variable("params", "blocks", named if period > 1 else places[0])


def _mean(reports: Sequence[Any]) -> Any:
  found = [report for report in reports if report is not None]
  if not found:
    return None
  return jax.tree.map(lambda *x: sum(x) / len(x), *found)
