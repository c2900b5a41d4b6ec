"""Rules for the layout of each array of the state on the mesh.

config.sharding is a list of rules, pairs of (regular expression over the names
in the state, layout). A layout is a text such as:

  ("replicated")            every device holds all of it
  ("fsdp")                  the largest dimension that divides is split
  ("fsdp(min_size=65536)")  the same; smaller arrays are replicated
  ("fsdp(0), tensor(-1)")   these dimensions are split, or it is an error
  ("shard_dim(0)")          the same as "fsdp(0)"

The first rule that matches a name decides.

The axes `tensor` and `pipeline` and the axis of experts need no rules: the
model's description of its parameters (arrays/dims.py) says which dimension they
split, and "fsdp" chooses among the other dimensions. `tensor` splits attention
by heads, MLPs and experts by hidden units, embeddings and output layers by
tokens or classes. A layout that names a dimension for one of these axes, or
"replicated", overrides the model's description. In kernels of experts, "fsdp"
splits the experts or else the rows, if they divide.

`place` applies the model's description. `state_shardings` then applies the
rules to the names and shapes of the whole state, before anything compiles, and
reports all arrays that do not divide in one error. This file has four parts:
the state, the layouts, parsing their texts, and the model's description.
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
  nearest_divisors,
  regex,
)
from bigtrain.sharding import memory
from bigtrain.sharding.batches import replicated

DEFAULT_RULES = ((".*", "fsdp"),)

# Arrays with fewer elements are replicated by default: to gather them costs
# more time than they take memory.
_MIN_SIZE = 1024

Shape = tuple[int, ...]
# {dimension: axes that split it}. Dimensions without axes are those that "fsdp"
# should split, the first if it can.
Placed = Mapping[int, tuple[str, ...]]
# A spec, and a note about an array that could not be split, or "".
_Result = tuple[PartitionSpec, str]
# (shape, mesh, what the model's description has placed) -> the array's spec, or
# None if the next matching rule decides.
Layout = Callable[[Shape, Mesh, Placed], _Result | None]
# (regular expression, layout or its text) pairs.
Layouts = Sequence[tuple[str, str | Layout]]


class Rules(NamedTuple):
  """Everything that decides the layout of the state."""

  # The first full match decides; arrays without a match are replicated.
  layouts: Layouts = DEFAULT_RULES
  # The result of `place`.
  of_model: Mapping[str, tuple[Shape, Placed]] = {}
  # Whether `replica` splits the optimizer's state as well (ZeRO-1,
  # https://arxiv.org/abs/1910.02054).
  split_opt: bool = False
  opt_memory: memory.OptMemory = ()

  def placed(self, name: str, shape: Shape) -> Placed:
    """The model's placement of the parameter that an array belongs to.

    Moments of the optimizer and EMAs have a parameter's shape, and its name
    after a prefix: "opt/0/mu/Dense_0/kernel" is split like "Dense_0/kernel".
    """
    while name:
      if name in self.of_model:
        parameter_shape, placed = self.of_model[name]
        if parameter_shape == shape:
          return placed
      name = name.partition("/")[2]
    return {}


def state_spec(
  shapes: Any, mesh: Mesh, rules: Rules | Layouts = DEFAULT_RULES
) -> Any:
  """Adds shardings to a tree of ShapeDtypeStructs.

  Arrays that do not divide and are replicated are logged.
  """
  shardings, notes = state_shardings(shapes, mesh, rules)
  for note in notes:
    logging.warning("config.sharding: %s", note)
  return with_shardings(shapes, shardings)


def with_shardings(shapes: Any, shardings: Any = None) -> Any:
  """Specs of arrays or shapes with shardings, by default the arrays' own."""
  if shardings is None:
    shardings = jax.tree.map(lambda x: x.sharding, shapes)

  def spec(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(spec, shapes, shardings)


def state_shardings(
  shapes: Any,
  mesh: Mesh,
  rules: Rules | Layouts = DEFAULT_RULES,
  key: str = "config.sharding",
) -> tuple[Any, list[str]]:
  """Returns the NamedSharding of each array of the state, and notes.

  There is a note for each array above its rule's minimum size that does not
  divide and is therefore replicated.

  Raises:
    ConfigError: for all arrays that a rule should split and cannot.
  """
  if not isinstance(rules, Rules):
    rules = Rules(rules)
  parsed = [_rule(r, f"{key}[{i}]") for i, r in enumerate(rules.layouts)]
  notes: list[str] = []
  errors: list[str] = []

  def place(name: str, array: Any) -> NamedSharding:
    shape = tuple(array.shape)
    for pattern, layout in parsed:
      if not pattern.fullmatch(name):
        continue
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
  """Splits an array of the optimizer over `replica` too, if it divides.

  It prefers the dimension that is split over `fsdp`, because a device's part of
  the moments then lies within its part of the parameters; otherwise the largest
  dimension, and the last of equal ones.
  """
  ways = mesh.shape["replica"]
  placed = _axes_by_dim(spec)
  used = {axis for axes in placed.values() for axis in axes}
  if ways == 1 or "replica" in used or math.prod(shape) < _MIN_SIZE:
    return spec

  local_size = {}  # Of each dimension, on a device.
  for dim, size in enumerate(shape):
    parts = math.prod(mesh.shape[axis] for axis in placed.get(dim, ()))
    local_size[dim] = size // parts

  def preference(dim: int) -> tuple[bool, int, int]:
    return "fsdp" not in placed.get(dim, ()), -local_size[dim], -dim

  for dim in sorted(local_size, key=preference):
    if local_size[dim] % ways == 0:
      return spec_of({**placed, dim: (*placed.get(dim, ()), "replica")})
  return spec


def spec_of(placed: Placed) -> PartitionSpec:
  """The PartitionSpec of {dimension: axes}.

  >>> spec_of({1: ("fsdp",)}) == PartitionSpec(None, "fsdp")
  True
  """
  entries: list[Any] = []
  last = max((dim for dim, axes in placed.items() if axes), default=-1)
  for dim in range(last + 1):
    axes = placed.get(dim, ())
    if not axes:
      entries.append(None)
    elif len(axes) == 1:
      entries.append(axes[0])
    else:
      entries.append(axes)
  return PartitionSpec(*entries)


def _axes_by_dim(spec: PartitionSpec) -> dict[int, tuple[str, ...]]:
  """The inverse of `spec_of`."""
  result = {}
  for dim, axes in enumerate(spec):
    if axes:
      result[dim] = axes if isinstance(axes, tuple) else (axes,)
  return result


# Layouts.


def _fsdp(dim: int | None = None, *, min_size: int = _MIN_SIZE) -> Layout:
  """Splits `dim`, by default the largest free dimension that divides."""
  check_number("min_size", min_size, whole=True, error=TypeError)
  if dim is not None:
    return _dimension("fsdp", dim)

  def layout(shape: Shape, mesh: Mesh, placed: Placed) -> _Result:
    ways = mesh.shape["fsdp"]
    # Experts may be over `fsdp` already.
    used = any("fsdp" in axes for axes in placed.values())
    if ways == 1 or used or math.prod(shape) < min_size:
      return spec_of(placed), ""
    free = largest_free(shape, ways, placed)
    if free is None:
      note = f"no dimension of {shape} divides by fsdp={ways}; it is replicated"
      return spec_of(placed), note
    return spec_of({**placed, free: ("fsdp",)}), ""

  return layout


def largest_free(shape: Shape, ways: int, placed: Placed) -> int | None:
  """The largest dimension that no axis splits and that `ways` divides.

  Dimensions that are placed without axes come first, in their order.
  """
  free = [
    dim
    for dim, size in enumerate(shape)
    if not placed.get(dim) and size % ways == 0
  ]
  for dim in free:
    if dim in placed:
      return dim
  # The last of equal ones: the first is often a stack of layers, and a loop
  # over layers would have to gather all of them.
  return max(free, key=lambda dim: (shape[dim], dim), default=None)


def _dimension(axis: str, dim: int) -> Layout:
  """Splits dimension `dim` over `axis`; an array that cannot be is an error."""
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
        f"{nearest_divisors(ways, shape[at])}"
      )
    return spec_of({**placed, at: axes}), ""

  return layout


