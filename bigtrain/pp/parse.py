"""Parses preprocessing from a string: "decode|inception_crop(224)|flip_lr".

The string is parsed as Python, but never evaluated: a spec may have names of
registered ops with literals as arguments, joined by "|", and nothing else.
"""

import ast
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.pp import registry

# Importing these modules registers bigtrain's own ops. They import tensorflow
# only when an op needs it.
_OWN_MODULES = (
  "bigtrain.pp.ops_basic",
  "bigtrain.pp.ops_labels",
  "bigtrain.pp.ops_image",
  "bigtrain.pp.ops_seq2seq",
  "bigtrain.pp.ops_text",
  "bigtrain.pp.ops_tokenize",
  "bigtrain.pp.ops_locca",
  "bigtrain.pp.ops_augment",
  "bigtrain.pp.ops_render",
  "bigtrain.pp.randaug",
)


class _Call(NamedTuple):
  """An op of a spec."""

  op: registry.Op
  name: str  # In the registry.
  arguments: dict[str, Any]  # By name, with the defaults.


def parse(
  spec: str, modules: Sequence[str] = (), *, defer_errors: bool = False
) -> list[registry.Op]:
  """Parses a spec, such as "decode|resize(224)|value_range(-1, 1)", into ops.

  Args:
    modules: the user's modules, which register ops when they are imported.
    defer_errors: an op that cannot be made, perhaps because its file is
      missing, is an error only when it is called.
  """
  modules = [modules] if isinstance(modules, str) else modules
  for module in (*_OWN_MODULES, *modules):
    _import(module)
  if not isinstance(spec, str):
    raise ConfigError(f"preprocessing: expected a string, got {spec!r}.")
  if not spec.strip():
    raise ConfigError(
      "preprocessing: the spec is empty; expected ops joined by '|', such as "
      "'decode|resize(224)|value_range(-1, 1)'."
    )
  # "a|b|c" is (a | b) | c to Python: the last op is at the top of the tree.
  nodes: list[ast.expr] = []
  tree = _tree(spec)
  while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
    nodes.insert(0, tree.right)
    tree = tree.left
  nodes.insert(0, tree)
  calls = []
  for i, node in enumerate(nodes, 1):
    segment = ast.get_source_segment(f"(\n{spec}\n)", node) or ""
    where = f"preprocessing op {i} of {len(nodes)}"
    calls.append(_call(node, where, " ".join(segment.split()), defer_errors))
  return [call.op for call in _fuse(calls)]


def _import(module: str) -> None:
  try:
    importlib.import_module(module)
  except ModuleNotFoundError as e:
    if e.name and (module == e.name or module.startswith(e.name + ".")):
      raise ConfigError(
        f"config.pp_modules: cannot import {module!r}: no module named "
        f"{e.name!r}."
      ) from e
    raise


def _tree(spec: str) -> ast.expr:
  # The parentheses let a spec span lines.
  try:
    node = ast.parse(f"(\n{spec}\n)", mode="eval").body
  except SyntaxError as e:
    lines = spec.splitlines()
    at = "at its end"
    if e.lineno and e.offset and 2 <= e.lineno < 2 + len(lines):
      before = sum(len(line) + 1 for line in lines[: e.lineno - 2])
      at = f"at character {before + e.offset}"
    raise ConfigError(f"preprocessing {spec!r}, {at}: {e.msg}.") from e
  except (ValueError, RecursionError, MemoryError) as e:
    # A null byte, or a nesting too deep for the parser.
    raise ConfigError(f"preprocessing {spec[:80]!r}: {e}.") from e
  # A node on the first line means that the spec closed the added parenthesis,
  # as "a)|(b" does.
  if node.lineno == 1:
    raise ConfigError(
      f"preprocessing {spec!r}: expected name or name(literals), joined by '|'."
    )
  return node


