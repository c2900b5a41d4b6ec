"""The command `python -m bigtrain`: what there is, in one screen."""

import ast
import pathlib
import pkgutil
import re
import textwrap
from collections.abc import Sequence

from bigtrain import tools
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.tools import exits

_VERSION = pkgutil.resolve_name("bigtrain:__version__")
_USAGE = pathlib.Path(__file__).with_name("overview.txt")
_KINDS = settings.read_table(__file__, "reference.toml")


def programs() -> dict[str, str]:
  """Returns {tool: first line of its docstring}; imports none of them."""
  result = {}
  for module in pkgutil.iter_modules(tools.__path__):
    folder = pathlib.Path(tools.__path__[0])
    path = folder / f"{module.name}.py"
    source = path if path.exists() else folder / module.name / "__main__.py"
    text = source.read_text(encoding="utf-8")
    if not re.search(r'^if __name__ == "__main__":', text, re.MULTILINE):
      continue  # It belongs to other tools, or to `python -m bigtrain`.
    if not path.exists():
      source = folder / module.name / "__init__.py"
    doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    result[module.name] = (doc or "").partition("\n")[0]
  return result


def usage() -> str:
  listed = programs()
  width = max(map(len, listed))
  lines = "\n".join(
    textwrap.fill(
      f"  {name:<{width}}  {doc}", 80, subsequent_indent=(width + 4) * " "
    )
    for name, doc in listed.items()
  )
  return _USAGE.read_text().format(
    version=_VERSION,
    kinds=textwrap.fill(", ".join(_KINDS), 70, subsequent_indent=9 * " "),
    tools=lines,
  )


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  words = list(argv)
  if not words or words[0] in ("--help", "-h", "help"):
    print(usage(), end="")
    return 0
  is_version = words[0] in ("--version", "version")
  print(f"bigtrain {_VERSION}" if is_version else _list(words))
  return 0


def _list(words: Sequence[str]) -> str:
  if words[0] != "list" or not 2 <= len(words) <= 3:
    raise ConfigError(
      f"{' '.join(words)}: expected list KIND [NAME], --help or --version; "
      f"kinds: {', '.join(_KINDS)}."
    )
  # Imports jax, which --help does without.
  from bigtrain.tools import reference

  if len(words) == 3:
    return reference.explain(words[1], words[2])
  listed = reference.names(words[1])
  width = max(map(len, listed), default=0)
  return "\n".join(f"{name:<{width}}  {doc}" for name, doc in listed.items())
