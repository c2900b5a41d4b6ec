"""Parses the argument that follows `x.py:` on the command line."""

import ast
import difflib
from typing import Any

import ml_collections


def parse_arg(arg: str | None, **spec: Any) -> ml_collections.ConfigDict:
  """Parses the argument of `--config=x.py:argument` into named values.

  The argument is a comma-separated list of `name=value`. A bool's name alone
  sets it to True. The first item may omit its name if it is the value of the
  first name in `spec`: `vit.py:B/16,runlocal` equals
  `vit.py:variant=B/16,runlocal=True` if the first name is `variant`.

  Args:
    arg: the argument; None without one.
    **spec: names with their default values. A value is converted to the type
      of its default. If the default is None, the value is a Python literal or
      else a string.

  Returns:
    A ConfigDict with every name of `spec`.

  Raises:
    ValueError: unknown or repeated name, or value of the wrong type.

  >>> parse_arg("B/16,res=384", variant="S/16", res=224, runlocal=False).res
  384
  """
  values: dict[str, Any] = {}
  for position, item in enumerate(arg.split(",") if arg else ()):
    name, equals, text = item.partition("=")
    near = difflib.get_close_matches(name, spec, n=1)
    if not equals:
      first = next(iter(spec), "")
      if isinstance(spec.get(name), bool):
        text = "True"
      elif name in spec:
        raise ValueError(f"{name!r} needs a value in {arg!r}: {name}=...")
      # Something close to a name is a misspelled name, not a value.
      elif not position and not near and not isinstance(spec.get(first), bool):
        name, text = first, name
    if name not in spec:
      hint = f"Did you mean {near[0]!r}?" if near else f"Expected {[*spec]}."
      raise ValueError(f"unknown name {name!r} in {arg!r}. {hint}")
    if name in values:
      raise ValueError(f"{name!r} is given twice in {arg!r}")
    values[name] = _convert(name, text, spec[name])
  return ml_collections.ConfigDict(spec | values)


def _convert(name: str, text: str, default: Any) -> Any:
  """Converts `text` to the type of `default`, or raises ValueError."""
  if isinstance(default, str):
    return text
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = text
  if isinstance(default, bool):
    value = {"true": True, "false": False}.get(text.lower(), value)
    if value in (0, 1):
      return bool(value)
  elif isinstance(default, int | float):
    kind = type(default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and kind(value) == value:  # 1e5 is an int, 0.5 is not.
      return kind(value)
  elif default is None or isinstance(value, type(default)):
    return value
  raise ValueError(
    f"{name}={text}: expected {type(default).__name__}, as in {default!r}"
  )