def along(spec: PartitionSpec, shape: Shape, names: Sequence[Any]) -> Layout:
  """A layout from a flax model's own names of dimensions, config.logical_axes.

  Args:
    spec: spec of a parameter.
    shape: its shape. Arrays of other shapes, such as factored moments, follow
      the next rules.
    names: names of its dimensions, for messages.
  """

  def layout(given: Shape, mesh: Mesh, placed: Placed) -> _Result | None:
    del placed  # `spec` is the model's own description.
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


def _replicated() -> Layout:
  return lambda shape, mesh, placed: (PartitionSpec(), "")


# Texts of layouts.

_LAYOUTS: dict[str, Callable[..., Layout]] = {
  "replicated": _replicated,
  "fsdp": _fsdp,
  "shard_dim": functools.partial(_dimension, "fsdp"),
  "tensor": functools.partial(_dimension, "tensor"),
  "sequence": functools.partial(_dimension, "sequence"),
  "replica": functools.partial(_dimension, "replica"),
  "pipeline": functools.partial(_dimension, "pipeline"),
}


def _rule(rule: Any, key: str) -> tuple[re.Pattern[str], Layout]:
  if not isinstance(rule, list | tuple) or len(rule) != 2:
    raise ConfigError(f"{key}: expected (regex, layout), got {rule!r}.")
  pattern, layout = rule
  if not callable(layout):
    layout = _parse_layout(layout, key)
  return regex(key, pattern), layout


