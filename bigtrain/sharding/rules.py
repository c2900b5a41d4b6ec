"""Rules for the layout of each array of the state on the mesh.

A rule is a pair of (regular expression over state names, layout):

  ("replicated")            every device holds all of it
  ("fsdp")                  the largest dimension that divides is split
  ("fsdp(min_size=65536)")  the same; smaller arrays are replicated
  ("fsdp(0), tensor(-1)")   these dimensions are split, or it is an error
  ("shard_dim(0)")          the same as "fsdp(0)"

The first rule that matches a name decides. The model's own rules
(model_rules.py) say which dimension goes over `tensor`, and over the axis of
experts, unless the layout names a dimension for this axis or is "replicated";
"fsdp" leaves out those dimensions. Arrays that do not divide are reported
before anything compiles.
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

from bigtrain import trees
from bigtrain.settings import ConfigError, check_choice, check_kwargs
from bigtrain.sharding import memory
from bigtrain.sharding.batches import replicated

DEFAULT_RULES = ((".*", "fsdp"),)

# Smaller arrays are replicated by default.
_MIN_SIZE = 1024

# Axes by dimension.
Placed = Mapping[int, tuple[str, ...]]

# A layout takes (shape, mesh, axes that the model's rules have placed) and
# returns (spec, complaint or ""). None leaves the shape to the next rules.
Layout = Callable[
  [tuple[int, ...], Mesh, Placed], tuple[PartitionSpec, str] | None
]


class Rules(NamedTuple):
  """All that decides the layout of the state.

  Attributes:
    layouts: (regular expression, layout) pairs; the first full match decides.
      Arrays without a match are replicated.
    of_model: the axes that the model's rules have placed, by name of a
      parameter: (its shape, axes by dimension). Arrays of the same shape whose
      names end with that name, such as moments of the optimizer, are split
      alike.
    split_opt: whether the optimizer's state is split over `replica` as well
      (ZeRO-1, https://arxiv.org/abs/1910.02054).
    opt_memory: memory in which the optimizer's state stays; see memory.py.
  """

  layouts: Sequence[tuple[str, str | Layout]] = DEFAULT_RULES
  of_model: Mapping[str, tuple[tuple[int, ...], Placed]] = {}
  split_opt: bool = False
  opt_memory: memory.OptMemory = ()

  def placed(self, name: str, shape: tuple[int, ...]) -> Placed:
    parts = name.split("/")
    for start in range(len(parts)):
      known = self.of_model.get("/".join(parts[start:]))
      if known is not None and known[0] == shape:
        return known[1]
    return {}


def state_spec(
  shapes: Any,
  mesh: Mesh,
  rules: Rules | Sequence[tuple[str, str | Layout]] = DEFAULT_RULES,
) -> Any:
  """Adds shardings to a tree of ShapeDtypeStructs, and logs the notes."""
  shardings, notes = state_shardings(shapes, mesh, rules)
  for note in notes:
    logging.warning("config.sharding: %s", note)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def state_shardings(
  shapes: Any,
  mesh: Mesh,
  rules: Rules | Sequence[tuple[str, str | Layout]] = DEFAULT_RULES,
  key: str = "config.sharding",
) -> tuple[Any, list[str]]:
  """Computes the NamedSharding of each array of the state.

  Also returns a note for each array above the rule's minimum size that does not
  divide and is replicated. A ConfigError lists all arrays that cannot be split.
  """
  if not isinstance(rules, Rules):
    rules = Rules(rules)
  parsed = [
    _parse_rule(rule, f"{key}[{i}]") for i, rule in enumerate(rules.layouts)
  ]
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
  shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
  """Splits an array of the optimizer over `replica` as well, if one divides.

  First the dimension that `fsdp` splits: a device then holds a part of the rows
  that it updates anyway.
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
  dims = [placed.get(d, ()) for d in range(max(placed, default=-1) + 1)]
  return PartitionSpec(
    *[axes[0] if len(axes) == 1 else axes or None for axes in dims]
  )


def _axes_by_dim(spec: PartitionSpec) -> dict[int, tuple[str, ...]]:
  return {
    dim: axes if isinstance(axes, tuple) else (axes,)
    for dim, axes in enumerate(spec)
    if axes
  }


# Layouts.


def _replicated() -> Layout:
  return lambda shape, mesh, placed: (PartitionSpec(), "")


def _fsdp(dim: int | None = None, *, min_size: int = _MIN_SIZE) -> Layout:
  """Splits the largest free dimension that divides, unless one is given."""
  _check_int("min_size", min_size)
  if dim is not None:
    return _on("fsdp", dim)

  def layout(
    shape: tuple[int, ...], mesh: Mesh, placed: Placed
  ) -> tuple[PartitionSpec, str]:
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


def largest_free(
  shape: tuple[int, ...], ways: int, placed: Placed
) -> int | None:
  # Later dimensions win ties: the first is often a stack of layers.
  free = [d for d, n in enumerate(shape) if d not in placed and n % ways == 0]
  return max(free, key=lambda d: (shape[d], d), default=None)


def _on(axis: str, dim: int) -> Layout:
  _check_int("dim", dim)

  def layout(
    shape: tuple[int, ...], mesh: Mesh, placed: Placed
  ) -> tuple[PartitionSpec, str]:
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


def along(
  spec: PartitionSpec, shape: tuple[int, ...], names: Sequence[Any]
) -> Layout:
  """The layout `spec` for arrays of one shape; others follow the next rules."""

  def layout(
    given: tuple[int, ...], mesh: Mesh, placed: Placed
  ) -> tuple[PartitionSpec, str] | None:
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


def _check_int(name: str, value: Any) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"{name} is {value!r}, expected a whole number")


