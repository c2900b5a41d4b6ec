"""docs/truth.md names an existing test for every figure."""

import ast
import pathlib
import re

TESTS = pathlib.Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "truth.md").read_text()
ROWS = [
  [cell.strip() for cell in line.strip("|").split(" | ")]
  for line in PAGE.partition("|---|")[2].splitlines()[1:]
]


def test_every_row_is_complete():
  assert len(ROWS) >= 30
  for row in ROWS:
    assert len(row) == 5 and all(row), row
    assert re.search(r"`[\w/]+\.py::\w+`", row[-1]), row


def test_every_named_test_exists():
  for row in ROWS:
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1]):
      tree = ast.parse((TESTS / file).read_text())
      names = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
      assert name in names, f"{file}::{name}"
