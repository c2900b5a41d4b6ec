"""docs/reliability.md names an existing test for every fault."""

import ast
import re

from faults.program import HERE, ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
# Numbers of the faults that need only one host.
ONE_HOST = {
  *range(1, 10),
  *range(11, 24),
  25,
  *range(27, 31),
  *range(37, 50),
  52,
}


def test_every_named_test_exists():
  named_tests = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
  assert len(named_tests) > 50
  for file, name in named_tests:
    tree = ast.parse((HERE.parent / file).read_text())
    names = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
    assert name in names, f"{file}::{name}"


def test_every_fault_of_one_host_has_a_row_with_a_test():
  covered = set()
  for line in PAGE.splitlines():
    if (row := re.match(r"\| (\d+)(?:-(\d+))? \|", line)) and "::" in line:
      first, last = int(row[1]), int(row[2] or row[1])
      covered |= {*range(first, last + 1)}
  assert covered >= ONE_HOST, sorted(ONE_HOST - covered)


def test_every_fault_test_is_on_the_page():
  for path in HERE.glob("test_*.py"):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
        test = f"`faults/{path.name}::{node.name}`"
        assert test in PAGE or path.name == "test_reliability_page.py", test
