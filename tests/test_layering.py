"""Which package may import which, and which imports stay light."""

import ast
import functools
import graphlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# What each package or top-level module may import besides itself. The order is
# the same as in the picture in docs/architecture.md: nothing imports a package
# above its own. Modules that a config names (tasks, models, evaluators, data,
# hooks) are found by name; only tools may import one of them directly.
_BASE = {"arrays", "config"}
_ARRAYS = _BASE | {"metrics", "sharding"}
RULES = {
  "__main__": {"tools"},
  "tools": None,  # Anything.
  "main": _ARRAYS
  | {"checkpoints", "cluster", "command", "evaluation", "files", "inputs"}
  | {"objective", "optim", "reports", "runtime", "step"},
  "inference": _ARRAYS
  | {"checkpoints", "files", "inputs", "models.published", "objective", "pp"}
  | {"text"},
  "evaluators": _ARRAYS
  | {"evaluation", "files", "inference", "inputs", "losses", "pp", "reports"}
  | {"text"},
  "evaluation": _ARRAYS | {"files", "inputs", "pp", "text"},
  "objective": _ARRAYS
  | {"checkpoints", "cluster", "files", "inputs", "models.layers", "optim"}
  | {"reports", "runtime", "step"},
  "command": _BASE
  | {"checkpoints", "cluster", "files", "reports", "runtime", "step"},
  "hooks": _BASE | {"checkpoints", "cluster", "files", "runtime"},
  "inputs": _ARRAYS | {"cluster", "data.formats", "files", "pp", "text"},
  "data": _BASE | {"data.formats", "files", "pp", "text"},
  "data.formats": _BASE | {"files", "text"},
  "checkpoints": _ARRAYS
  | {"cluster", "files", "models.layers", "models.published", "optim", "step"},
  "runtime": _BASE | {"cluster", "files", "reports", "step"},
  "tasks": _ARRAYS | {"losses", "step", "text"},
  "models": _ARRAYS | {"models.layers", "models.published"},
  "models.layers": _ARRAYS,
  "models.published": _BASE,
  "pp": _BASE | {"files", "text"},
  "text": _BASE | {"files"},
  "reports": _ARRAYS | {"files"},
  "step": _ARRAYS,
  "losses": _ARRAYS,
  "optim": _BASE | {"sharding"},
  "cluster": _BASE | {"files"},
  "files": _BASE,
  "metrics": _BASE,
  "sharding": _BASE,
  "config": set(),
  "arrays": set(),
}
# Packages whose modules a config names: these do not import one another. A ViT
# is also the image tower of captioners, of image-text models and of decoders
# that read pictures, CoCa learns captions and pairs, SigLIP 2 has two towers, a
# captioner's decoder and DINO's heads, a policy is a language model, and
# prompts are rows without answers.
_SEAMS = ("tasks", "models", "evaluators", "data", "hooks")
_SHARED = (
  *("models.vit", "models.text_transformer", "models.decoder", "data.arrays"),
  *("models.cappa", "tasks.captioning", "tasks.contrastive"),
  *("models.two_towers", "models.dinov2"),
  *("models.native_vit",),
  *("tasks.language_modeling", "data.supervised", "data.digit_pairs"),
)
# Configs share these: cap.py differs from cappa.py in one key, and
# digits_distill.py trains on the quickstart's data with its model as teacher.
_OF_CONFIGS = (
  r"configs\.(common|cappa|decoder_lm|digits(_siglip)?|siglip2?(_finetune)?"
  r"|t5_c4|transfer|vit_s16_i1k|vlm_transfer)"
)


def _modules():
  """{name without "bigtrain.": path} of the package and the configs."""
  modules = {}
  for package in ("bigtrain", "configs"):
    for path in sorted((ROOT / package).rglob("*.py")):
      name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
      name = name.removesuffix(".__init__")
      modules[name.removeprefix("bigtrain.")] = path
  return modules


MODULES = _modules()


