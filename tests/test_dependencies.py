"""Imports are declared in setup.cfg and pinned in requirements.lock."""

import ast
import configparser
import pathlib
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parent.parent
_PACKAGE_OF_MODULE = {
  "absl": "absl-py",
  "google": "protobuf",
  "PIL": "pillow",
  "mlflow": "mlflow-skinny",
  "sklearn": "scikit-learn",
}


def _declared():
  """{extra: requirements} of setup.cfg; "" for the base requirements."""
  setup = configparser.ConfigParser(comment_prefixes="#")
  setup.read(ROOT / "setup.cfg")
  sections = {"": setup["options"]["install_requires"]}
  sections |= setup["options.extras_require"]
  return {
    extra: [Requirement(line) for line in text.split("\n") if line.strip()]
    for extra, text in sections.items()
  }


def _pins():
  lines = (ROOT / "requirements.lock").read_text().splitlines()
  return [Requirement(line) for line in lines if not line.startswith("#")]


DECLARED = _declared()
PINS = _pins()


def _imported(folder):
  """Names of the packages that the Python files in `folder` import."""
  modules = set()
  for path in (ROOT / folder).rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module]
      else:
        continue
      modules |= {name.split(".")[0] for name in names}
  modules -= {*sys.stdlib_module_names, "bigtrain", "configs"}
  return {canonicalize_name(_PACKAGE_OF_MODULE.get(n, n)) for n in modules}


@pytest.mark.parametrize("folder", ["bigtrain", "configs"])
def test_every_import_is_declared(folder):
  declared = {canonicalize_name(r.name) for rs in DECLARED.values() for r in rs}
  assert _imported(folder) <= declared


def _environment(python):
  return {
    "python_version": python,
    "python_full_version": f"{python}.0",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
  }


def _locked_extras():
  makefile = (ROOT / "Makefile").read_text()
  return re.search(r"^LOCKED := (.*)$", makefile, re.M)[1].split(",")


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("extra", ["", *_locked_extras()])
def test_the_lock_file_pins_every_declared_package(python, extra):
  environment = _environment(python)
  versions = {}
  for pin in PINS:
    if pin.marker is None or pin.marker.evaluate(environment):
      (version,) = pin.specifier
      assert version.operator == "==", pin
      name = canonicalize_name(pin.name)
      assert name not in versions, f"{name} is pinned twice"
      versions[name] = version.version
  for requirement in DECLARED[extra]:
    if requirement.marker and not requirement.marker.evaluate(environment):
      continue
    version = versions.get(canonicalize_name(requirement.name))
    assert version, f"{requirement} is not in requirements.lock: make lock"
    assert requirement.specifier.contains(version), (
      f"{requirement}, but requirements.lock has {version}: make lock"
    )
