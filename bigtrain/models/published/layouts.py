"""Parameters in the layouts that models are published in.

A model's table says what arrays of a layout are made of. Read in one direction
it loads a published model, in the other it exports one. Nothing is copied to
load: the arrays that come out are views of the file, or put together from
views when a device asks for its share.

The tables have the parameters of all blocks once, as ".../blocks/<name>",
whatever way the model stacks them: see models/stack.py.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain import settings
from bigtrain.models.published import blocks


class Entry(NamedTuple):
  """An array of theirs, and what it is made of.

  Attributes:
    theirs: its name; {i} is the layer, {e} the expert.
    ours: parameters that are joined along their output axes.
    inputs: how many of our axes, the first ones, are inputs; 0 for vectors.
    transposed: whether theirs multiply from the left: (outputs, inputs).
  """

  theirs: str
  ours: tuple[str, ...]
  inputs: int = 0
  transposed: bool = False


Table = Sequence[Entry]


def linear(theirs: str, *ours: str, inputs: int = 1) -> Entry:
  """A torch.nn.Linear's weight."""
  return Entry(f"{theirs}.weight", ours, inputs, transposed=True)


class Stack:
  """Arrays of one shape along a new first axis, joined when they are read."""

  def __init__(self, parts: Sequence[Any]):
    self._parts = parts
    self.shape = (len(parts), *parts[0].shape)
    self.dtype = parts[0].dtype

  def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
    first, *rest = index
    return np.stack([part[tuple(rest)] for part in self._parts[first]])


class _Place(NamedTuple):
  """What one of our parameters is.

  Attributes:
    ours: its name in tables.
    layers: of which it is; (None,) for what is not of a block.
    stacked: whether it has an axis of them.
  """

  ours: str
  layers: tuple[int | None, ...]
  stacked: bool


def _places(shapes: Mapping[str, Sequence[int]]) -> dict[str, _Place]:
  """What our parameters are, by name."""
  periods = blocks.periods(shapes, "blocks")
  found = {}
  for name, shape in shapes.items():
    block = blocks.block_of(name, "blocks")
    if block is None:
      found[name] = _Place(name, (None,), False)
      continue
    ours = block.stack + block.rest
    if block.layer is not None:
      found[name] = _Place(ours, (block.layer,), False)
    else:
      period = periods[block.stack]
      layers = range(block.place, block.place + period * shape[0], period)
      found[name] = _Place(ours, tuple(layers), True)
  return found


def load(
  table: Table, flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any]:
  """A published model's arrays under our names and in our shapes.

  Args:
    table: of the layout.
    flat: what a file has.
    like: our parameters by name; for their shapes, and whether layers are
      stacked.

  Returns:
    {name: array or `Stack`}, of which those that nothing here uses keep their
    names and shapes.
  """
  taken: set[str] = set()
  result: dict[str, Any] = {}
  places = _places({name: want.shape for name, want in like.items()})
  by_ours = {ours: entry for entry in table for ours in entry.ours}
  for name, place in places.items():
    entry = by_ours.get(place.ours)
    if entry is None:
      continue
    get = functools.partial(_get, flat, taken, entry, place.ours)
    shape = tuple(like[name].shape)
    if place.stacked:
      value = _stack([get({"i": i}, shape[1:]) for i in place.layers])
    else:
      value = get({"i": place.layers[0]}, shape)
    if value is not None:
      result[name] = value
  return result | {n: x for n, x in flat.items() if n not in taken}


def _get(
  flat: Mapping[str, Any],
  taken: set[str],
  entry: Entry,
  ours: str,
  where: Mapping[str, int | None],
  shape: tuple[int, ...],
) -> Any:
  """A parameter of ours; None if theirs is not there."""
  if "{e}" in entry.theirs and "e" not in where:
    return _stack(
      [
        _get(flat, taken, entry, ours, {**where, "e": e}, shape[1:])
        for e in range(shape[0])
      ]
    )
  name = entry.theirs.format(**where)
  if name not in flat:
    return None
  taken.add(name)
  value = flat[name].T if entry.transposed else flat[name]
  if len(entry.ours) > 1:
    parts = np.split(value, len(entry.ours), axis=-1)
    value = parts[entry.ours.index(ours)]
  # Another size is for the caller to report.
  return value.reshape(shape) if value.size == math.prod(shape) else value


