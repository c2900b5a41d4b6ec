"""Every public name is explained, and the examples are true."""

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


def _unexplained(tree, parent=""):
  """Public functions, classes and own methods without a docstring."""
  for node in tree.body:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
      continue
    if node.name.startswith("_"):
      continue
    if not ast.get_docstring(node):
      yield f"{parent}{node.name}"
    # Methods of a class with bases mostly do what the base says.
    if isinstance(node, ast.ClassDef) and not node.bases:
      yield from _unexplained(node, f"{parent}{node.name}.")


@pytest.mark.parametrize("file", [f for f in FILES if "bigtrain" in f])
def test_public_names_have_docstrings(file):
  tree = ast.parse(FILES[file])
  if tree.body:
    assert ast.get_docstring(tree), "the module says nothing about itself"
  assert list(_unexplained(tree)) == []


@pytest.mark.parametrize("file", [f for f in FILES if ">>> " in FILES[f]])
def test_examples(file):
  name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
  result = doctest.testmod(importlib.import_module(name))
  assert result.attempted and not result.failed
