"""Every public name has a docstring, and the examples in docstrings work."""

import ast
import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = {
  path.relative_to(ROOT).as_posix(): path.read_text()
  for package in ("bigtrain", "configs")
  for path in sorted((ROOT / package).rglob("*.py"))
}


def _without_docstring(tree, parent=""):
  """Public functions, classes and methods that lack a docstring."""
  for node in tree.body:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
      continue
    if node.name.startswith("_"):
      continue
    if not ast.get_docstring(node):
      yield f"{parent}{node.name}"
    # Methods of a subclass are mostly documented in its base class.
    if isinstance(node, ast.ClassDef) and not node.bases:
      yield from _without_docstring(node, f"{parent}{node.name}.")


@pytest.mark.parametrize("file", [f for f in FILES if "bigtrain" in f])
def test_public_names_have_docstrings(file):
  tree = ast.parse(FILES[file])
  if tree.body:
    assert ast.get_docstring(tree), f"{file} has no docstring"
  assert list(_without_docstring(tree)) == []


@pytest.mark.parametrize("file", [f for f in FILES if ">>> " in FILES[f]])
def test_docstring_examples_work(file):
  name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
  result = doctest.testmod(importlib.import_module(name))
  assert result.attempted and not result.failed
