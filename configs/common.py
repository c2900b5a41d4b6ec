"""What the config files share: reading the argument after `x.py:`."""

import ast
import difflib
from typing import Any

import ml_collections


def parse_arg(arg: str | None, **spec: Any) -> ml_collections.ConfigDict:
  """Reads the argument of `--config=x.py:argument` by names and defaults.

  The argument is a comma-separated list of `name=value`. A name alone switches
  a bool on, and the value of the first name may stand first without its name:
  `vit.py:B/16,runlocal` is `vit.py:variant=B/16,runlocal=True` for a config
  whose first name is `variant`.

  Args:
    arg: the argument, or None where there is none.
    **spec: names and defaults. A value is read as the type of its default; a
      default of None takes a Python literal, and what is none as a string.

  Returns:
    A ConfigDict with all the names of `spec`.

  Raises:
    ValueError: an unknown name, a name given twice, or a value that is not of
      the default's type.

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
      # What resembles a name is a misspelled name, not the first one's value.
      elif not position and not near and not isinstance(spec.get(first), bool):
        name, text = first, name
    if name not in spec:
      hint = f"Did you mean {near[0]!r}?" if near else f"There are: {[*spec]}."
      raise ValueError(f"unknown name {name!r} in {arg!r}. {hint}")
    if name in values:
      raise ValueError(f"{name!r} is given twice in {arg!r}")
    values[name] = _read(name, text, spec[name])
  return ml_collections.ConfigDict(spec | values)


def _read(name: str, text: str, default: Any) -> Any:
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