class _Term(NamedTuple):
  """One of the comma-separated parts of a layout's text."""

  name: str
  args: list[Any]
  kwargs: dict[str, Any]


def _parse_terms(text: str, key: str) -> list[_Term]:
  try:
    node = ast.parse(text, mode="eval").body
    terms = []
    for element in node.elts if isinstance(node, ast.Tuple) else [node]:
      # "fsdp" is the same as "fsdp()".
      call = element
      if not isinstance(call, ast.Call):
        call = ast.Call(element, [], [])
      args = [ast.literal_eval(arg) for arg in call.args]
      kwargs = {
        # "**" is not a keyword, so check_kwargs refuses it.
        keyword.arg or "**": ast.literal_eval(keyword.value)
        for keyword in call.keywords
      }
      terms.append(_Term(ast.unparse(call.func), args, kwargs))
    return terms
  except (SyntaxError, ValueError, AttributeError, TypeError) as e:
    raise ConfigError(
      f"{key}: cannot read the layout {text!r}; expected for example 'fsdp' or "
      "'fsdp(0), tensor(-1)'."
    ) from e


def _parse_layout(text: str, key: str) -> Layout:
  terms = _parse_terms(text, key)
  of_dimensions, searching = [], []
  named_axes: set[str] = set()
  for name, args, kwargs in terms:
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
      of_dimensions.append(layout)
      named_axes.add("fsdp" if name == "shard_dim" else name)
    else:
      searching.append(layout)
  names = [term.name for term in terms]
  if len(set(names)) < len(names) or (len(names) > 1 and "replicated" in names):
    raise ConfigError(
      f"{key}: {text!r} names an axis twice, or 'replicated' and an axis."
    )
  # "fsdp" alone searches for a dimension that no other axis splits, so it has
  # to be the last.
  return _in_turn([*of_dimensions, *searching], named_axes)


def _in_turn(layouts: Sequence[Layout], named_axes: set[str]) -> Layout:
  """Applies several layouts one after the other.

  Args:
    layouts: layouts that always return a result.
    named_axes: axes for which the config names a dimension. The model's
      placement of these is dropped.
  """

  def layout(shape: Shape, mesh: Mesh, placed: Placed) -> _Result:
    preferred = {dim: axes for dim, axes in placed.items() if not axes}
    remaining = dict(preferred)
    for dim, axes in placed.items():
      kept = tuple(axis for axis in axes if axis not in named_axes)
      if kept:
        remaining[dim] = kept
    spec = PartitionSpec()
    notes = []
    for one in layouts:
      result = one(shape, mesh, remaining)
      assert result is not None
      spec, note = result
      remaining = preferred | _axes_by_dim(spec)
      if note:
        notes.append(note)
    return spec, "; ".join(notes)

  return layout


# The model's description of its parameters.

# Number of arrays that a message lists by name.
_MAX_LISTED = 4

# Dimensions that `tensor` splits (see arrays/dims.py for the letters), and
# whether a size that does not divide is an error. Where it is none, every
# device of a group holds the whole array, with a warning. For heads of keys and
# values that do not divide see `tensor.columns`.
_SPLIT_BY_TENSOR = {"H": True, "F": True, "G": False, "V": False}


