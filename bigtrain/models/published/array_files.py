"""Loads and exports the arrays of published files by their tables.

Loading copies nothing: its results are views of the file, or stacks of views
that are joined when a device reads them. Exporting builds one array at a time.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError
from bigtrain.models.published import blocks, conversions
from bigtrain.models.published.conversions import Remark
from bigtrain.models.published.tables import Entry, Shapes, Table, Tensor

# Rows of memory-mapped arrays to compare at a time.
_ROWS = 4096
# Names of the blocks of decoders and of encoders.
_BLOCK = "(?:blocks|encoderblock)"


def load(
  layouts: Mapping[str, Table],
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  param_dims: dims.Table,
  *,
  ignored: Mapping[str, str],
  copies: Sequence[str] = (),
) -> dict[str, Any] | None:
  """Converts the arrays of a file to our names and shapes.

  Args:
    layouts: tables by layout. The one that knows the most names, of the file
      and of the model, is used; of several, the first that fits the shapes.
    flat: arrays of the file by name.
    like: our parameters by name, for their shapes, and whether layers are
      stacked.
    ignored: {regular expression of names: reason}.
    copies: names of arrays that may be copies of the embedding.

  Returns:
    {name: array or `LazyStack`; a `Remark` if it cannot be made}. Arrays that
    the table does not use keep their names. None for a file in another layout.
  """
  results = []
  for table in _find_tables(layouts, flat, like):
    result = _load(table, flat, like, param_dims, ignored, copies)
    if not any(isinstance(result.get(name), Remark) for name in like):
      return result
    results.append(result)
  return results[0] if results else None


def _load(
  table: Table,
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  param_dims: dims.Table,
  ignored: Mapping[str, str],
  copies: Sequence[str],
) -> dict[str, Any]:
  """The result of `load` by one table."""
  remarks = {
    name: Remark("ignored", reason)
    for pattern, reason in ignored.items()
    for name in flat
    if re.fullmatch(pattern, name)
  }
  remarks |= _copies_of_embedding(table, flat, like, copies)
  remarks |= {
    name: Remark("ignored", "it has no numbers")
    for name, x in flat.items()
    if 0 in x.shape
  }
  shapes = {name: tuple(leaf.shape) for name, leaf in like.items()}
  file = _File(
    {name: x for name, x in flat.items() if name not in remarks},
    _Params(shapes, param_dims, _sources(shapes)),
  )
  entries = {ours: entry for entry in table for ours in entry.ours}
  result: dict[str, Any] = {}
  for name, place in _places(shapes).items():
    entry = entries.get(place.name)
    if entry is not None:
      layers = [file.parameter(entry, place.name, i) for i in place.layers]
      result[name] = _stack(layers) if place.stacked else layers[0]
  return result | file.unused() | remarks


def with_names_of_file(
  result: Mapping[str, Any], names: Mapping[str, str], like: Mapping[str, Any]
) -> dict[str, Any]:
  """Renames what is not of the model; `names` are {name in tables: in file}."""
  return {n if n in like else names.get(n, n): x for n, x in result.items()}


def _find_tables(
  layouts: Mapping[str, Table], names: Iterable[str], like: Mapping[str, Any]
) -> list[Table]:
  """The tables that have most names of a file and of a model."""
  # Numbers of layers and experts do not tell layouts apart.
  form = lambda name: re.sub(r"\d+|\{[ie].*?\}", "#", name)
  forms = {form(name) for name in names}
  ours = set()
  for name in like:
    block = blocks.parse_name(name, _BLOCK)
    ours.add(block.stack + block.rest if block else name)
  known_names = {}
  for layout, table in layouts.items():
    in_file = [entry for entry in table if form(entry.published) in forms]
    in_model = {name for entry in in_file for name in entry.ours} & ours
    # Layers of several kinds may have arrays of one name.
    names_in_file = {form(entry.published) for entry in in_file}
    known_names[layout] = len(names_in_file), len(in_model)
  most = max(sum(numbers) for numbers in known_names.values())
  tables: list[Table] = []
  for layout, numbers in known_names.items():
    if numbers[0] and sum(numbers) == most and layouts[layout] not in tables:
      tables.append(layouts[layout])
  return tables


def _copies_of_embedding(
  table: Table,
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  copies: Sequence[str],
) -> dict[str, Remark]:
  """Remarks on arrays that a model with one embedding does not have."""
  remarks: dict[str, Remark] = {}
  has_head = {"head/kernel", "score/kernel"} & {*like}
  for entry in table:
    if entry.ours != ("token_embedding",):
      continue
    reason = "the model has one embedding"
    remarks |= _compare(flat, copies, entry.published, reason)
    if not has_head:
      heads = [x.published for x in table if x.ours == ("head/kernel",)]
      reason = "config.model.tied_head=False loads it"
      remarks |= _compare(flat, heads, entry.published, reason)
  return remarks


def _compare(
  flat: Mapping[str, Any], names: Sequence[str], original: str, reason: str
) -> dict[str, Remark]:
  """Returns {name: remark}: merged if an array equals another, else unused."""
  remarks = {}
  for name in names:
    if name not in flat or original not in flat:
      continue
    if _equal(flat[name], flat[original]):
      remarks[name] = Remark("merged", f"equals {original}")
    else:
      array = conversions.describe(flat[name])
      text = f"{array}, which differs from {original}; {reason}"
      remarks[name] = Remark("unused", text)
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


def _stack(parts: Sequence[Any]) -> LazyStack | Remark:
  """A stack of arrays; a remark if one of them is a remark."""
  remarks = [part for part in parts if isinstance(part, Remark)]
  if not remarks:
    return LazyStack(parts)
  others = "; no other layer or expert of this array is loaded either"
  text = remarks[0].text.removesuffix(others) + others
  return remarks[0]._replace(text=text)


class _Place(NamedTuple):
  """Location of one of our parameters in a model's tables and layers."""

  name: str
  layers: tuple[int | None, ...]  # (None,) outside of blocks.
  stacked: bool  # Whether its first axis runs over these layers.


