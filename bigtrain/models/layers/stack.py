"""Runs a stack of blocks, unrolled or as a loop.

All blocks may be alike, or they repeat with a period, as where every second
block has experts in place of its MLP.

Parameters are blocks_0, blocks_1, ...; with `scan` one `blocks` whose arrays
have a leading axis of layers; with `scan` and a period, blocks/0, blocks/1,
..., one for each place in the period, with a leading axis of the layers at that
place. The same key initialises all of these to the same values.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import remat

_Options = TypeVar("_Options")

# In place of an array among the options of a block.
_ARRAY = "<array>"


def split(options: _Options) -> tuple[_Options, tuple[jax.Array, ...]]:
  """Returns the options without their arrays, and the arrays.

  A rate of dropout is an array in a compiled update (step/hparams.py). nn.jit
  compares a block's fields, so arrays must be arguments of its call.
  """
  leaves, structure = jax.tree.flatten(options, is_leaf=lambda x: x is None)
  are_arrays = [isinstance(x, jax.Array) for x in leaves]
  arrays = tuple(x for x, is_array in zip(leaves, are_arrays) if is_array)
  constant = [_ARRAY if a else x for x, a in zip(leaves, are_arrays)]
  return jax.tree.unflatten(structure, constant), arrays


def join(options: _Options, arrays: Sequence[jax.Array]) -> _Options:
  """Undoes `split`, inside of a block."""
  left = iter(arrays)
  put = lambda x: next(left) if isinstance(x, str) and x == _ARRAY else x
  return jax.tree.map(put, options, is_leaf=lambda x: x is None)


class _Period(nn.Module):
  """The blocks of one period, one after the other.

  Attributes:
    block: class of the blocks.
    kinds: options of each block.
  """

  block: Any
  kinds: tuple[Any, ...]

  @nn.compact
  def __call__(
    self, carry: Any, number: Any, arrays: Any, *shared: Any
  ) -> tuple[Any, Any]:
    """Runs the blocks, see `run`; `number` is the number of the period."""
    reports = []
    for place, options in enumerate(self.kinds):
      layer = number * len(self.kinds) + place
      block = self.block(options, name=str(place))
      carry, report = block(carry, layer, arrays[place], *shared)
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
    block: class of the blocks. It is constructed with options and called with
      (carry, number of the layer, arrays, *shared). It returns (carry, report);
      the report may be None.
    kinds: options of the blocks of one period; its length divides `depth`. A
      block has these without arrays, which `join` puts back.
    scan: whether to compile one period and loop over it, so that the time to
      compile does not grow with depth.
    name: name of the submodule with `scan`, and its beginning without.

  Returns:
    (the last carry, mean of the reports that are not None, or None).
  """
  period = len(kinds)
  kinds, arrays = zip(*map(split, kinds))
  if parent.is_initializing():
    places = _init(parent, block, kinds, arrays, depth, carry, *shared)
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
  # The block's arguments are self, carry, number, arrays and the shared ones.
  block = remat.block_class(block, scan, remat_policy, train=3 + len(shared))
  if not scan:
    reports = []
    for i in range(depth):
      layer = block(kinds[i % period], name=f"{name}{separator}{i}")
      carry, report = layer(carry, i, arrays[i % period], *shared)
      reports.append(report)
    return carry, _mean(reports)
  looped: Any = nn.scan(
    block if period == 1 else _Period,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, nn.broadcast, *[nn.broadcast] * len(shared)),
    length=depth // period,
  )
  arguments = kinds if period == 1 else (block, kinds)
  arrays = arrays[0] if period == 1 else arrays
  blocks = looped(*arguments, name=name)
  carry, reports = blocks(carry, jnp.arange(depth // period), arrays, *shared)
  return carry, jax.tree.map(lambda x: jnp.mean(x, axis=0), reports)


def _init(
  parent: nn.Module,
  block: type[nn.Module],
  kinds: Sequence[Any],
  arrays: Sequence[Any],
  depth: int,
  carry: Any,
  *shared: Any,
) -> list[Any]:
  """Initial parameters of each place in the period, stacked over its layers."""
  places = []
  for options, own in zip(kinds, arrays):
    module = block(options, parent=None)
    init = functools.partial(
      lambda module, own, key: module.init(key, carry, 0, own, *shared),
      *(module, own),
    )
    keys = jax.random.split(parent.make_rng("params"), depth // len(kinds))
    # One compiled initialiser loops over the layers: compiling the random
    # numbers of each layer takes far longer than drawing them.
    variables = jax.lax.map(init, keys)
    places.append(variables["params"])
  return places


def _mean(reports: Sequence[Any]) -> Any:
  reports = [report for report in reports if report is not None]
  if not reports:
    return None
  return jax.tree.map(lambda *x: sum(x) / len(x), *reports)
