"""Texts that identify a config, or a function with all that it depends on.

Evaluators make the functions that they compile from their options and from what
they read: class names, tokens, numbers. Two such functions are known to be the
same only if everything in their closures is.
"""

import dis
import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain.runtime.sources import NotKept

# Attribute of functions that are made from the run's config alone: the part of
# the config, and the function's id, since functools.wraps copies attributes.
FROM_CONFIG = "made_from_config"

_EXACT = (types.NoneType, bool, int, float, complex, str, bytes)
_CHANGES = ("STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL")


def text(value: Any) -> str:
  """Text that differs for functions that may compute something else.

  The text does not have the content of modules, which `Sources` has.

  Raises:
    NotKept: it holds an object that can change, or that no text describes: an
      instance, a list, an array on a device.
  """
  return _text(value, [])


def config_text(value: Any) -> str:
  """Text that differs for different values of a config.

  Raises:
    NotKept: a type whose repr may not have the whole value.
  """
  if isinstance(value, Mapping):
    items = sorted((str(k), config_text(v)) for k, v in value.items())
    return f"{{{', '.join(f'{k!r}: {v}' for k, v in items)}}}"
  if type(value) in (list, tuple):
    inner = ", ".join(map(config_text, value))
    return f"{type(value).__name__}({inner})"
  if value is None or type(value) in (bool, int, float, str):
    return repr(value)
  raise NotKept(f"the config has a value of {type(value)}")


def _text(value: Any, outer: list[Any]) -> str:
  if type(value) in _EXACT:
    return repr(value)
  if type(value) is tuple:
    return f"({', '.join(_text(x, outer) for x in value)})"
  if isinstance(value, np.generic) or type(value) is np.ndarray:
    return _array(np.asarray(value))
  if isinstance(value, np.dtype):
    return f"dtype {value!r}"
  if isinstance(value, types.ModuleType):
    return f"module {value.__name__}"
  if any(value is x for x in outer):  # A function that calls itself.
    return f"outer {[value is x for x in outer].index(True)}"
  if type(value) is functools.partial:
    given = (value.func, value.args, *sorted(value.keywords.items()))
    return f"partial {_text(given, [*outer, value])}"
  if isinstance(value, types.FunctionType):
    source, number = vars(value).get(FROM_CONFIG, ("", 0))
    if number == id(value):
      return f"from {source}"
    return _function(value, [*outer, value])
  if (name := _importable(value)) is not None:
    return name
  raise NotKept(f"{type(value)} in a closure")


def _function(fn: types.FunctionType, outer: list[Any]) -> str:
  if attributes := vars(fn).keys() - {"__wrapped__", FROM_CONFIG}:
    raise NotKept(f"{fn} has the attributes {sorted(attributes)}")
  try:
    cells = tuple(c.cell_contents for c in fn.__closure__ or ())
  except ValueError as e:
    raise NotKept(f"{fn} has an empty cell") from e
  defaults = fn.__defaults__, tuple(sorted((fn.__kwdefaults__ or {}).items()))
  parts = (fn.__module__, fn.__qualname__, _code(fn.__code__))
  return f"function {parts!r} {_text((defaults, cells), outer)}"


def _code(code: types.CodeType) -> tuple[Any, ...]:
  """What a function does; its module's file has the same, but not by name."""
  for instruction in dis.get_instructions(code):
    own = instruction.argval in code.co_cellvars
    if instruction.opname in _CHANGES and not own:
      raise NotKept(f"{code.co_qualname} changes {instruction.argval}")
  constants = tuple(
    _code(x)
    if isinstance(x, types.CodeType)
    else sorted(map(repr, x))
    if isinstance(x, frozenset)
    else repr(x)
    for x in code.co_consts
  )
  names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
  return code.co_code, constants, names, code.co_flags


def _array(array: np.ndarray) -> str:
  if array.dtype.hasobject:
    raise NotKept("an array of objects in a closure")
  digest = hashlib.sha256(array.tobytes()).hexdigest()
  return f"array {array.dtype!r} {array.shape} {digest}"


def _importable(value: Any) -> str | None:
  """Name of a class or function of a module, if it is the module's own."""
  module = getattr(value, "__module__", None)
  name = getattr(value, "__qualname__", None)
  if not isinstance(module, str) or not isinstance(name, str):
    return None
  target: Any = sys.modules.get(module)
  for part in name.split("."):
    target = getattr(target, part, None)
  return f"{module}.{name}" if target is value else None
