"""What the documentation says is there, is there."""

import os
import re

import pytest

from bigtrain import main, parts, settings
from bigtrain.pp import registry
from configs import digits

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(name):
  with open(os.path.join(ROOT, name)) as file:
    return file.read()


class Enough(Exception):
  """Ends the program where all keys have been asked for."""


def test_every_key_that_the_program_asks_for_is_documented(
  monkeypatch, tmp_path
):
  asked = set()

  def unread(self):
    asked.update(self._asked)
    raise Enough

  monkeypatch.setattr(settings.Config, "unread", unread)
  with pytest.raises(Enough):
    main.train(digits.get_config("runlocal"), str(tmp_path / "run"))
  documented = set(re.findall(r"`(\w+)(?:_\*)?`", read("docs/config.md")))
  units = "_(steps|epochs|examples|tokens|percent)$"
  missing = {
    key
    for key in asked
    if key not in documented and re.sub(units, "", key) not in documented
  }
  assert not missing, f"docs/config.md does not mention {sorted(missing)}"


def test_every_op_source_and_evaluator_is_documented():
  text = read("docs/config.md")
  own = [
    name
    for name in registry.names()
    if registry.find(name).__module__.startswith("bigtrain.pp")
  ]  # Other tests register ops too.
  evaluators = [
    name
    for name in parts.module_names("evaluators")
    if hasattr(parts.find_module("evaluators", name, "type"), "Evaluator")
  ]
  for name in (
    *own,
    *evaluators,
    *parts.module_names("tasks"),
  ):
    assert f"`{name}`" in text, name


@pytest.mark.parametrize(
  "page",
  [
    "README.md",
    *(f"docs/{n}" for n in os.listdir(f"{ROOT}/docs") if n.endswith(".md")),
  ],
)
def test_linked_files_exist(page):
  folder = os.path.dirname(os.path.join(ROOT, page))
  for link in re.findall(r"\]\(([^)#:]+)\)", read(page)):
    assert os.path.exists(os.path.join(folder, link)), link