def _places(shapes: Shapes) -> dict[str, _Place]:
  layouts = blocks.layouts(shapes, _BLOCK)
  places = {}
  for name, shape in shapes.items():
    block = blocks.parse_name(name, _BLOCK)
    if block is None:
      places[name] = _Place(name, (None,), False)
      continue
    table_name = block.stack + block.rest
    if block.layer is not None:
      places[name] = _Place(table_name, (block.layer,), False)
    else:
      layers = layouts[block.key].layers(block.place, shape[0])
      places[name] = _Place(table_name, tuple(layers), True)
  return places


# {name in tables: {layer: (our name, index into its leading axis)}}
_Sources = Mapping[str, Mapping[int | None, tuple[str, tuple[slice, ...]]]]


def _sources(shapes: Shapes) -> _Sources:
  sources: dict[str, dict[int | None, tuple[str, tuple[slice, ...]]]] = {}
  for name, place in _places(shapes).items():
    for number, layer in enumerate(place.layers):
      index = (slice(number, number + 1),) if place.stacked else ()
      sources.setdefault(place.name, {})[layer] = (name, index)
  return sources


class _Params(NamedTuple):
  """Our parameters, and where the tables' names find them."""

  shapes: Shapes
  table: dims.Table
  sources: _Sources

  def has_all(self, entry: Entry, layer: int | None) -> bool:
    """Whether the model has each of an entry's parameters in a layer."""
    return all(layer in self.sources.get(ours, ()) for ours in entry.ours)

  def experts(self, ours: str, layer: int | None) -> range:
    name, index = self.sources[ours][layer]
    return range(self.shapes[name][len(index)])

  def shapes_in(self, entry: Entry, layer: int | None) -> list[tuple[int, ...]]:
    """Shapes of an entry's parameters in a layer, or for one {e} expert."""
    result = []
    for ours in entry.ours:
      name, index = self.sources[ours][layer]
      result.append(tuple(self.shapes[name])[len(index) + entry.by_expert :])
    return result

  def num_heads(self, entry: Entry, shapes: Sequence[tuple[int, ...]]) -> int:
    """Smallest first dimension of the outputs of an entry's parameters."""
    roles = dims.find(self.table, entry.ours[0])
    assert roles is not None, entry
    return min(x[len(roles.stack) + len(roles.inputs)] for x in shapes)

  def as_matrices(
    self, entry: Entry, shapes: Sequence[tuple[int, ...]]
  ) -> list[tuple[int, ...]]:
    """The shapes as (inputs, outputs), or (experts, inputs, outputs)."""
    # State, which has no roles, is a vector.
    roles = dims.find(self.table, entry.ours[0])
    num_stack = len(roles.stack) if roles and not entry.by_expert else 0
    num_inputs = len(roles.inputs) if roles else 0
    result = []
    for shape in shapes:
      stack, rest = shape[:num_stack], shape[num_stack:]
      inputs = (math.prod(rest[:num_inputs]),) if num_inputs else ()
      result.append((*stack, *inputs, math.prod(rest[num_inputs:])))
    return result


