"""The command `python -m bigtrain`: what there is, in one screen."""

import ast
import pathlib
import pkgutil
import re
import textwrap
from collections.abc import Sequence

from bigtrain import tools
from bigtrain.config.errors import ConfigError
from bigtrain.tools import exits

_VERSION = pkgutil.resolve_name("bigtrain:__version__")

# What reference.py lists. It is not imported here, because it imports jax.
KINDS = (
  "tasks",
  "models",
  "variants",
  "ops",
  "sources",
  "evaluators",
  "optimizers",
  "schedules",
  "hooks",
  "configs",
)

_USAGE = """\
bigtrain {version}: one config-driven program that trains large models in JAX.

Train, or continue a run:
  python -m bigtrain.main --config=FILE.py[:arguments] --workdir=DIR \\
      [--config.KEY=VALUE ...]

Use what was trained:
  python -m bigtrain.tools.predict DIR photo.jpg

Tools; python -m bigtrain.tools.NAME --help explains each:
{tools}

What a config can name, and the arguments of a NAME:
  python -m bigtrain list KIND [NAME]
  kinds: {kinds}

Other: --help, --version. The documentation is in docs/, and the keys of a
config are in docs/config.md.
"""


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  words = list(argv)
  if not words or words[0] in ("--help", "-h", "help"):
    print(usage(), end="")
  elif words[0] in ("--version", "version"):
    print(f"bigtrain {_VERSION}")
  else:
    print(_list(words))
  return 0


def usage() -> str:
  tool_lines = programs()
  width = max(map(len, tool_lines))
  lines = [
    textwrap.fill(
      f"  {name:<{width}}  {line}", 80, subsequent_indent=(width + 4) * " "
    )
    for name, line in tool_lines.items()
  ]
  return _USAGE.format(
    version=_VERSION,
    kinds=textwrap.fill(", ".join(KINDS), 70, subsequent_indent=9 * " "),
    tools="\n".join(lines),
  )


def programs() -> dict[str, str]:
  """Returns {tool: first line of its docstring}, and imports no tool."""
  result = {}
  for module in pkgutil.iter_modules(tools.__path__):
    folder = pathlib.Path(tools.__path__[0])
    path = folder / f"{module.name}.py"
    if path.exists():
      program = documented = path
    else:
      program = folder / module.name / "__main__.py"
      documented = folder / module.name / "__init__.py"
    text = program.read_text(encoding="utf-8")
    if not re.search(r'^if __name__ == "__main__":', text, re.MULTILINE):
      continue  # It belongs to other tools, or to `python -m bigtrain`.
    doc = ast.get_docstring(ast.parse(documented.read_text(encoding="utf-8")))
    result[module.name] = (doc or "").partition("\n")[0]
  return result


def _list(words: Sequence[str]) -> str:
  if words[0] != "list" or not 2 <= len(words) <= 3:
    raise ConfigError(
      f"{' '.join(words)}: expected list KIND [NAME], --help or --version; "
      f"kinds: {', '.join(KINDS)}."
    )
  # Imports jax, which --help does without.
  from bigtrain.tools import reference

  if len(words) == 3:
    return reference.explain(words[1], words[2])
  lines = reference.names(words[1])
  width = max(map(len, lines), default=0)
  return "\n".join(f"{name:<{width}}  {line}" for name, line in lines.items())
