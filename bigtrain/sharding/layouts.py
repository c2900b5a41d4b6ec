"""Rules for the layout of each array of the state on the mesh.

Parameters and optimizer state are split over `fsdp` by rules, pairs of (regular
expression over state names, layout):

  ("replicated")            every device holds all of it
  ("fsdp")                  the largest dimension that divides is split
  ("fsdp(min_size=65536)")  the same; smaller arrays are replicated
  ("shard_dim(0)")          this dimension is split, or it is an error

The first rule that matches a name decides. Arrays that do not divide are
reported before anything compiles.
"""

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain import trees
from bigtrain.settings import ConfigError, check_kwargs, did_you_mean
from bigtrain.sharding.batches import replicated

DEFAULT_RULES = ((".*", "fsdp"),)

# A layout takes (shape, mesh) and returns (spec, complaint or ""). None leaves
# the shape to the next rules.
Layout = Callable[[tuple[int, ...], Mesh], tuple[PartitionSpec, str] | None]


def _replicated() -> Layout:
  return lambda shape, mesh: (PartitionSpec(), "")


def _fsdp(min_size: int = 1024) -> Layout:
  _check_int("min_size", min_size)

  def layout(shape: tuple[int, ...], mesh: Mesh) -> tuple[PartitionSpec, str]:
    ways = mesh.shape["fsdp"]
    if ways == 1 or np.prod(shape, dtype=np.int64) < min_size:
      return PartitionSpec(), ""
    # Later dimensions win ties: the first is often a stack of layers.
    for dim in sorted(range(len(shape)), key=lambda d: (-shape[d], -d)):
      if shape[dim] % ways == 0:
        return PartitionSpec(*[None] * dim, "fsdp"), ""
    return PartitionSpec(), (
      f"no dimension of {shape} divides by fsdp={ways}; it is replicated"
    )

  return layout


def _shard_dim(dim: int) -> Layout:
  _check_int("dim", dim)

  def layout(shape: tuple[int, ...], mesh: Mesh) -> tuple[PartitionSpec, str]:
    ways = mesh.shape["fsdp"]
    at = dim + len(shape) if dim < 0 else dim
    if not 0 <= at < len(shape):
      raise ConfigError(f"shape {shape} has no dimension {dim}")
    if shape[at] % ways:
      raise ConfigError(
        f"dimension {dim} of shape {shape} is {shape[at]}, which does not "
        f"divide by fsdp={ways}"
      )
    return PartitionSpec(*[None] * at, "fsdp"), ""

  return layout


def along(
  spec: PartitionSpec, shape: tuple[int, ...], names: Sequence[Any]
) -> Layout:
  """Returns the layout `spec` for arrays of one shape.

  Args:
    spec: axes of the mesh, or None, for each dimension.
    shape: the shape; other shapes are left to the next rules.
    names: names of the dimensions, for messages.
  """

  def layout(
    given: tuple[int, ...], mesh: Mesh
  ) -> tuple[PartitionSpec, str] | None:
    if given != shape:
      return None
    if len(spec) > len(shape):
      raise ConfigError(f"shape {shape} has fewer dimensions than {names}")
    for dim, axes in enumerate(spec):
      axes = axes if isinstance(axes, tuple) else (axes,) if axes else ()
      ways = int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
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


_LAYOUTS: dict[str, Callable[..., Layout]] = {
  "replicated": _replicated,
  "fsdp": _fsdp,
  "shard_dim": _shard_dim,
}


def _parse_layout(text: str, key: str) -> Layout:
  try:
    node = ast.parse(text, mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    args = [ast.literal_eval(a) for a in call.args]
    kwargs = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
  except (SyntaxError, ValueError, AttributeError, TypeError) as e:
    raise ConfigError(
      f"{key}: cannot read the layout {text!r}; expected for example 'fsdp' or "
      "'shard_dim(0)'."
    ) from e
  if name not in _LAYOUTS:
    hint = did_you_mean(name, _LAYOUTS)
    raise ConfigError(f"{key}: unknown layout {name!r}.{hint}")
  make = _LAYOUTS[name]
  check_kwargs(make, kwargs, f"{key}.{name}", given=_names(make, args))
  try:
    return make(*args, **kwargs)
  except TypeError as e:
    raise ConfigError(f"{key}: {text!r}: {e}.") from e


def _names(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
  count = fn.__code__.co_argcount
  return list(fn.__code__.co_varnames[: min(len(args), count)])


def state_shardings(
  shapes: Any,
  mesh: Mesh,
  rules: Sequence[tuple[str, str | Layout]] = DEFAULT_RULES,
  key: str = "config.sharding",
) -> tuple[Any, list[str]]:
  """Computes the NamedSharding of each array of the state.

  Args:
    shapes: tree of ShapeDtypeStructs; rules match the names of its leaves.
    mesh: mesh with the axes of `make_mesh`.
    rules: (regular expression, layout) pairs; the first full match decides. A
      layout is a text of the config or a function.
      Arrays without a match are replicated.
    key: location of the rules in the config, for messages.

  Returns:
    (tree of shardings, notes): one note for each array above the rule's
    minimum size that does not divide and is replicated.

  Raises:
    ConfigError: a rule cannot be read, or arrays cannot be split as their rule
      demands; one line lists all of them.
  """
  parsed = []
  for i, rule in enumerate(rules):
    if not isinstance(rule, list | tuple) or len(rule) != 2:
      raise ConfigError(f"{key}[{i}]: expected (regex, layout), got {rule!r}.")
    try:
      pattern = re.compile(rule[0])
    except re.error as e:
      raise ConfigError(f"{key}[{i}]: bad regex {rule[0]!r}: {e}.") from e
    layout = rule[1]
    if not callable(layout):
      layout = _parse_layout(layout, f"{key}[{i}]")
    parsed.append((pattern, layout))
  notes: list[str] = []
  errors: list[str] = []

  def place(name: str, shape: Any) -> NamedSharding:
    for pattern, layout in parsed:
      if pattern.fullmatch(name):
        try:
          placed = layout(tuple(shape.shape), mesh)
        except ConfigError as e:
          errors.append(f"{name}: {e}")
          return replicated(mesh)
        if placed is None:
          continue
        spec, note = placed
        if note:
          notes.append(f"{name}: {note}")
        return NamedSharding(mesh, spec)
    return replicated(mesh)

  shardings = trees.map_with_names(place, shapes)
  if errors:
    raise ConfigError(f"{key}: {'; '.join(errors)}.")
  return shardings, notes


def state_spec(
  shapes: Any,
  mesh: Mesh,
  rules: Sequence[tuple[str, str | Layout]] = DEFAULT_RULES,
) -> Any:
  """Adds shardings to a tree of ShapeDtypeStructs; see `state_shardings`."""
  shardings, notes = state_shardings(shapes, mesh, rules)
  for note in notes:
    logging.warning("config.sharding: %s", note)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def bytes_per_device(shapes: Any, shardings: Any) -> int:
  """Number of bytes of the state that one device holds."""
  total = 0
  pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings))
  for shape, sharding in pairs:
    local = sharding.shard_shape(shape.shape)
    total += int(np.prod(local, dtype=np.int64)) * shape.dtype.itemsize
  return total