def _imports(source):
  """Names of our modules that `source` imports, inside functions too."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, "relative imports hide where a name comes from"
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
      continue
    for name in names:
      if name.split(".")[0] in ("bigtrain", "configs"):
        name = name.removeprefix("bigtrain.")
        while name not in MODULES:  # Attributes of a module, or of a package.
          name = name.rpartition(".")[0] or "bigtrain"
        yield name


def _package(module):
  """The row of RULES for a module."""
  inner = re.match(r"data\.formats|models\.(layers|published)", module)
  return inner[0] if inner else module.partition(".")[0]


def _allowed(importer, imported):
  if importer.startswith("configs"):
    return re.fullmatch(_OF_CONFIGS, imported) is not None
  if imported.startswith("configs"):
    return False
  ours, theirs = _package(importer), _package(imported)
  if ours == theirs:
    return ours not in _SEAMS or imported in (*_SHARED, ours)
  return RULES[ours] is None or theirs in RULES[ours]


@functools.cache  # Not at import: all workers import this module.
def _graph():
  """{module: modules that it imports}."""
  return {
    name: sorted(set(_imports(path.read_text())))
    for name, path in MODULES.items()
  }


@pytest.mark.parametrize(
  "importer, imported, allowed",
  [
    ("main", "evaluation.evaluations", True),
    ("main", "evaluators.mean", False),
    ("main", "models.vit", False),
    ("main", "inputs.pipeline", True),
    ("tasks.captioning", "losses.token_losses", True),
    ("tasks.captioning", "tasks.classification", False),
    ("tasks.captioning", "models.vit", False),
    ("tasks.text_embedding", "step.frozen", True),
    ("losses.distances", "step.frozen", False),
    ("models.cappa", "models.layers.attention", True),
    ("models.cappa", "models.vit", True),
    ("models.vit", "models.resnet", False),
    ("models.layers.attention", "models.vit", False),
    ("evaluators.mean", "tasks.classification", False),
    ("evaluators.mean", "metrics", True),
    ("checkpoints.restore", "main", False),
    ("checkpoints.restore", "arrays.trees", True),
    ("checkpoints.restore", "models.vit", False),
    ("arrays.trees", "checkpoints.restore", False),
    ("pp.ops_basic", "inputs.pipeline", False),
    ("configs.digits", "configs.common", True),
    ("configs.digits", "config.settings", False),
    ("main", "objective.gradients", True),
    ("tasks.captioning", "objective.gradients", False),
    ("tools.plan.plan", "main", True),
  ],
)
def test_rules_match_the_design(importer, imported, allowed):
  assert _allowed(importer, imported) == allowed


def test_imports_are_recognised():
  source = """
import bigtrain.arrays.trees
from bigtrain import metrics, sharding as s
from bigtrain.models import vit
from bigtrain.config.errors import ConfigError
def f():
  from configs.common import parse_arg
"""
  assert sorted(_imports(source)) == [
    "arrays.trees",
    "config.errors",
    "configs.common",
    "metrics",
    "models.vit",
    "sharding",
  ]


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
  wrong = [
    imported for imported in _graph()[name] if not _allowed(name, imported)
  ]
  assert not wrong, (
    f"{MODULES[name].relative_to(ROOT)} must not import {wrong}: see RULES "
    "here and the picture in docs/architecture.md"
  )


def test_packages_do_not_import_each_other_in_circles():
  packages = {_package(name): set() for name in _graph()}
  for name, imported in _graph().items():
    packages[_package(name)] |= {_package(i) for i in imported}
  for name, imported in packages.items():
    imported.discard(name)
  # Raises CycleError.
  assert [*graphlib.TopologicalSorter(packages).static_order()]


def test_the_picture_in_the_docs_matches_the_imports():
  page = (ROOT / "docs" / "architecture.md").read_text()
  picture = re.search(r"```\n( +the program.*?)```", page, re.DOTALL)[1]
  level, levels = 0, {}
  for line in picture.splitlines()[1:]:
    if number := re.match(r" (\d) ", line):
      level = int(number[1])
    for name in re.findall(r"[a-z_/]+", line):
      levels[name.replace("/", ".")] = level
  assert set(levels) == {*RULES}
  for importer, names in _graph().items():
    for imported in names:
      ours, theirs = _package(importer), _package(imported)
      if "configs" not in (ours, theirs) and ours != theirs:
        assert levels[ours] > levels[theirs], f"{importer} -> {imported}"


def test_every_package_says_what_lives_there():
  for path in (ROOT / "bigtrain").rglob("__init__.py"):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(text) > 40, f"{path.relative_to(ROOT)} needs a docstring"


def test_modules_do_not_import_each_other_in_circles():
  # Raises CycleError.
  assert [*graphlib.TopologicalSorter(_graph()).static_order()]


def test_no_drawers():
  drawers = re.compile(r"(.*_)?(utils?|helpers?|misc)|common")
  for package in ("bigtrain", "configs", "benchmarks", "tests"):
    for path in (ROOT / package).rglob("*.py"):
      folder = path.relative_to(ROOT).parent.as_posix()
      if path.stem == "common" and folder == "configs":
        continue
      assert not drawers.fullmatch(path.stem), f"{path}: name what is in it"


_HEAVY = (
  "tensorflow",
  "tensorflow_datasets",
  "sklearn",
  "orbax",
  "torch",
  "matplotlib",
  "wandb",
)
_IMPORT_ALL = """
import importlib, json, sys
heavy, first = json.loads(sys.argv[1]), {}
for name in json.loads(sys.argv[2]):
  importlib.import_module(name)
  for package in [h for h in heavy if h in sys.modules]:
    first.setdefault(package, name)
print(json.dumps(first))
"""


def test_importing_any_module_loads_nothing_heavy():
  ours = [
    name if name.startswith(("bigtrain", "configs")) else f"bigtrain.{name}"
    for name in MODULES
  ]
  command = [sys.executable, "-c", _IMPORT_ALL]
  command += [json.dumps(_HEAVY), json.dumps(ours)]
  done = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  first = json.loads(done.stdout.splitlines()[-1])
  assert first == {}, f"heavy packages, and the modules that load them: {first}"
