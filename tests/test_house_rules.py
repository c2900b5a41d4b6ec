"""Rules of the house: words, names, one way for a job."""

import ast
import collections
import pathlib
import symtable

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = {
  path.relative_to(ROOT).as_posix(): path.read_text()
  for path in sorted((ROOT / "bigtrain").rglob("*.py"))
}
TREES = {name: ast.parse(text) for name, text in FILES.items()}

# Jax has no public way to what these need.
_PRIVATE_JAX = {"bigtrain/cluster/channel.py", "bigtrain/sharding/absent.py"}
# Packages whose modules a config names: names that users know come first.
_NAMED_BY_CONFIGS = ("tasks", "models", "evaluators", "data", "hooks")

# Data that people edit without reading code. Anything else is Python, where
# mypy and go-to-definition see it.
_TOML_DATA = {
  "bigtrain/reports/peak_flops.toml",
  "bigtrain/tools/plan/hardware.toml",
}


def _docstring_lines(node):
  first = node.body[0] if node.body else None
  if ast.get_docstring(node, clean=False) is None:
    return 0
  return first.end_lineno - first.lineno + 1


def _nodes(*kinds):
  for name, tree in TREES.items():
    for node in ast.walk(tree):
      if isinstance(node, kinds):
        yield name, node


def test_docstrings_say_what_signatures_do_not():
  """Their share of all lines was 23.5% once, most of it signatures again."""
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  docstrings = sum(_docstring_lines(node) for _, node in _nodes(*kinds))
  assert docstrings <= 0.15 * sum(len(t.splitlines()) for t in FILES.values())


def test_no_function_is_longer_than_80_lines():
  long = {
    f"{name}: {node.name}": node.end_lineno - node.lineno + 1
    for name, node in _nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    if node.end_lineno - node.lineno + 1 > 80
  }
  # The program itself, which reads top to bottom.
  assert set(long) <= {"bigtrain/main.py: _train"}, long


def test_modules_keep_their_names():
  aliases = [
    f"{name}:{node.lineno}: {alias.name} as {alias.asname}"
    for name, node in _nodes(ast.Import, ast.ImportFrom)
    for alias in node.names
    if alias.asname and alias.asname.endswith("_lib")
  ]
  assert not aliases


def test_no_two_modules_have_one_name():
  places = collections.defaultdict(list)
  for name in FILES:
    path = pathlib.PurePath(name)
    named = path.parent.name in _NAMED_BY_CONFIGS
    if path.stem not in ("__init__", "__main__"):
      places[path.stem].append((named, name))
  # Two of them may have the name that users know, a tool its command's name.
  twice = {
    stem: [name for _, name in found]
    for stem, found in places.items()
    if sum(not named and "/tools/" not in name for named, name in found) > 1
    or (
      len(found) > 1
      and any(not named and "/tools/" not in name for named, name in found)
    )
  }
  assert not twice


def test_arguments_are_passed_by_name_and_not_in_a_starred_tuple():
  starred = [
    f"{name}:{node.lineno}"
    for name, node in _nodes(ast.Call)
    if any(
      isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Tuple)
      for arg in node.args
    )
  ]
  assert not starred


@pytest.mark.parametrize("word", ["jax._src", "addaudithook", "import dis\n"])
def test_private_machinery_stays_out(word):
  found = {name for name, text in FILES.items() if word in text}
  assert found <= (_PRIVATE_JAX if word == "jax._src" else set())


def test_toml_files_are_data():
  found = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "bigtrain").rglob("*.toml")
  }
  assert found == _TOML_DATA


def _local_names(function):
  """Names of `function`'s scope: parameters, variables, inner functions.

  Inner functions have scopes of their own, whose names do not count, and
  neither does "_", which nobody reads.
  """
  table = symtable.symtable(FILES["bigtrain/main.py"], "main.py", "exec")
  (scope,) = [s for s in table.get_children() if s.get_name() == function]
  return {s.get_name() for s in scope.get_symbols() if s.is_local()} - {"_"}


def test_main_has_few_local_names():
  names = _local_names("_train")
  assert len(names) <= 60, (
    f"_train of main.py has {len(names)} local names, at most 60 are allowed. "
    "Give the subject that several of them belong to an object of its own, "
    f"where it belongs: {', '.join(sorted(names))}."
  )
