"""Parameters of a stack's blocks: stacked in one array, or each on its own.

models/layers/stack.py defines both forms.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

# Start of the names of experts' selection biases, which are no parameters.
STATE = "router_state/"


class Block(NamedTuple):
  """Location of a block's parameter, parsed from its name."""

  stack: str  # Name up to the number, such as "encoder/blocks".
  layer: int | None  # Number of the block; None for stacked blocks.
  place: int  # Place in the period of stacked blocks.
  rest: str

  @property
  def key(self) -> str:
    """The stack; state is by the layers of the parameters that it is of."""
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
  """How a stack's blocks are stored."""

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
  periods: dict[str, int] = {}
  separate: dict[str, set[int]] = {}
  for name in names:
    if parsed := parse_name(name, block, separator):
      numbers = separate.setdefault(parsed.key, set())
      period = 0
      if parsed.layer is None:
        period = parsed.place + 1
      else:
        numbers.add(parsed.layer)
      periods[parsed.key] = max(periods.get(parsed.key, 0), period)
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

  Blocks that cannot be stacked, since one is missing or differs in shape, are
  in the result one by one, under names that no caller knows.
  """
  old = layouts(flat, block, separator)
  new = layouts(like, block, separator)
  result: dict[str, Any] = {}
  by_name: dict[str, tuple[Layout, int, dict[int, np.ndarray]]] = {}
  for name, value in flat.items():
    parsed = parse_name(name, block, separator)
    key = parsed.key if parsed else ""
    if parsed is None or new.get(key, old[key]) == old[key]:
      result[name] = value
      continue
    if parsed.layer is None:
      layers = old[key].layers(parsed.place, len(value))
      numbered = dict(zip(layers, value))
    else:
      numbered = {parsed.layer: value}
    for layer, value_i in numbered.items():
      place = new[key].stacked_at(layer)
      if place is None:
        result[f"{parsed.stack}{separator}{layer}{parsed.rest}"] = value_i
        continue
      of_place = f"/{place}" if new[key].period > 1 else ""
      name = parsed.stack + of_place + parsed.rest
      by_name.setdefault(name, (new[key], place, {}))[2][layer] = value_i
  for name, (layout, place, stacked) in by_name.items():
    expected = layout.layers(place, len(stacked))
    complete = set(stacked) == {*expected}
    if complete and len({value.shape for value in stacked.values()}) == 1:
      result[name] = np.stack([stacked[i] for i in expected])
    else:  # The caller lists them.
      result |= {f"{name} of layer {i}": x for i, x in stacked.items()}
  return result
