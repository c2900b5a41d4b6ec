"""The documentation names every key, op and evaluator; its links work."""

import os
import pathlib
import re

import pytest

from bigtrain import main
from bigtrain.config import modules, settings
from bigtrain.pp import registry
from configs import digits

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT_PATH = pathlib.Path(ROOT)
PACKAGE = ROOT_PATH / "bigtrain"


def read(name):
  with open(os.path.join(ROOT, name)) as file:
    return file.read()


class AllKeysRead(Exception):
  """Ends the program once it has read the config."""


def test_every_key_that_the_program_reads_is_documented(monkeypatch, tmp_path):
  keys = set()

  def unread(self):
    keys.update(self._names_read)
    raise AllKeysRead

  monkeypatch.setattr(settings.Config, "unread", unread)
  with pytest.raises(AllKeysRead):
    main.train(digits.get_config("runlocal"), str(tmp_path / "run"))
  documented = set(re.findall(r"`(\w+)(?:_\*)?`", read("docs/config.md")))
  units = "_(steps|epochs|examples|tokens|percent)$"
  missing = {
    key
    for key in keys
    if key not in documented and re.sub(units, "", key) not in documented
  }
  assert not missing, f"docs/config.md does not mention {sorted(missing)}"


def test_every_op_task_and_evaluator_is_documented():
  text = read("docs/config.md")
  ops = [
    name
    for name in registry.names()
    if registry.find(name).__module__.startswith("bigtrain.pp")
  ]  # Other tests register ops too.
  for name in (
    *ops,
    *modules.module_names("evaluators"),
    *modules.module_names("tasks"),
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


def test_paths_in_the_architecture_page_exist():
  """Paths with a slash are relative to bigtrain/, or to the repository."""
  page = read("docs/architecture.md")
  paths = re.findall(r"`([a-z_]+/[a-z0-9_/*.]*)`", page)
  assert len(paths) > 50
  missing = [
    path
    for path in paths
    if not list(ROOT_PATH.glob(path)) and not list(PACKAGE.glob(path))
  ]
  assert not missing