class _Split(NamedTuple):
  """The dimension that an axis splits, and whether it must divide evenly."""

  dim: int
  required: bool


def place(
  table: dims.Table, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> dict[str, tuple[Shape, Placed]]:
  """Places the mesh's axes on the dimensions that a model describes.

  Args:
    table: the model's description of its parameters.
    shapes: {name of a parameter: shape}.
    sizes: {axis: size}; other axes are not placed.

  Returns: {name: (shape, {dimension: axes})} of the parameters that are split,
    and of the kernels of experts.
  """
  splits = {name: _splits(table, name, shapes[name]) for name in shapes}
  placed: dict[str, dict[int, tuple[str, ...]]] = {}
  for axis, ways in sizes.items():
    if ways == 1:
      continue
    by_axis = {name: s[axis] for name, s in splits.items() if axis in s}
    if axis == "pipeline" and not by_axis:
      raise ConfigError(
        f"config.mesh.pipeline={ways}: the model has no loop over layers; "
        "expected config.model.scan=True, or 1 if there is no such key."
      )
    for name, dim in _dividing(by_axis, shapes, axis, ways).items():
      placed.setdefault(name, {})[dim] = (axis,)
  if sizes.get("fsdp", 1) > 1:
    for name, shape in shapes.items():
      roles = dims.find(table, name)
      if roles is not None and roles.stack and roles.inputs:
        placed[name] = experts_or_rows(shape) | placed.get(name, {})
  return {name: (shapes[name], axes) for name, axes in placed.items()}


def experts_or_rows(shape: Shape) -> dict[int, tuple[str, ...]]:
  """The dimensions of experts' kernels [..., E, D, F] for `fsdp`: E, or else D.

  A TPU gathers whole experts in place, and rows if each device has a multiple
  of eight. It copies other kernels that it has gathered to the layout that the
  products need, and their gradients back.
  """
  return {len(shape) - 3: (), len(shape) - 2: ()}


def _splits(table: dims.Table, name: str, shape: Shape) -> dict[str, _Split]:
  """{axis: the dimension of the parameter that it splits}."""
  roles = dims.find(table, name)
  if roles is None:
    return {}
  letters = [*roles.stack, *roles.inputs, *roles.outputs]
  result: dict[str, _Split] = {}
  stacked = len(shape) - len(letters)
  if stacked > 0:  # A loop over layers has put a dimension in front.
    result["pipeline"] = _Split(0, required=True)
  for dim, letter in enumerate(letters, start=stacked):
    axis = roles.axes.get(dim - len(shape))  # It counts from the end.
    if axis is not None:
      result.setdefault(axis, _Split(dim, required=True))
    elif letter in _SPLIT_BY_TENSOR:
      required = _SPLIT_BY_TENSOR[letter]
      result.setdefault("tensor", _Split(dim, required))
  return result


def _dividing(
  splits: Mapping[str, _Split],
  shapes: Mapping[str, Shape],
  axis: str,
  ways: int,
) -> dict[str, int]:
  """{name: dimension} of the parameters that `ways` divides.

  Raises:
    ConfigError: for those that have to divide and do not.
  """
  result: dict[str, int] = {}
  errors: list[str] = []
  whole: list[str] = []
  for name, (dim, required) in splits.items():
    shape = shapes[name]
    text = f"{name} (dimension {dim} of {shape} is {shape[dim]})"
    if shape[dim] % ways == 0:
      result[name] = dim
    elif required:
      errors.append(text)
    else:
      whole.append(text)
  key = f"config.mesh.{axis}={ways}"
  if errors:
    required_sizes = [
      shapes[name][split.dim]
      for name, split in splits.items()
      if split.required
    ]
    common = math.gcd(*required_sizes)
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    nearest = sorted(divisors, key=lambda n: abs(n - ways))[:2]
    raise ConfigError(
      f"{key} does not divide {_listed(errors)}; the nearest sizes that work "
      f"for all: {' and '.join(str(n) for n in sorted(nearest))}."
    )
  if whole:
    logging.warning(
      "%s does not divide %s: each device has all of it.", key, _listed(whole)
    )
  return result


def _listed(names: Sequence[str]) -> str:
  text = ", ".join(names[:_MAX_LISTED])
  if len(names) > _MAX_LISTED:
    text += f", and {len(names) - _MAX_LISTED} more"
  return text
