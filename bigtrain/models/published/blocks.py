"""Names of parameters in blocks: stacked in one array, or separate.

models/layers/stack.py defines both forms, and this module converts between
them: `parse_name` reads a name, `layouts` finds the form of each stack, and
`restack_blocks` changes it.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

# Start of the names of experts' selection biases: state, not parameters.
STATE = "router_state/"


class Block(NamedTuple):
  """Location of a block's parameter, parsed from its name."""

  stack: str  # Name up to the number, such as "encoder/blocks".
  layer: int | None  # Number of the block; None for stacked blocks.
  place: int  # Place in the period of stacked blocks.
  rest: str

  @property
  def key(self) -> str:
    """The stack; state is stored as the parameters that it belongs to."""
    return self.stack.removeprefix(STATE)


def parse_name(name: str, block: str, separator: str = "_") -> Block | None:
  """Parses a parameter's name; None if it is not part of a `block`.

  >>> parse_name("encoder/blocks_3/norm/scale", "blocks")
  Block(stack='encoder/blocks', layer=3, place=0, rest='/norm/scale')
  >>> parse_name("blocks/1/norm/scale", "blocks")
  Block(stack='blocks', layer=None, place=1, rest='/norm/scale')
  """
  number = rf"(?:{separator}(\d+)|/(\d+))?"
  m = re.fullmatch(rf"(.*\b{block}){number}(/.+)", name)
  if m is None:
    return None
  stack, layer, place, rest = m.groups()
  known = None if layer is None else int(layer)
  return Block(stack, known, int(place or 0), rest)


class Layout(NamedTuple):
  """Storage of a stack's blocks: stacked by period, or separate arrays."""

  period: int  # Number of blocks in a period of the stacked ones, if any.
  separate: frozenset[int]  # Numbers of the blocks with arrays of their own.

  def layers(self, place: int, periods: int) -> range:
    """Numbers of the stacked blocks at a place of the period."""
    start = self._start() + place
    return range(start, start + self.period * periods, self.period)

  def stacked_at(self, layer: int) -> int | None:
    """Place of a block in its period; None if it has its own arrays."""
    if not self.period or layer in self.separate:
      return None
    return (layer - self._start()) % self.period

  def _start(self) -> int:
    return next(i for i in itertools.count() if i not in self.separate)


def layouts(
  names: Iterable[str], block: str, separator: str = "_"
) -> dict[str, Layout]:
  """{stack: how its blocks are stored}, from the names of parameters."""
  periods: dict[str, int] = {}
  separate: dict[str, set[int]] = {}
  for name in names:
    parsed = parse_name(name, block, separator)
    if parsed is None:
      continue
    period = periods.setdefault(parsed.key, 0)
    separate.setdefault(parsed.key, set())
    if parsed.layer is None:
      periods[parsed.key] = max(period, parsed.place + 1)
    else:
      separate[parsed.key].add(parsed.layer)
  return {
    stack: Layout(period, frozenset(separate[stack]))
    for stack, period in periods.items()
  }


def restack_blocks(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, Any],
  *,
  block: str = "encoderblock",
  separator: str = "_",
) -> dict[str, np.ndarray]:
  """Stacks or unstacks blocks to match the names of `like`.

  Blocks that cannot be stacked, because one is missing or differs in shape, are
  in the result one by one. No caller knows their names, so they are reported as
  unused.
  """
  old = layouts(flat, block, separator)
  new = layouts(like, block, separator)
  result: dict[str, Any] = {}
  stacks: dict[str, _Stack] = {}
  for name, value in flat.items():
    parsed = parse_name(name, block, separator)
    if (
      parsed is None or new.get(parsed.key, old[parsed.key]) == old[parsed.key]
    ):
      result[name] = value
      continue
    layout = new[parsed.key]
    if parsed.layer is None:
      layers = old[parsed.key].layers(parsed.place, len(value))
      by_layer = dict(zip(layers, value))
    else:
      by_layer = {parsed.layer: value}
    for layer, layer_value in by_layer.items():
      place = layout.stacked_at(layer)
      if place is None:
        result[f"{parsed.stack}{separator}{layer}{parsed.rest}"] = layer_value
        continue
      in_period = f"/{place}" if layout.period > 1 else ""
      new_name = parsed.stack + in_period + parsed.rest
      if new_name not in stacks:
        stacks[new_name] = _Stack(layout, place, {})
      stacks[new_name].values[layer] = layer_value
  for name, stack in stacks.items():
    expected = stack.layout.layers(stack.place, len(stack.values))
    is_complete = set(stack.values) == {*expected}
    if is_complete and len({x.shape for x in stack.values.values()}) == 1:
      result[name] = np.stack([stack.values[i] for i in expected])
    else:
      result |= {f"{name} of layer {i}": x for i, x in stack.values.items()}
  return result


class _Stack(NamedTuple):
  """The blocks of a stacked parameter, while they are collected."""

  layout: Layout
  place: int  # In the period.
  values: dict[int, np.ndarray]  # By layer.
