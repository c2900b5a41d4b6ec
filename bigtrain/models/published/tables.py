"""Tables that map published arrays to our parameters, to load and to export.

A table lists, for each array of a published layout, the parameters of ours that
it consists of; those of all blocks once, as ".../blocks/<name>", whether the
model stacks them or not (blocks.py). The model's `param_dims` tells how many
dimensions of a parameter are inputs. Loading copies nothing: the results are
views of the file, or stacks of views that are joined when a device reads them.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError
from bigtrain.models.published import blocks, conversions
from bigtrain.models.published.conversions import Remark

# Rows that are compared at a time.
_ROWS = 4096
# Names of the blocks of decoders and of encoders.
_BLOCK = "(?:blocks|encoderblock)"


class Entry(NamedTuple):
  """A published array and our parameters in it."""

  # Name of the array; {i} is the layer, {e} the expert. Without {e}, an array
  # of experts has all of them in its first axis.
  published: str
  ours: tuple[str, ...]  # Our parameters, joined along their output axes.
  transposed: bool = False  # Whether the published matrix is (outputs, inputs).
  interleaved: bool = False  # Whether the outputs of our parameters take turns.
  convolution: bool = False  # Of torch: (outputs, inputs, height, width).
  # Number of dimensions, if the array has ones in front of ours.
  ndim: int | None = None


Table = Sequence[Entry]
Shapes = Mapping[str, Sequence[int]]


def table(*parts: Table) -> Table:
  """Joins entries and tables, such as those that several families share."""
  return tuple(itertools.chain.from_iterable(parts))


def within(published: str, ours: str, *parts: Table) -> Table:
  """Puts prefixes before the names of entries, published and ours.

  >>> within("layer.{i}.", "blocks/", plain("scale", "norm/scale"))[0].ours
  ('blocks/norm/scale',)
  """
  return tuple(
    entry._replace(
      published=published + entry.published,
      ours=tuple(ours + name for name in entry.ours),
    )
    for entry in table(*parts)
  )


# Constructors of entries. Names are those of layers, to which each constructor
# adds the endings of the arrays in both libraries.


def plain(published: str, *ours: str, ndim: int | None = None) -> Table:
  """An array by its whole name: a vector, or a matrix (inputs, outputs)."""
  return (Entry(published, ours, ndim=ndim),)


def transposed(published: str, *ours: str) -> Table:
  """A matrix (outputs, inputs) by its whole name."""
  return (Entry(published, ours, transposed=True),)


def interleaved(published: str, *ours: str) -> Table:
  """An array by its whole name, in which the outputs of ours take turns."""
  return (Entry(published, ours, interleaved=True),)


def linear(published: str, *ours: str) -> Table:
  """A linear layer of torch without a bias."""
  return transposed(f"{published}.weight", *[f"{x}/kernel" for x in ours])


def dense(published: str, *ours: str) -> Table:
  """A linear layer of torch, whose bias a model may lack."""
  return table(linear(published, *ours), _bias(published, *ours))


def conv1d(published: str, *ours: str) -> Table:
  """A layer of GPT-2, which stores matrices as (inputs, outputs)."""
  kernel = plain(f"{published}.weight", *[f"{x}/kernel" for x in ours])
  return table(kernel, _bias(published, *ours))


def conv(published: str, ours: str) -> Table:
  """A convolution of torch."""
  kernel = Entry(f"{published}.weight", (f"{ours}/kernel",), convolution=True)
  return table((kernel,), _bias(published, ours))


def norm(published: str, ours: str) -> Table:
  """A normalisation of torch, whose bias a model may lack."""
  return table(
    plain(f"{published}.weight", f"{ours}/scale"),
    plain(f"{published}.bias", f"{ours}/bias"),
  )


def flax_dense(published: str, ours: str) -> Table:
  """A Dense layer of flax."""
  return table(
    plain(f"{published}/kernel", f"{ours}/kernel"),
    plain(f"{published}/bias", f"{ours}/bias"),
  )


def flax_norm(published: str, ours: str) -> Table:
  """A LayerNorm of flax."""
  return table(
    plain(f"{published}/scale", f"{ours}/scale"),
    plain(f"{published}/bias", f"{ours}/bias"),
  )


def _bias(published: str, *ours: str) -> Table:
  return plain(f"{published}.bias", *[f"{x}/bias" for x in ours])


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
    layouts: tables by layout; the one that knows most names, of the file and
      of the model, is taken.
    like: our parameters by name; gives shapes, and whether layers are stacked.
    ignored: {regular expression of names: reason}.
    copies: names of arrays that may be copies of the embedding.

  Returns:
    {name: array or `LazyStack`; a `Remark` if it cannot be made}. Arrays that
    the table does not use keep their names. None for a file in another layout.
  """
  layout = _find(layouts, flat, like)
  if layout is None:
    return None
  table = layouts[layout]
  remarks = {
    name: Remark("ignored", reason)
    for pattern, reason in ignored.items()
    for name in flat
    if re.fullmatch(pattern, name)
  }
  for embedding in [e for e in table if e.ours == ("token_embedding",)]:
    reason = "the model has one embedding"
    remarks |= _compare(flat, copies, embedding.published, reason)
    if not {"head/kernel", "score/kernel"} & {*like}:
      advice = "config.model.tied_head=False loads it"
      heads = [e.published for e in table if e.ours == ("head/kernel",)]
      remarks |= _compare(flat, heads, embedding.published, advice)
  arrays = {name: x for name, x in flat.items() if name not in remarks}
  used: set[str] = set()
  result: dict[str, Any] = {}
  shapes = {name: tuple(leaf.shape) for name, leaf in like.items()}
  params = _Params(shapes, param_dims, _sources(shapes))
  entries = {ours: entry for entry in table for ours in entry.ours}
  for name, place in _places(shapes).items():
    entry = entries.get(place.name)
    if entry is None:
      continue
    get = functools.partial(_get, params, arrays, used, entry, place.name)
    values = [get({"i": i}) for i in place.layers]
    result[name] = _stack(values) if place.stacked else values[0]
  result |= {name: x for name, x in arrays.items() if name not in used}
  return result | remarks


