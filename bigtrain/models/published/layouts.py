"""Tables that map published arrays to our parameters, to load and to export.

A table lists, for each array of a published layout, the parameters of ours that
it consists of. `load` reads a table in one direction, `export` in the other.
Loading copies nothing: the results are views of the file, or stacks of views
that are joined when a device reads its share.

A table has the parameters of all blocks once, as ".../blocks/<name>", whether
the model stacks them or not: see blocks.py.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bigtrain import settings
from bigtrain.models.published import arrays, blocks
from bigtrain.models.published.arrays import Remark

# The way out for a file with a head of its own.
UNTIE = "config.model.tied_head=False loads it"
# Rows that are compared at a time.
_ROWS = 4096


class Entry(NamedTuple):
  """A published array and our parameters in it.

  Attributes:
    published: name of the array; {i} is the layer, {e} the expert.
    ours: names of our parameters, joined along their output axes.
    inputs: number of leading input axes of our parameters; 0 for vectors.
    transposed: whether the published matrix is (outputs, inputs).
  """

  published: str
  ours: tuple[str, ...]
  inputs: int = 0
  transposed: bool = False


Table = Sequence[Entry]


def linear(published: str, *ours: str, inputs: int = 1) -> Entry:
  """Returns the entry of a torch.nn.Linear's weight."""
  return Entry(f"{published}.weight", ours, inputs, transposed=True)


def find(tables: Mapping[str, Table], names: Iterable[str]) -> str | None:
  """Returns the layout that knows most of these names; None if none does."""
  names = list(names)
  counts = {}
  for layout, table in tables.items():
    patterns = [re.escape(entry.published) for entry in table]
    regex = re.sub(r"\\\{[ie]\\\}", r"\\d+", "|".join(patterns))
    known = re.compile(regex).fullmatch
    counts[layout] = sum(known(name) is not None for name in names)
  best = max(counts, key=lambda layout: counts[layout])
  return best if counts[best] else None


def published_name(table: Table, ours: str) -> str:
  """Returns the published name of a parameter outside of blocks."""
  (name,) = [entry.published for entry in table if entry.ours == (ours,)]
  return name


def copies(
  flat: Mapping[str, Any], names: Sequence[str], original: str, advice: str
) -> dict[str, Remark]:
  """Compares arrays that may be copies of another.

  Returns:
    {name: remark}: merged if all values are equal, else unused.
  """
  remarks = {}
  for name in names:
    if name not in flat or original not in flat:
      continue
    remark = Remark("merged", f"equals {original}")
    if not _equal(flat[name], flat[original]):
      array = arrays.describe(flat[name])
      text = f"{array}, which differs from {original}; {advice}"
      remark = Remark("unused", text)
    remarks[name] = remark
  return remarks


def _equal(x: Any, y: Any) -> bool:
  # In pieces, because the arrays of large models are only mapped.
  return x.shape == y.shape and all(
    np.array_equal(x[i : i + _ROWS], y[i : i + _ROWS])
    for i in range(0, len(x), _ROWS)
  )


class LazyStack:
  """Arrays of one shape, stacked along a new first axis when they are read."""

  def __init__(self, parts: Sequence[Any]):
    self._parts = parts
    self.shape = (len(parts), *parts[0].shape)
    self.dtype = parts[0].dtype

  def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
    first, *rest = index
    return np.stack([part[tuple(rest)] for part in self._parts[first]])


class _Place(NamedTuple):
  """Location of one of our parameters in a model's tables and layers.

  Attributes:
    name: name in tables.
    layers: numbers of its layers; (None,) outside of blocks.
    stacked: whether its first axis runs over these layers.
  """

  name: str
  layers: tuple[int | None, ...]
  stacked: bool


def _places(shapes: Mapping[str, Sequence[int]]) -> dict[str, _Place]:
  """Returns the places of our parameters, by name."""
  periods = blocks.periods(shapes, "blocks")
  places = {}
  for name, shape in shapes.items():
    block = blocks.parse_name(name, "blocks")
    if block is None:
      places[name] = _Place(name, (None,), False)
      continue
    table_name = block.stack + block.rest
    if block.layer is not None:
      places[name] = _Place(table_name, (block.layer,), False)
    else:
      period = periods[block.stack]
      layers = range(block.place, block.place + period * shape[0], period)
      places[name] = _Place(table_name, tuple(layers), True)
  return places


def load(
  table: Table, flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any]:
  """Converts published arrays to our names and shapes.

  Args:
    like: our parameters by name; gives shapes, and whether layers are stacked.

  Returns:
    {name: array or `LazyStack`; a `Remark` if it cannot be made}. Arrays that
    the table does not use keep their published names and shapes.
  """
  used: set[str] = set()
  result: dict[str, Any] = {}
  places = _places({name: leaf.shape for name, leaf in like.items()})
  entries = {ours: entry for entry in table for ours in entry.ours}
  for name, place in places.items():
    entry = entries.get(place.name)
    if entry is None:
      continue
    get = functools.partial(_get, flat, used, entry, place.name)
    shape = tuple(like[name].shape)
    if place.stacked:
      value = _stack([get({"i": i}, shape[1:]) for i in place.layers])
    else:
      value = get({"i": place.layers[0]}, shape)
    result[name] = value
  return result | {n: x for n, x in flat.items() if n not in used}