def _call(node: ast.expr, where: str, text: str, defer_errors: bool) -> _Call:
  """Makes the op of a node; `text` is its part of the spec."""
  func = node.func if isinstance(node, ast.Call) else node
  if not isinstance(func, ast.Name):
    raise ConfigError(
      f"{where}: expected a name or name(literals), got {text!r} (specs are "
      "never evaluated as code)."
    )
  where = f"{where}, {text!r}"
  args: list[Any] = []
  kwargs: dict[str, Any] = {}
  if isinstance(node, ast.Call):
    args = [_literal(arg, where) for arg in node.args]
    for keyword in node.keywords:
      if keyword.arg is None:
        raise ConfigError(f"{where}: expected name=literal, got '**'.")
      kwargs[keyword.arg] = _literal(keyword.value, where)
  arguments: dict[str, Any] = {}
  try:
    factory = registry.find(func.id)
    arguments = check_arguments(factory, args, kwargs)
    op = factory(*args, **kwargs)
  except ConfigError as e:
    error = ConfigError(f"{where}: {e}")
    if not defer_errors or arguments.get("key") is None:
      raise error from e

    def fail(value: Any, u: Any) -> Any:
      raise error

    op = registry.on_feature(
      fail, arguments["key"], arguments.get("key_result")
    )
  return _Call(op._replace(name=text), func.id, arguments)


def _literal(node: ast.expr, where: str) -> Any:
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError, RecursionError, MemoryError) as e:
    raise ConfigError(
      f"{where}: expected literals as arguments; specs are never evaluated as "
      "code."
    ) from e


def _fuse(calls: Iterable[_Call]) -> list[_Call]:
  """Replaces pairs of ops by faster ones, such as decoding and cropping."""
  fused: list[_Call] = []
  for call in calls:
    if fused:
      last = fused[-1]
      fusion = registry.fusions.get((last.name, call.name))
      if fusion and (op := fusion(last.arguments, call.arguments)):
        name = f"{last.op.name}|{call.op.name}"
        # No factory has a "|" in its name, so a fused op is never fused again.
        fused[-1] = _Call(op._replace(name=name), name, {})
        continue
    fused.append(call)
  return fused


def check_arguments(
  factory: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
  """Checks arguments of a factory by its annotations.

  Returns all arguments by name, with the defaults.
  """
  signature = inspect.signature(factory)
  parameters = signature.parameters
  for name in kwargs:
    if name not in parameters:
      hint = did_you_mean(name, parameters)
      raise ConfigError(f"unknown argument {name!r}.{hint}")
  try:
    bound = signature.bind(*args, **kwargs)
  except TypeError as e:
    raise ConfigError(f"{e}; its arguments are {signature}.") from e
  hints = typing.get_type_hints(factory)
  for name, value in bound.arguments.items():
    hint = hints.get(name, Any)
    is_variadic = parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
    for item in value if is_variadic else (value,):
      if not _fits(item, hint):
        expected = _readable(hint)
        raise ConfigError(
          f"argument {name!r} is {item!r}, expected {expected}."
        )
  bound.apply_defaults()
  return dict(bound.arguments)


def _fits(value: Any, hint: Any) -> bool:
  """Returns whether a literal has a type; an int counts as a float."""
  if hint is Any:
    return True
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(_fits(value, option) for option in inner)
  if origin is typing.Literal:
    return any(
      value == option and type(value) is type(option) for option in inner
    )
  if origin is dict:
    return isinstance(value, dict) and all(
      _fits(key, inner[0]) and _fits(item, inner[1])
      for key, item in value.items()
    )
  if origin is tuple and inner[-1] is not Ellipsis:
    is_tuple = isinstance(value, list | tuple) and len(value) == len(inner)
    return is_tuple and all(map(_fits, value, inner))
  if origin is not None:  # Sequence[x], list[x], tuple[x, ...]
    are_items = isinstance(value, list | tuple)
    return are_items and all(_fits(item, inner[0]) for item in value)
  if hint in (int, float):
    kinds = (int,) if hint is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)
  return isinstance(value, type(None) if hint is None else hint)


def _readable(hint: Any) -> str:
  if isinstance(hint, type) and typing.get_origin(hint) is None:
    return hint.__name__
  return str(hint).replace("typing.", "").replace("collections.abc.", "")
