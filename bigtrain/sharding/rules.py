"""Rules for the layout of each array of the state on the mesh.

A rule is a pair of (regular expression over state names, layout):

  ("replicated")            every device holds all of it
  ("fsdp")                  the largest dimension that divides is split
  ("fsdp(min_size=65536)")  the same; smaller arrays are replicated
  ("fsdp(0), tensor(-1)")   these dimensions are split, or it is an error
  ("shard_dim(0)")          the same as "fsdp(0)"

The first rule that matches a name decides. The model's description of its
parameters (dims.py) says which dimension goes over `tensor`, `pipeline` and the
axis of experts, unless the layout names a dimension for this axis or is
"replicated"; "fsdp" leaves out those dimensions. `tensor` splits attention by
heads, MLPs and experts by hidden units, embeddings and output layers by tokens
or classes. Arrays that do not divide are reported before anything compiles.
"""

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain.arrays import dims, trees
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
  regex,
)
from bigtrain.sharding import memory
from bigtrain.sharding.batches import replicated

DEFAULT_RULES = ((".*", "fsdp"),)

_MIN_SIZE = 1024  # Smaller arrays are replicated by default.

Shape = tuple[int, ...]
# Axes by dimension.
Placed = Mapping[int, tuple[str, ...]]
# A spec, and a complaint or "".
_Result = tuple[PartitionSpec, str]
# From the axes that the model's rules have placed; None for the next rules.
Layout = Callable[[Shape, Mesh, Placed], _Result | None]
# (regular expression, layout or its text in the config) pairs.
Layouts = Sequence[tuple[str, str | Layout]]


class Rules(NamedTuple):
  """All that decides the layout of the state."""

  # The first full match decides; arrays without a match are replicated.
  layouts: Layouts = DEFAULT_RULES
  # What `place` returns. Arrays of the same shape whose names end with that of
  # a parameter, such as moments of the optimizer, are split alike.
  of_model: Mapping[str, tuple[Shape, Placed]] = {}
  # Whether `replica` splits the optimizer's state as well (ZeRO-1,
  # https://arxiv.org/abs/1910.02054).
  split_opt: bool = False
  opt_memory: memory.OptMemory = ()

  def placed(self, name: str, shape: Shape) -> Placed:
    while name:
      known = self.of_model.get(name)
      if known is not None and known[0] == shape:
        return known[1]
      name = name.partition("/")[2]
    return {}


def state_spec(
  shapes: Any, mesh: Mesh, rules: Rules | Layouts = DEFAULT_RULES
) -> Any:
  """Adds shardings to a tree of ShapeDtypeStructs, and logs the notes."""
  shardings, notes = state_shardings(shapes, mesh, rules)
  for note in notes:
    logging.warning("config.sharding: %s", note)
  return with_shardings(shapes, shardings)


def with_shardings(shapes: Any, shardings: Any = None) -> Any:
  """Specs of arrays or shapes with shardings, by default the arrays' own."""
  if shardings is None:
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
  spec = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return jax.tree.map(spec, shapes, shardings)


def state_shardings(
  shapes: Any,
  mesh: Mesh,
  rules: Rules | Layouts = DEFAULT_RULES,
  key: str = "config.sharding",
) -> tuple[Any, list[str]]:
  """Computes the NamedSharding of each array of the state, and notes.

  There is a note for each array above the rule's minimum size that does not
  divide and is replicated. A ConfigError lists all arrays that cannot be split.
  """
  if not isinstance(rules, Rules):
    rules = Rules(rules)
  parsed = [_rule(r, f"{key}[{i}]") for i, r in enumerate(rules.layouts)]
  notes: list[str] = []
  errors: list[str] = []

  def place(name: str, array: Any) -> NamedSharding:
    shape = tuple(array.shape)
    for pattern, layout in parsed:
      if pattern.fullmatch(name):
        try:
          result = layout(shape, mesh, rules.placed(name, shape))
        except ConfigError as e:
          errors.append(f"{name}: {e}")
          return replicated(mesh)
        if result is None:
          continue
        spec, note = result
        if note:
          notes.append(f"{name}: {note}")
        if rules.split_opt and name.startswith("opt/"):
          spec = _over_replica(shape, spec, mesh)
        return NamedSharding(mesh, spec)
    return replicated(mesh)

  shardings = trees.map_with_names(place, shapes)
  if errors:
    raise ConfigError(f"{key}: {'; '.join(errors)}.")
  return memory.placed(shapes, shardings, mesh, rules.opt_memory), notes