def _stack(parts: Sequence[Any]) -> Stack | None:
  return None if any(part is None for part in parts) else Stack(parts)


class Tensor(NamedTuple):
  """One array of an exported file, see tools/published.py."""

  name: str
  shape: tuple[int, ...]
  parts: list[tuple[str, tuple[slice, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def check(
  layout: str,
  known: Mapping[str, Any],
  model: Any,
  needs: Mapping[str, Mapping[str, Any]],
) -> None:
  """Raises ConfigError unless a model can be exported in a layout.

  Args:
    layout: its name.
    known: the layouts there are.
    model: whose fields are looked at.
    needs: for each layout, what fields must be, as the layout has no place for
      anything else.
  """
  if layout not in known:
    hint = settings.did_you_mean(layout, known)
    raise settings.ConfigError(f"--layout: unknown {layout!r}.{hint}")
  for field, value in needs[layout].items():
    if getattr(model, field) != value:
      raise settings.ConfigError(
        f"--layout={layout} is for models with {field}={value!r}; this one has "
        f"{getattr(model, field)!r}."
      )


def export(
  layout: str, table: Table, shapes: Mapping[str, Sequence[int]]
) -> list[Tensor]:
  """The arrays of a published file; see tools/published.py.

  Args:
    layout: what the user calls it.
    table: of the layout.
    shapes: of our parameters, by name.

  Raises:
    ConfigError: the layout has no place for all of them.
  """
  # {name in tables: {layer: (our name, which part of its leading axis)}}
  found: dict[str, dict[int | None, tuple[str, tuple[slice, ...]]]] = {}
  for name, place in _places(shapes).items():
    for number, layer in enumerate(place.layers):
      at = (slice(number, number + 1),) if place.stacked else ()
      found.setdefault(place.ours, {})[layer] = (name, at)
  tensors = []
  for entry in table:
    # Some have none, such as the head of a model whose head is tied.
    for layer in found.get(entry.ours[0], ()):
      names = [found[ours][layer] for ours in entry.ours]
      tensors += _tensors(entry, layer, names, shapes)
  used = {name for tensor in tensors for name, _ in tensor.parts}
  left = sorted(set(shapes) - used)
  if left:
    raise settings.ConfigError(
      f"--layout={layout} has no place for {', '.join(left[:3])}."
    )
  return tensors


def _tensors(
  entry: Entry,
  i: int | None,
  names: Sequence[tuple[str, tuple[slice, ...]]],
  shapes: Mapping[str, Sequence[int]],
) -> list[Tensor]:
  """One array of theirs, or one for each expert."""
  inner = [tuple(shapes[name])[len(at) :] for name, at in names]
  experts: Sequence[int | None] = [None]
  if "{e}" in entry.theirs:
    experts = range(inner[0][0])
    inner = [shape[1:] for shape in inner]
  flat = [_flat(shape, entry.inputs) for shape in inner]
  joined = (*flat[0][:-1], sum(shape[-1] for shape in flat))

  def build(parts: list[np.ndarray]) -> np.ndarray:
    parts = [part.reshape(shape) for part, shape in zip(parts, flat)]
    value = np.concatenate(parts, axis=-1)
    return value.T if entry.transposed else value

  tensors = []
  for e in experts:
    of_expert = () if e is None else (slice(e, e + 1),)
    parts = []
    for (name, at), shape in zip(names, inner):
      rest = (slice(None),) * len(shape)
      parts.append((name, (*at, *of_expert, *rest)))
    name = entry.theirs.format(i=i, e=e)
    shape = joined[::-1] if entry.transposed else joined
    tensors.append(Tensor(name, shape, parts, build))
  return tensors


def _flat(shape: Sequence[int], inputs: int) -> tuple[int, ...]:
  """The shape as a matrix (inputs, outputs), or as a vector."""
  outputs = math.prod(shape[inputs:])
  return (math.prod(shape[:inputs]), outputs) if inputs else (outputs,)
