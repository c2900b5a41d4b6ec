"""Modules and classes have docstrings, whose examples work."""

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


@pytest.mark.parametrize("file", [f for f in FILES if "bigtrain" in f])
def test_modules_and_public_classes_have_docstrings(file):
  tree = ast.parse(FILES[file])
  if tree.body:
    assert ast.get_docstring(tree), f"{file} has no docstring"
  classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
  assert not [
    node.name
    for node in classes
    if not node.name.startswith("_") and not ast.get_docstring(node)
  ]


@pytest.mark.parametrize("file", [f for f in FILES if ">>> " in FILES[f]])
def test_docstring_examples_work(file):
  name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
  result = doctest.testmod(importlib.import_module(name))
  assert result.attempted and not result.failed