def _get(
  flat: Mapping[str, Any],
  used: set[str],
  entry: Entry,
  ours: str,
  indices: Mapping[str, int | None],
  shape: tuple[int, ...],
) -> Any:
  """Returns one of our parameters, or a `Remark` why it cannot be loaded.

  Args:
    indices: "i", the layer, and "e", the expert, if known.
    shape: shape of the parameter in a layer (and expert).
  """
  if "{e}" in entry.published and "e" not in indices:
    return _stack(
      [
        _get(flat, used, entry, ours, {**indices, "e": e}, shape[1:])
        for e in range(shape[0])
      ]
    )
  name = entry.published.format(**indices)
  if name not in flat:
    return Remark("missing", f"the file has no {name}")
  used.add(name)
  text = f"the file has {arrays.describe(flat[name])} in {name}"
  if not jnp.issubdtype(flat[name].dtype, jnp.floating):
    return Remark("retyped", text)
  value = flat[name].T if entry.transposed else flat[name]
  *inputs, outputs = _flat(shape, entry.inputs)
  if value.shape != (*inputs, outputs * len(entry.ours)):
    return Remark("reshaped", text)
  first = entry.ours.index(ours) * outputs
  return value[..., first : first + outputs].reshape(shape)


def _stack(parts: Sequence[Any]) -> LazyStack | Remark:
  """Stacks arrays, unless there is a `Remark` among them."""
  remarks = [part for part in parts if isinstance(part, Remark)]
  if not remarks:
    return LazyStack(parts)
  others = "; no other layer or expert of this array is loaded either"
  text = remarks[0].text.removesuffix(others) + others
  return remarks[0]._replace(text=text)


class Tensor(NamedTuple):
  """One array of an exported file, written by checkpoint_export.

  Attributes:
    name: published name.
    shape: published shape.
    parts: (name of our parameter, index of its part) of each part.
    build: makes the array of the parts' values.
  """

  name: str
  shape: tuple[int, ...]
  parts: list[tuple[str, tuple[slice, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def check_model(
  layout: str, model: Any, needs: Mapping[str, Mapping[str, Any]]
) -> None:
  """Raises ConfigError unless a layout can represent a model."""
  if layout not in needs:
    hint = settings.did_you_mean(layout, needs)
    raise settings.ConfigError(f"--layout: unknown {layout!r}.{hint}")
  for field, value in needs[layout].items():
    if getattr(model, field) != value:
      raise settings.ConfigError(
        f"--layout={layout}: expected a model with {field}={value!r}, got "
        f"{getattr(model, field)!r}."
      )


def export(
  layout: str, table: Table, shapes: Mapping[str, Sequence[int]]
) -> list[Tensor]:
  """Returns the arrays of a published file, for checkpoint_export.

  Args:
    shapes: shapes of our parameters, by name.

  Raises:
    ConfigError: the layout lacks some of the parameters.
  """
  # {name in tables: {layer: (our name, index into its leading axis)}}
  sources: dict[str, dict[int | None, tuple[str, tuple[slice, ...]]]] = {}
  for name, place in _places(shapes).items():
    for number, layer in enumerate(place.layers):
      index = (slice(number, number + 1),) if place.stacked else ()
      sources.setdefault(place.name, {})[layer] = (name, index)
  tensors = []
  for entry in table:
    # A model may lack an entry, such as the head if it is tied.
    for layer in sources.get(entry.ours[0], ()):
      parts = [sources[ours][layer] for ours in entry.ours]
      tensors += _tensors(entry, layer, parts, shapes)
  used = {name for tensor in tensors for name, _ in tensor.parts}
  unused = sorted(set(shapes) - used)
  if unused:
    raise settings.ConfigError(
      f"--layout={layout}: the layout has no place for {', '.join(unused[:3])}."
    )
  return tensors


def _tensors(
  entry: Entry,
  layer: int | None,
  sources: Sequence[tuple[str, tuple[slice, ...]]],
  shapes: Mapping[str, Sequence[int]],
) -> list[Tensor]:
  """Returns the published array of an entry and layer, or one for each expert.

  Args:
    layer: number of the layer; None outside of blocks.
    sources: (name, index into the leading axis) of the entry's parameters.
    shapes: shapes of our parameters, by name.
  """
  inner = [tuple(shapes[name])[len(index) :] for name, index in sources]
  experts: Sequence[int | None] = [None]
  if "{e}" in entry.published:
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
    expert_index = () if e is None else (slice(e, e + 1),)
    parts = []
    for (name, layer_index), shape in zip(sources, inner):
      rest = (slice(None),) * len(shape)
      parts.append((name, (*layer_index, *expert_index, *rest)))
    name = entry.published.format(i=layer, e=e)
    shape = joined[::-1] if entry.transposed else joined
    tensors.append(Tensor(name, shape, parts, build))
  return tensors


def _flat(shape: Sequence[int], inputs: int) -> tuple[int, ...]:
  """Returns the shape as a matrix (inputs, outputs), or as a vector."""
  outputs = math.prod(shape[inputs:])
  return (math.prod(shape[:inputs]), outputs) if inputs else (outputs,)