def with_names_of_file(
  result: Mapping[str, Any], names: Mapping[str, str], like: Mapping[str, Any]
) -> dict[str, Any]:
  """Renames what is not of the model; `names` are {name in tables: in file}."""
  return {n if n in like else names.get(n, n): x for n, x in result.items()}


def _find(
  tables: Mapping[str, Table], names: Iterable[str], like: Mapping[str, Any]
) -> str | None:
  form = lambda name: re.sub(r"\d+|\{[ie].*?\}", "#", name)
  forms = {form(name) for name in names}
  parsed = {name: blocks.parse_name(name, _BLOCK) for name in like}
  ours = {x.stack + x.rest if x else name for name, x in parsed.items()}
  counts = {}
  for layout, table in tables.items():
    entries = [entry for entry in table if form(entry.published) in forms]
    covered = {name for entry in entries for name in entry.ours} & ours
    counts[layout] = len(entries), len(covered)
  best = max(counts, key=lambda layout: sum(counts[layout]))
  return best if counts[best][0] else None


def _compare(
  flat: Mapping[str, Any], names: Sequence[str], original: str, advice: str
) -> dict[str, Remark]:
  """Returns {name: remark}: merged if an array equals another, else unused."""
  remarks = {}
  for name in names:
    if name not in flat or original not in flat:
      continue
    remarks[name] = Remark("merged", f"equals {original}")
    if not _equal(flat[name], flat[original]):
      array = conversions.describe(flat[name])
      text = f"{array}, which differs from {original}; {advice}"
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

  def experts(self, ours: str, layer: int | None) -> range:
    name, index = self.sources[ours][layer]
    return range(self.shapes[name][len(index)])

  def in_layer(
    self, entry: Entry, layer: int | None
  ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of a layer's or an {e} expert's parameters, and as matrices."""
    inner, flats = [], []
    for ours in entry.ours:
      name, index = self.sources[ours][layer]
      skipped = len(index) + ("{e}" in entry.published)
      shape = tuple(self.shapes[name])[skipped:]
      inner.append(shape)
      # State, which has no roles, is a vector.
      roles = dims.find(self.table, entry.ours[0])
      stack = len(roles.stack) if roles and "{e}" not in entry.published else 0
      inputs = len(roles.inputs) if roles else 0
      lead, rest = shape[:stack], shape[stack:]
      rows = (math.prod(rest[:inputs]),) if inputs else ()
      flats.append((*lead, *rows, math.prod(rest[inputs:])))
    return inner, flats


def _get(
  params: _Params,
  flat: Mapping[str, Any],
  used: set[str],
  entry: Entry,
  ours: str,
  indices: Mapping[str, int | None],
) -> Any:
  """Returns one of our parameters, or a `Remark` why it cannot be loaded."""
  if "{e}" in entry.published and "e" not in indices:
    get = functools.partial(_get, params, flat, used, entry, ours)
    experts = params.experts(ours, indices["i"])
    return _stack([get({**indices, "e": e}) for e in experts])
  name = entry.published.format(**indices)
  if name not in flat:
    return Remark("missing", f"the file has no {name}")
  used.add(name)
  value = flat[name]
  text = f"the file has {conversions.describe(value)} in {name}"
  if not jnp.issubdtype(value.dtype, jnp.floating):
    return Remark("retyped", text)
  if not all(indices["i"] in params.sources.get(x, ()) for x in entry.ours):
    others = ", ".join(part for part in entry.ours if part != ours)
    return Remark("reshaped", f"{text}, with {others}")
  of_parts, flats = params.in_layer(entry, indices["i"])
  number = entry.ours.index(ours)
  shape = _published_shape(entry, flats)
  if entry.ndim is not None and value.ndim == entry.ndim:
    if _without_ones(value.shape) == _without_ones(shape):
      value = value.reshape(shape)
  if entry.convolution and value.ndim == 4:
    value = value.transpose(2, 3, 1, 0).reshape(-1, value.shape[0])
  if tuple(value.shape) != shape:
    return Remark("reshaped", text)
  if entry.transposed:
    value = value.swapaxes(-1, -2)
  first = sum(x[-1] for x in flats[:number])
  part = slice(first, first + flats[number][-1])
  if entry.interleaved:
    part = slice(number, None, len(flats))
  return value[..., part].reshape(of_parts[number])


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
  return tuple(n for n in shape if n > 1)


def _published_shape(
  entry: Entry, flats: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
  shape = (*flats[0][:-1], sum(x[-1] for x in flats))
  return (*shape[:-2], shape[-1], shape[-2]) if entry.transposed else shape


def _stack(parts: Sequence[Any]) -> LazyStack | Remark:
  remarks = [part for part in parts if isinstance(part, Remark)]
  if not remarks:
    return LazyStack(parts)
  others = "; no other layer or expert of this array is loaded either"
  text = remarks[0].text.removesuffix(others) + others
  return remarks[0]._replace(text=text)


class Tensor(NamedTuple):
  """One array of an exported file, built of parts of our parameters."""

  name: str
  shape: tuple[int, ...]
  # (name of our parameter, index of its part) of each part.
  parts: list[tuple[str, tuple[slice, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def export(
  key: str, table: Table, shapes: Shapes, param_dims: dims.Table
) -> list[Tensor]:
  """Returns the arrays of a published file; messages begin with `key`."""
  sources = _sources(shapes)
  params = _Params(shapes, param_dims, sources)
  tensors = []
  for entry in table:
    # A model may lack an entry, such as the head if it is tied.
    for layer in sources.get(entry.ours[0], ()):
      if all(layer in sources.get(ours, ()) for ours in entry.ours):
        tensors += _tensors(params, entry, layer)
  used = {name for tensor in tensors for name, _ in tensor.parts}
  if unused := sorted(set(shapes) - used):
    raise ConfigError(
      f"{key}: the layout has no place for {', '.join(unused[:3])}."
    )
  return tensors


def _tensors(params: _Params, entry: Entry, layer: int | None) -> list[Tensor]:
  """Returns an entry's array in a layer, or one for each expert."""
  inner, flat = params.in_layer(entry, layer)
  experts: Sequence[int | None] = [None]
  if "{e}" in entry.published:
    experts = params.experts(entry.ours[0], layer)
  shape = _published_shape(entry, flat)
  if entry.convolution:
    height, width, inputs, outputs = inner[0]
    shape = (outputs, inputs, height, width)
  if entry.ndim is not None:
    sizes = _without_ones(shape)
    shape = (*[1] * (entry.ndim - len(sizes)), *sizes)

  def build(parts: list[np.ndarray]) -> np.ndarray:
    parts = [part.reshape(shape) for part, shape in zip(parts, flat)]
    value = np.concatenate(parts, axis=-1)
    if entry.interleaved:
      value = np.stack(parts, axis=-1).reshape(value.shape)
    if entry.convolution:
      return value.reshape(inner[0]).transpose(3, 2, 0, 1)
    value = value.swapaxes(-1, -2) if entry.transposed else value
    return value.reshape(shape)

  tensors = []
  for e in experts:
    expert_index = () if e is None else (slice(e, e + 1),)
    parts = []
    for ours, of_part in zip(entry.ours, inner):
      name, layer_index = params.sources[ours][layer]
      rest = (slice(None),) * len(of_part)
      parts.append((name, (*layer_index, *expert_index, *rest)))
    name = entry.published.format(i=layer, e=e)
    tensors.append(Tensor(name, shape, parts, build))
  return tensors
