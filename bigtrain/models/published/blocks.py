"""Parameters of a stack's blocks: stacked in one array, or each on its own.

models/layers/stack.py defines both forms.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Block(NamedTuple):
  """Location of a block's parameter, parsed from its name.

  Attributes:
    stack: name up to the number, such as "encoder/blocks".
    layer: number of the block; None for stacked blocks.
    place: place in the period of stacked blocks.
  """

  stack: str
  layer: int | None
  place: int
  rest: str


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
  return Block(
    stack, None if layer is None else int(layer), int(place or 0), rest
  )


def periods(
  names: Iterable[str], block: str, separator: str = "_"
) -> dict[str, int]:
  """Returns each stack's period in blocks, or 0 if blocks are separate."""
  result: dict[str, int] = {}
  for name in names:
    if parsed := parse_name(name, block, separator):
      period = parsed.place + 1 if parsed.layer is None else 0
      result[parsed.stack] = max(result.get(parsed.stack, 0), period)
  return result


def restack_blocks(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, Any],
  *,
  block: str = "encoderblock",
  separator: str = "_",
) -> dict[str, np.ndarray]:
  """Stacks or unstacks blocks to match the names of `like`.

  Each ".../{block}{separator}{i}/x" is stacked to ".../{block}/x", or the
  reverse. Blocks that cannot be stacked, since one is missing or differs in
  shape, are in the result one by one, under names that no caller knows.
  """
  old = periods(flat, block, separator)
  new = periods(like, block, separator)
  result: dict[str, Any] = {}
  layers: dict[str, dict[int, np.ndarray]] = {}
  for name, value in flat.items():
    parsed = parse_name(name, block, separator)
    stack = parsed.stack if parsed else ""
    if parsed is None or new.get(stack, old[stack]) == old[stack]:
      result[name] = value
      continue
    numbered: dict[int, np.ndarray] = {}
    if parsed.layer is not None:
      numbered[parsed.layer] = value
    else:
      step = old[stack]
      numbered |= {parsed.place + step * i: x for i, x in enumerate(value)}
    period = new[stack]
    for layer, value_i in numbered.items():
      if not period:
        result[f"{stack}{separator}{layer}{parsed.rest}"] = value_i
        continue
      place = f"/{layer % period}" if period > 1 else ""
      layers.setdefault(stack + place + parsed.rest, {})[layer] = value_i
  for name, by_layer in layers.items():
    parsed = parse_name(name, block, separator)
    assert parsed is not None
    last = new[parsed.stack] * len(by_layer)
    complete = set(by_layer) == {*range(parsed.place, last, new[parsed.stack])}
    if complete and len({value.shape for value in by_layer.values()}) == 1:
      result[name] = np.stack([by_layer[i] for i in sorted(by_layer)])
    else:  # The caller lists them.
      result |= {f"{name} of layer {i}": x for i, x in by_layer.items()}
  return result