def _over_replica(
  shape: Shape, spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
  """Splits an array of the optimizer over `replica` as well, if one divides.

  `fsdp`'s dimension first: a device then holds rows that it updates anyway.
  """
  ways = mesh.shape["replica"]
  placed = _axes_by_dim(spec)
  taken = {axis for axes in placed.values() for axis in axes}
  if ways == 1 or "replica" in taken or math.prod(shape) < _MIN_SIZE:
    return spec
  local = {
    d: size // math.prod(mesh.shape[a] for a in placed.get(d, ()))
    for d, size in enumerate(shape)
  }
  order = sorted(
    local, key=lambda d: ("fsdp" not in placed.get(d, ()), -local[d], -d)
  )
  for dim in order:
    if local[dim] % ways == 0:
      return spec_of({**placed, dim: (*placed.get(dim, ()), "replica")})
  return spec


def spec_of(placed: Placed) -> PartitionSpec:
  by_dim = [placed.get(d, ()) for d in range(max(placed, default=-1) + 1)]
  return PartitionSpec(
    *[axes[0] if len(axes) == 1 else axes or None for axes in by_dim]
  )


def _axes_by_dim(spec: PartitionSpec) -> dict[int, tuple[str, ...]]:
  as_tuple = lambda axes: axes if isinstance(axes, tuple) else (axes,)
  return {dim: as_tuple(axes) for dim, axes in enumerate(spec) if axes}


# Layouts.


def _fsdp(dim: int | None = None, *, min_size: int = _MIN_SIZE) -> Layout:
  """Splits the largest free dimension that divides, unless one is given."""
  check_number("min_size", min_size, whole=True, error=TypeError)
  if dim is not None:
    return _on("fsdp", dim)

  def layout(shape: Shape, mesh: Mesh, placed: Placed) -> _Result:
    ways = mesh.shape["fsdp"]
    taken = any("fsdp" in axes for axes in placed.values())
    if ways == 1 or taken or math.prod(shape) < min_size:
      return spec_of(placed), ""
    free = largest_free(shape, ways, placed)
    if free is not None:
      return spec_of({**placed, free: ("fsdp",)}), ""
    return spec_of(placed), (
      f"no dimension of {shape} divides by fsdp={ways}; it is replicated"
    )

  return layout


def largest_free(shape: Shape, ways: int, placed: Placed) -> int | None:
  # Later dimensions win ties: the first is often a stack of layers.
  free = [d for d, n in enumerate(shape) if d not in placed and n % ways == 0]
  return max(free, key=lambda d: (shape[d], d), default=None)


def _on(axis: str, dim: int) -> Layout:
  check_number("dim", dim, whole=True, error=TypeError)

  def layout(shape: Shape, mesh: Mesh, placed: Placed) -> _Result:
    at = dim + len(shape) if dim < 0 else dim
    if not 0 <= at < len(shape):
      raise ConfigError(f"shape {shape} has no dimension {dim}")
    axes = (*placed.get(at, ()), axis)
    ways = math.prod(mesh.shape[axis] for axis in axes)
    if shape[at] % ways:
      by = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
      raise ConfigError(
        f"dimension {at} of shape {shape} is {shape[at]}, which does not "
        f"divide by {by}; the nearest sizes that work: "
        f"{_nearest(ways, shape[at])}"
      )
    return spec_of({**placed, at: axes}), ""

  return layout


def _nearest(size: int, dim: int) -> str:
  """Names the nearest sizes that divide a dimension.

  >>> _nearest(4, 6), _nearest(3, 50257)
  ('3 and 6', '1 and 29')
  """
  divisors = [n for n in range(1, dim + 1) if dim % n == 0]
  down = max(n for n in divisors if n < size)
  up = [n for n in divisors if n > size]
  return " and ".join(map(str, [down, *up[:1]]))


def along(spec: PartitionSpec, shape: Shape, names: Sequence[Any]) -> Layout:
  """The layout `spec` for arrays of one shape; others follow the next rules."""

  def layout(given: Shape, mesh: Mesh, placed: Placed) -> _Result | None:
    del placed  # Names of dimensions are also the model's.
    if given != shape:
      return None
    if len(spec) > len(shape):
      raise ConfigError(f"shape {shape} has fewer dimensions than {names}")
    for dim, axes in _axes_by_dim(spec).items():
      ways = math.prod(mesh.shape[axis] for axis in axes)
      if shape[dim] % ways:
        raise ConfigError(
          f"dimension {dim} ({names[dim]!r}) of shape {shape} is {shape[dim]}, "
          f"which does not divide by {' x '.join(axes)} = {ways} "
          "(config.logical_axes)"
        )
    return spec, ""

  return layout


# Texts of a config.

_LAYOUTS: dict[str, Callable[..., Layout]] = {
  "replicated": lambda: lambda shape, mesh, placed: (PartitionSpec(), ""),
  "fsdp": _fsdp,
  "shard_dim": functools.partial(_on, "fsdp"),
  "tensor": functools.partial(_on, "tensor"),
  "sequence": functools.partial(_on, "sequence"),
  "replica": functools.partial(_on, "replica"),
  "pipeline": functools.partial(_on, "pipeline"),
}


def _rule(rule: Any, key: str) -> tuple[re.Pattern[str], Layout]:
  if not isinstance(rule, list | tuple) or len(rule) != 2:
    raise ConfigError(f"{key}: expected (regex, layout), got {rule!r}.")
  pattern, layout = regex(key, rule[0]), rule[1]
  return pattern, layout if callable(layout) else _parse_layout(layout, key)


def _parse_layout(text: str, key: str) -> Layout:
  try:
    node = ast.parse(text, mode="eval").body
    terms = node.elts if isinstance(node, ast.Tuple) else [node]
    parsed = []
    for term in terms:
      call = term if isinstance(term, ast.Call) else ast.Call(term, [], [])
      args = [ast.literal_eval(a) for a in call.args]
      kwargs = {k.arg or "**": ast.literal_eval(k.value) for k in call.keywords}
      parsed.append((ast.unparse(call.func), args, kwargs))
  except (SyntaxError, ValueError, AttributeError, TypeError) as e:
    raise ConfigError(
      f"{key}: cannot read the layout {text!r}; expected for example 'fsdp' or "
      "'fsdp(0), tensor(-1)'."
    ) from e
  # Those that search for a dimension come last.
  first, last = [], []
  named_axes: set[str] = set()
  for name, args, kwargs in parsed:
    make = _LAYOUTS[check_choice(key, name, _LAYOUTS)]
    signature = inspect.signature(make)
    given = list(signature.parameters)[: len(args)]
    check_kwargs(make, kwargs, f"{key}.{name}", given=given)
    try:
      signature.bind(*args, **kwargs)
      layout = make(*args, **kwargs)
    except TypeError as e:
      raise ConfigError(f"{key}: {text!r}: {str(e).rstrip('.')}.") from e
    if args or "dim" in kwargs:
      first.append(layout)
      named_axes.add("fsdp" if name == "shard_dim" else name)
    else:
      last.append(layout)
  names = [name for name, _, _ in parsed]
  if len(set(names)) < len(names) or (len(names) > 1 and "replicated" in names):
    raise ConfigError(
      f"{key}: {text!r} names an axis twice, or 'replicated' and an axis."
    )
  return _in_turn([*first, *last], named_axes)


def _in_turn(layouts: Sequence[Layout], named_axes: set[str]) -> Layout:
  """Applies several layouts; `named_axes` replace the model's."""

  def layout(shape: Shape, mesh: Mesh, placed: Placed) -> _Result:
    notes = []
    free = lambda axes: tuple(a for a in axes if a not in named_axes)
    placed = {d: free(axes) for d, axes in placed.items() if free(axes)}
    spec = PartitionSpec()
    for one in layouts:
      result = one(shape, mesh, placed)
      assert result is not None
      spec, note = result
      placed = _axes_by_dim(spec)
      notes += [note] if note else []
    return spec, "; ".join(notes)

  return layout


# The model's rules.

# Arrays that a message lists by name.
_MOST_NAMES = 4

# {dimension that `tensor` splits: whether a size that does not divide is an
# error}. Otherwise every device of a group has the whole array, which is a
# warning: for heads of keys and values see sharding.columns.
_OVER_TENSOR = {"H": True, "F": True, "G": False, "V": False}


def place(
  table: dims.Table, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> dict[str, tuple[Shape, Placed]]:
  """{name: (shape, axes by dimension)} by the model's own rules."""
  splits = {name: _splits(table, name, x) for name, x in shapes.items()}
  placed: dict[str, dict[int, tuple[str, ...]]] = {}
  for axis, ways in sizes.items():
    own = {name: split[axis] for name, split in splits.items() if axis in split}
    if axis == "pipeline" and ways > 1 and not own:
      raise ConfigError(
        f"config.mesh.pipeline={ways}: the model has no loop over layers; "
        "expected config.model.scan=True, or 1 if there is no such key."
      )
    if ways > 1:
      for name, dim in _dims(own, shapes, axis, ways).items():
        placed.setdefault(name, {})[dim] = (axis,)
  return {name: (shapes[name], at) for name, at in placed.items()}


def _splits(
  table: dims.Table, name: str, shape: Shape
) -> dict[str, tuple[int, bool]]:
  """Returns {axis: (negative dimension, whether it must divide)}."""
  roles = dims.find(table, name)
  if roles is None:
    return {}
  letters = [*roles.stack, *roles.inputs, *roles.outputs]
  result: dict[str, tuple[int, bool]] = {}
  if len(shape) > len(letters):  # A loop over layers.
    result["pipeline"] = (0, True)
  for dim, letter in enumerate(letters, -len(letters)):
    if dim in roles.axes:
      result.setdefault(roles.axes[dim], (dim, True))
    elif letter in _OVER_TENSOR:
      result.setdefault("tensor", (dim, _OVER_TENSOR[letter]))
  return result


def _dims(
  splits: Mapping[str, tuple[int, bool]],
  shapes: Mapping[str, Shape],
  axis: str,
  ways: int,
) -> dict[str, int]:
  result: dict[str, int] = {}
  wrong: list[str] = []
  whole: list[str] = []
  for name, (negative, needed) in splits.items():
    shape = shapes[name]
    dim = negative % len(shape)
    if shape[dim] % ways == 0:
      result[name] = dim
    else:
      text = f"{name} (dimension {dim} of {shape} is {shape[dim]})"
      (wrong if needed else whole).append(text)
  key = f"config.mesh.{axis}={ways}"
  if wrong:
    needed_dims = [(n, dim) for n, (dim, needed) in splits.items() if needed]
    common = math.gcd(*[shapes[name][dim] for name, dim in needed_dims])
    works = [n for n in range(1, common + 1) if common % n == 0]
    near = sorted(sorted(works, key=lambda n: abs(n - ways))[:2])
    raise ConfigError(
      f"{key} does not divide {_listed(wrong)}; the nearest sizes that work "
      f"for all: {' and '.join(map(str, near))}."
    )
  if whole:
    logging.warning(
      "%s does not divide %s: each device has all of it.", key, _listed(whole)
    )
  return result


def _listed(names: Sequence[str]) -> str:
  more = len(names) - _MOST_NAMES
  rest = f", and {more} more" if more > 0 else ""
  return ", ".join(names[:_MOST_NAMES]) + rest