def _published_shape(
  entry: Entry, matrices: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
  """Shape of the array that joins `matrices` along their outputs."""
  outputs = sum(shape[-1] for shape in matrices)
  shape = (*matrices[0][:-1], outputs)
  return (*shape[:-2], shape[-1], shape[-2]) if entry.transposed else shape


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
  return tuple(n for n in shape if n > 1)


class _File:
  """The arrays of a file that is loaded into a model."""

  def __init__(self, arrays: Mapping[str, Any], params: _Params):
    self._arrays = arrays
    self._params = params
    self._used: set[str] = set()

  def unused(self) -> dict[str, Any]:
    return {n: x for n, x in self._arrays.items() if n not in self._used}

  def parameter(self, entry: Entry, ours: str, layer: int | None) -> Any:
    """One of our parameters in a layer, or a `Remark` why it is not loaded."""
    if not entry.by_expert:
      return self._part(entry, ours, layer)
    experts = self._params.experts(ours, layer)
    return _stack([self._part(entry, ours, layer, e) for e in experts])

  def _part(
    self, entry: Entry, ours: str, layer: int | None, expert: int | None = None
  ) -> Any:
    name = entry.published.format(i=layer, e=expert)
    if name not in self._arrays:
      return Remark("missing", f"the file has no {name}")
    self._used.add(name)
    value = self._arrays[name]
    text = f"the file has {conversions.describe(value)} in {name}"
    if not jnp.issubdtype(value.dtype, jnp.floating):
      return Remark("retyped", text)
    if not self._params.has_all(entry, layer):
      others = ", ".join(part for part in entry.ours if part != ours)
      return Remark("reshaped", f"{text}, with {others}")
    shapes = self._params.shapes_in(entry, layer)
    matrices = self._params.as_matrices(entry, shapes)
    expected = _published_shape(entry, matrices)
    if entry.shaped and tuple(value.shape) == shapes[0]:
      value = value.reshape(expected)
    if entry.ndim is not None and value.ndim == entry.ndim:
      if _without_ones(value.shape) == _without_ones(expected):
        value = value.reshape(expected)
    if entry.depthwise and value.ndim == 3 and value.shape[1] == 1:
      value = value[:, 0]
    if entry.convolution and value.ndim in (4, 5):
      window = range(2, value.ndim)
      value = value.transpose(*window, 1, 0).reshape(-1, value.shape[0])
    if entry.either_order and tuple(value.shape) != expected:
      value = value.swapaxes(-1, -2)
    if tuple(value.shape) != expected:
      return Remark("reshaped", text)
    if entry.transposed:
      value = value.swapaxes(-1, -2)
    number = entry.ours.index(ours)
    if entry.by_head:
      heads = self._params.num_heads(entry, shapes)
      value = value.reshape(*value.shape[:-1], heads, -1)
      matrices = [(matrix[-1] // heads,) for matrix in matrices]
    if entry.interleaved:
      outputs = slice(number, None, len(matrices))
    else:
      first = sum(shape[-1] for shape in matrices[:number])
      outputs = slice(first, first + matrices[number][-1])
    return value[..., outputs].reshape(shapes[number])


def export(
  key: str, table: Table, shapes: Shapes, param_dims: dims.Table
) -> list[Tensor]:
  """Returns the arrays of a published file; messages begin with `key`."""
  params = _Params(shapes, param_dims, _sources(shapes))
  tensors = []
  for entry in table:
    # A model may lack an entry, such as the head if it is tied.
    for layer in params.sources.get(entry.ours[0], ()):
      if params.has_all(entry, layer):
        experts: Sequence[int | None] = [None]
        if entry.by_expert:
          experts = params.experts(entry.ours[0], layer)
        tensors += [_tensor(params, entry, layer, e) for e in experts]
  used = {name for tensor in tensors for name, _ in tensor.parts}
  if unused := sorted(set(shapes) - used):
    raise ConfigError(
      f"{key}: the layout has no place for {', '.join(unused[:3])}."
    )
  return tensors


def _tensor(
  params: _Params, entry: Entry, layer: int | None, expert: int | None
) -> Tensor:
  """Returns an entry's array in a layer, or for an expert."""
  inner = params.shapes_in(entry, layer)
  matrices = params.as_matrices(entry, inner)
  shape = _published_shape(entry, matrices)
  if entry.convolution:
    *window, inputs, outputs = inner[0]
    shape = (outputs, inputs, *window)
  if entry.ndim is not None:
    sizes = _without_ones(shape)
    ones = (1,) * entry.ones_after
    shape = (*[1] * (entry.ndim - len(sizes) - len(ones)), *sizes, *ones)
  if entry.depthwise:
    shape = (shape[0], 1, shape[1])
  if entry.shaped:
    shape = inner[0]
  heads = params.num_heads(entry, inner) if entry.by_head else None

  def build(values: list[np.ndarray]) -> np.ndarray:
    values = [x.reshape(matrix) for x, matrix in zip(values, matrices)]
    if heads:
      values = [x.reshape(*x.shape[:-1], heads, -1) for x in values]
    value = np.concatenate(values, axis=-1)
    if heads:
      value = value.reshape(*value.shape[:-2], -1)
    if entry.interleaved:
      value = np.stack(values, axis=-1).reshape(value.shape)
    if entry.convolution:
      value = value.reshape(inner[0])
      value = value.transpose(-1, -2, *range(value.ndim - 2))
      return value.reshape(shape)
    if entry.transposed:
      value = value.swapaxes(-1, -2)
    return value.reshape(shape)

  expert_index = () if expert is None else (slice(expert, expert + 1),)
  parts = []
  for ours, shape_of_ours in zip(entry.ours, inner):
    name, layer_index = params.sources[ours][layer]
    rest = (slice(None),) * len(shape_of_ours)
    parts.append((name, (*layer_index, *expert_index, *rest)))
  name = entry.published.format(i=layer, e=expert)
  return Tensor(name, shape, parts, build)