# Texts of a config.


_LAYOUTS: dict[str, Callable[..., Layout]] = {
  "replicated": _replicated,
  "fsdp": _fsdp,
  "shard_dim": functools.partial(_on, "fsdp"),
  "tensor": functools.partial(_on, "tensor"),
  "sequence": functools.partial(_on, "sequence"),
  "replica": functools.partial(_on, "replica"),
}


def _parse_rule(rule: Any, key: str) -> tuple[re.Pattern[str], Layout]:
  if not isinstance(rule, list | tuple) or len(rule) != 2:
    raise ConfigError(f"{key}: expected (regex, layout), got {rule!r}.")
  try:
    pattern = re.compile(rule[0])
  except re.error as e:
    raise ConfigError(f"{key}: bad regex {rule[0]!r}: {e}.") from e
  layout = rule[1]
  return pattern, layout if callable(layout) else _parse_layout(layout, key)


def _parse_layout(text: str, key: str) -> Layout:
  try:
    node = ast.parse(text, mode="eval").body
    terms = node.elts if isinstance(node, ast.Tuple) else [node]
    calls = [
      t if isinstance(t, ast.Call) else ast.Call(t, [], []) for t in terms
    ]
    parsed = [
      (
        ast.unparse(call.func),
        [ast.literal_eval(a) for a in call.args],
        {k.arg or "**": ast.literal_eval(k.value) for k in call.keywords},
      )
      for call in calls
    ]
  except (SyntaxError, ValueError, AttributeError, TypeError) as e:
    raise ConfigError(
      f"{key}: cannot read the layout {text!r}; expected for example 'fsdp' or "
      "'fsdp(0), tensor(-1)'."
    ) from e
  # Those that search for a dimension come last.
  last: list[Layout] = []
  first: list[Layout] = []
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
      raise ConfigError(f"{key}: {text!r}: {e}.") from e
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

  def layout(
    shape: tuple[int, ...], mesh: Mesh, placed: Placed
  ) -> tuple[PartitionSpec, str]:
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
