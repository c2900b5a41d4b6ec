"""CONTRIBUTING.md, CHANGELOG.md, pre-commit and editor settings are true."""

import configparser
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from support import pages, processes

import bigtrain

ROOT = pathlib.Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYTHON = ".venv/bin/python"


def run(command, folder=ROOT):
  """Runs a command line; .venv's Python is the one that runs the tests."""
  words = [sys.executable if w == PYTHON else w for w in shlex.split(command)]
  return subprocess.run(
    words,
    cwd=folder,
    env=processes.environment(),
    capture_output=True,
    text=True,
    timeout=processes.LIMIT_SECS,
    check=False,
  )


def lines_of_contributing():
  blocks = pages.blocks("CONTRIBUTING.md", "")
  return [line for block in blocks for line in block.text.splitlines()]


def commands(program):
  """Command lines of CONTRIBUTING.md that call `program`."""
  return [line for line in lines_of_contributing() if program in line.split()]


def test_every_line_of_contributing_is_run_by_a_test():
  tested = []
  for program in ("make", "pytest", "ruff", "mypy"):
    assert commands(program)
    tested += commands(program)
  assert sorted(tested) == sorted(lines_of_contributing())


@pytest.mark.slow
def test_the_one_test_of_contributing_runs():
  (command,) = commands("pytest")
  pages.ran(run(f"{command} -k value_range -p no:cacheprovider"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [*commands("ruff"), *commands("mypy")])
def test_linters_of_contributing_run(command):
  if " format " in command:
    command += " --check"  # A test does not change the tree.
  pages.ran(run(command))


def test_make_commands_of_contributing_exist():
  inline = re.findall(r"`(make\s[^`]+)`", CONTRIBUTING)
  found = {*commands("make"), *inline}
  assert len(found) >= 7
  for command in found:
    pages.ran(run(f"{command} --dry-run"))


def test_paths_in_contributing_exist():
  paths = re.findall(r"`((?:bigtrain|tests)/[^`]*)`", CONTRIBUTING)
  assert len(paths) >= 15
  for path in paths:
    path = re.sub(r"NAME.*", "", path)
    assert list(ROOT.glob(path)), path


def test_the_version_is_written_once():
  setup = configparser.ConfigParser(comment_prefixes="#")
  setup.read(ROOT / "setup.cfg")
  assert setup["metadata"]["version"] == "attr: bigtrain.__version__"
  for name in ("setup.cfg", "pyproject.toml", "mkdocs.yml", "README.md"):
    assert bigtrain.__version__ not in (ROOT / name).read_text(), name


def test_the_changelog_begins_with_the_unreleased_and_this_version():
  first, *releases = re.findall(r"^## (.+)$", CHANGELOG, re.M)
  assert first == "Unreleased"
  parts = [re.fullmatch(r"(\d+\.\d+\.\d+) \((\S+)\)", r) for r in releases]
  assert all(parts), releases
  assert parts[0][1] == bigtrain.__version__
  numbers = [tuple(map(int, part[1].split("."))) for part in parts]
  dates = [part[2] for part in parts]
  assert numbers == sorted(set(numbers), reverse=True)
  assert dates == sorted(dates, reverse=True)


def test_modules_in_the_changelog_have_moved():
  unreleased = CHANGELOG.partition("## Unreleased")[2].partition("\n## ")[0]
  rows = re.findall(r"^\| (`bigtrain.*) \| (.*) \|$", unreleased, re.M)
  for before, now in rows:
    gone, *_ = re.findall(r"`(bigtrain[\w.]+)`", before)
    assert not _importable(gone), f"{gone} is still there"
    for name in re.findall(r"`(bigtrain[\w.]+)`", now):
      assert _importable(name), name


def _importable(name):
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:  # Of its package.
    return False


GOOD = '"""A module."""\n\n\ndef add(a: int, b: int) -> int:\n  return a + b\n'
BAD = {
  "ruff-check": GOOD.replace('"""A module."""\n', "import os\n"),
  "ruff-format": GOOD.replace("  return", "      return"),
  "mypy": GOOD.replace("a + b", "str(a)"),
}
(LOCAL,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())[
  "repos"
]


@pytest.fixture
def project(tmp_path):
  """A folder with our settings and one module, which is given to hooks."""
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  (tmp_path / "bigtrain").mkdir()
  (tmp_path / "bigtrain" / "__init__.py").touch()
  return tmp_path


@pytest.mark.parametrize("hook", LOCAL["hooks"], ids=lambda hook: hook["id"])
def test_pre_commit_hooks_accept_good_code_and_no_other(hook, project):
  assert LOCAL["repo"] == "local" and hook["language"] == "system"
  module = project / "bigtrain" / "module.py"
  command = hook["entry"]
  if hook.get("pass_filenames", True):
    command += " bigtrain/module.py"
  module.write_text(GOOD)
  pages.ran(run(command, project))
  assert module.read_text() == GOOD
  module.write_text(BAD[hook["id"]])
  ended = run(command, project)
  # As pre-commit judges: a hook fails, or changes the files.
  assert ended.returncode != 0 or module.read_text() != BAD[hook["id"]]


def test_every_linter_of_make_lint_is_a_hook():
  makefile = (ROOT / "Makefile").read_text()
  linters = re.findall(r"^\t@\$\(run\) (ruff \w+|mypy)", makefile, re.M)
  entries = [hook["entry"] for hook in LOCAL["hooks"]]
  assert len(entries) == len(linters)
  for linter in linters:
    assert any(f"{PYTHON} -m {linter}" in entry for entry in entries), linter


def _editor_settings():
  settings = configparser.ConfigParser()
  settings.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
  return settings


def test_editors_and_ruff_agree():
  settings = _editor_settings()
  ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
  assert settings.getboolean("top", "root")
  assert settings.getint("*", "indent_size") == ruff["indent-width"]
  assert settings.getint("*.py", "max_line_length") == ruff["line-length"]


def test_files_are_as_editors_save_them():
  suffixes = (".py", ".md", ".sh", ".sbatch", ".toml", ".cfg", ".yaml", ".yml")
  suffixes += (".jinja", ".css", ".js", ".txtpb")
  checked = 0
  for top in (".", "bigtrain", "configs", "docs", "launch", "tests"):
    for folder, folders, names in os.walk(ROOT / top):
      if top == ".":
        folders.clear()
      folders[:] = [f for f in folders if f not in ("golden", "__pycache__")]
      for name in names:
        if name.endswith(suffixes):
          checked += 1
          data = pathlib.Path(folder, name).read_bytes()
          assert b"\r" not in data, f"{folder}/{name}"
          assert not re.search(rb"[ \t]\n", data), f"{folder}/{name}"
          assert not data or data.endswith(b"\n"), f"{folder}/{name}"
  assert checked > 500
