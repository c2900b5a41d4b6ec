"""Loads config files, and applies changes from the command line to them.

A config file is Python with a function `get_config`, as in configs/, or the
config.json of a run.
"""

import ast
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from bigtrain.config import piecewise
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.config.settings import plain


def load(path: str, changes: Iterable[str] = ()) -> dict[str, Any]:
  """Loads the config of `path.py`, `path.py:argument` or `path.json`.

  Args:
    changes: assignments such as "model.depth=12". In a ConfigDict, values that
      refer to a changed one (`ConfigDict.get_ref`) follow it.
  """
  config = _load_unchanged(path)
  if hasattr(config, "ignore_type"):
    # A ConfigDict has its own checks of types and names; `override` has ours.
    with config.ignore_type(), config.unlocked():
      for change in changes:
        override(config, change)
  else:
    config = plain(config)
    for change in changes:
      override(config, change)
  return plain(config)


def _load_unchanged(path: str) -> Any:
  file = os.path.expanduser(path)
  if file.endswith(".json") and os.path.isfile(file):
    try:
      with open(file) as content:
        return dict(json.load(content))
    except (ValueError, TypeError) as e:
      raise ConfigError(f"--config={file}: expected a dict: {e}") from e
  config = call(path, "get_config")
  if not isinstance(plain(config), dict):
    raise ConfigError(f"--config={path}: get_config returned no config.")
  return config


def call(path: str, name: str) -> Any:
  """Calls a function of "FILE.py", as "FILE.py:argument" with an argument.

  Args:
    name: "get_config" or "get_sweep".
  """
  file, colon, argument = path.partition(".py:")
  file = os.path.expanduser(file + ".py" if colon else file)
  if not os.path.isfile(file):
    raise ConfigError(f"--config={file}: no such file.{_nearest(file)}")
  folder = os.path.dirname(os.path.abspath(file))
  if folder not in sys.path:  # A config may import its neighbours.
    sys.path.append(folder)
  spec = importlib.util.spec_from_file_location("bigtrain_config", file)
  if spec is None or spec.loader is None:
    raise ConfigError(
      f"--config={file}: expected a .py file or a run's config.json."
    )
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, name):
      raise ConfigError(f"--config={file}: has no function {name}(arg).")
    function = getattr(module, name)
    takes_argument = bool(inspect.signature(function).parameters)
    # A file's get_sweep may ignore the argument that its get_config takes.
    if colon and not takes_argument and name == "get_config":
      raise ConfigError(f"--config={path}: {file} takes no argument.")
    return function(argument) if colon and takes_argument else function()
  except ConfigError:
    raise
  except Exception as e:
    message = " ".join(f"{type(e).__name__}: {e}".split())
    raise ConfigError(f"{_where(e, file)}: {message}") from e


def _nearest(file: str) -> str:
  # Some people type "configs.digits", as in imports, or only "digits".
  as_module = file.removesuffix(".py").replace(".", os.sep) + ".py"
  for guess in (as_module, os.path.join("configs", as_module)):
    if os.path.isfile(guess):
      return f" Did you mean {guess!r}?"
  folder = os.path.dirname(file) or "."
  names = os.listdir(folder) if os.path.isdir(folder) else []
  configs = [name for name in names if name.endswith((".py", ".json"))]
  return did_you_mean(file, [os.path.join(folder, name) for name in configs])


def _where(error: Exception, file: str) -> str:
  """Returns the last line of the config file that led to the error."""
  if isinstance(error, SyntaxError):
    return f"{error.filename}:{error.lineno}"
  frames = traceback.extract_tb(error.__traceback__)
  path = os.path.abspath(file)
  own = [f for f in frames if os.path.abspath(f.filename) == path]
  return f"{file}:{own[-1].lineno}" if own else file


def override(config: Any, assignment: str) -> None:
  """Applies "a.b.c=value" in place, to a dict or a ConfigDict.

  The value gets the type of the value that it replaces: `1e5` becomes an int,
  `1` a float, and a bare word a string; anything else must be a Python literal,
  which may contain dict(a=1). A number and its schedule replace each other.
  A new key is added; if nothing reads it, `Config.check_all_read` fails.
  """
  path, equals, text = assignment.partition("=")
  if not equals:
    raise ConfigError(f"--config.{path}: expected --config.{path}=VALUE.")
  *parents, last = path.split(".")
  node = config
  for i, parent in enumerate(parents):
    if parent not in node:
      node[parent] = {}
    node = node[parent]
    if not hasattr(node, "keys"):
      at = ".".join(parents[: i + 1])
      raise ConfigError(
        f"--config.{path}: config.{at} is {node!r}, not a dict."
      )
  node[last] = plain(_typed(text, plain(node.get(last)), f"--config.{path}"))


def _without_calls(expression: ast.Expression) -> ast.Expression:
  """Replaces dict(a=1), as configs write it, by the literal {"a": 1}."""

  class Replace(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
      self.generic_visit(node)
      is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
      names = [keyword.arg for keyword in node.keywords]
      if not is_dict or node.args or None in names:
        return node
      keys: list[Any] = [ast.Constant(name) for name in names]
      return ast.Dict(keys, [keyword.value for keyword in node.keywords])

  return Replace().visit(expression)


def _may_follow_schedule(number: Any, schedule: Any) -> bool:
  """Whether these are a number and a dict of its values by step."""
  return isinstance(number, int | float) and piecewise.is_schedule(schedule)


def _typed(text: str, old: Any, where: str) -> Any:
  """The value of an assignment, with the type of the value that it replaces.

  Args:
    text: what stands behind the "=".
    old: the value before; None for a new key, which accepts any type.
    where: the flag, for messages.
  """
  try:
    value = ast.literal_eval(
      _without_calls(ast.parse(text.lstrip(" \t"), mode="eval"))
    )
  except (ValueError, SyntaxError, TypeError):
    value = text
  if text.lower() in ("true", "false"):
    value = text.lower() == "true"
  if isinstance(old, str) and value is not None:
    # Some names and folders can be switched off, so True and False are bools.
    if text in ("True", "False") or isinstance(value, str):
      return value
    return text  # "123" may be the name of a run.
  if old is None or value is None:
    return value
  if isinstance(old, bool):
    if value in (0, 1):
      return bool(value)
  elif isinstance(value, bool):
    pass  # True is an int in Python, but a mistake here.
  elif _may_follow_schedule(old, value) or _may_follow_schedule(value, old):
    return value
  elif isinstance(old, int | float) and isinstance(value, int | float):
    # 1e5 may replace an int, 0.5 may not.
    if isinstance(old, float) or isinstance(value, int) or value.is_integer():
      return type(old)(value)
  elif isinstance(old, list | tuple) and isinstance(value, list | tuple):
    return type(old)(value)
  elif isinstance(old, dict) and isinstance(value, dict | list | tuple | str):
    return value
  kind = type(old).__name__
  raise ConfigError(f"{where}={text}: expected {kind}, as in {old!r}.")
