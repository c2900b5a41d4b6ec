"""Who may import whom, and how light the imports are."""

import ast
import graphlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# (importer, what of this repository it may import), as regular expressions of
# which the first that fits the importer decides. "bigtrain." is left out. What
# a config names (tasks, models, evaluators, sources) is imported by name and
# by nobody else.
_BOTTOM = r"settings|trees|sharding|metrics|flops|(pairwise_|token_)?losses"
_BY_NAME = r"(tasks|models|evaluators|tools)(\..+)?"
RULES = (
  (r"configs\.cap", r"configs\.(common|cappa)"),  # It is that but for a key.
  (r"configs(\..+)?", r"configs\.common"),
  (r"tools(\..+)?", r"(?!configs).*"),
  (r"main", rf"evaluators\.common|(?!main|configs|data\.|{_BY_NAME}).*"),
  (r"tasks(\..+)?", rf"decoding|{_BOTTOM}"),
  # Layers that several models are built of, and the ViT, which is a tower of
  # captioners and of image-text models.
  (
    r"models(\..+)?",
    r"models\.(attention|common|decoder_\w+|layouts|mlp|moe(_\w+)?|published"
    r"|stack|t5_\w+|vit)"
    r"|settings"
    r"|trees|sharding",
  ),
  # Captions and class names are text: evaluators make and read ids, by the ops
  # that make those of the training data.
  (
    r"evaluators(\..+)?",
    r"evaluators\.(common|class_names)|input_pipeline"
    rf"|pp\.(parse|registry|tokenizers)|paths|{_BOTTOM}",
  ),
  # Token files say which tokenizer made them.
  (r"data(\..+)?", r"data\..+|order|settings|pp\.tokenizers"),
  (r"pp(\..+)?", r"pp\..+|settings"),
  (rf"decoding|{_BOTTOM}", _BOTTOM),
  (r".*", rf"(?!main|configs|{_BY_NAME}).*"),
)


def _modules():
  """{name without "bigtrain.": path} of the package and the configs."""
  found = {}
  for package in ("bigtrain", "configs"):
    for path in sorted((ROOT / package).rglob("*.py")):
      name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
      name = name.removesuffix(".__init__")
      found[name.removeprefix("bigtrain.")] = path
  return found


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


def _allowed(importer, imported):
  rule = next(may for who, may in RULES if re.fullmatch(who, importer))
  return re.fullmatch(rule, imported) is not None


GRAPH = {
  name: sorted(set(_imports(path.read_text())))
  for name, path in MODULES.items()
}


@pytest.mark.parametrize(
  "importer, imported, allowed",
  [
    ("main", "evaluators.common", True),
    ("main", "evaluators.mean", False),
    ("main", "models.vit", False),
    ("main", "input_pipeline", True),
    ("tasks.captioning", "losses", True),
    ("tasks.captioning", "models.vit", False),
    ("tasks.captioning", "train_step", False),
    ("models.vit", "models.common", True),
    ("models.vit", "models.resnet", False),
    ("evaluators.mean", "tasks.classification", False),
    ("evaluators.mean", "metrics", True),
    ("checkpoint", "main", False),
    ("checkpoint", "trees", True),
    ("checkpoint", "models.vit", False),
    ("trees", "checkpoint", False),
    ("pp.ops_basic", "input_pipeline", False),
    ("configs.digits", "configs.common", True),
    ("configs.digits", "settings", False),
    ("tools.plan", "main", True),
  ],
)
def test_the_rules_say_what_the_design_says(importer, imported, allowed):
  assert _allowed(importer, imported) == allowed


def test_imports_are_found():
  source = """
import bigtrain.trees
from bigtrain import settings, sharding as s
from bigtrain.models import common
from bigtrain.settings import ConfigError
def f():
  from configs.common import parse_arg
"""
  assert sorted(_imports(source)) == [
    "configs.common",
    "models.common",
    "settings",
    "settings",
    "sharding",
    "trees",
  ]


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
  wrong = [imported for imported in GRAPH[name] if not _allowed(name, imported)]
  assert not wrong, (
    f"{MODULES[name].relative_to(ROOT)} must not import {wrong}: see RULES "
    "here, and who may import whom in docs/architecture.md"
  )


def test_no_import_goes_round_in_circles():
  list(graphlib.TopologicalSorter(GRAPH).static_order())  # Raises CycleError.


def test_no_drawers():
  designed = ("bigtrain/models", "bigtrain/evaluators", "configs")
  drawers = re.compile(r"(.*_)?(utils?|helpers?|misc)|common")
  for package in ("bigtrain", "configs", "benchmarks", "tests"):
    for path in (ROOT / package).rglob("*.py"):
      folder = path.relative_to(ROOT).parent.as_posix()
      if path.stem == "common" and folder in designed:
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
heavy, found = json.loads(sys.argv[1]), {}
for name in json.loads(sys.argv[2]):
  importlib.import_module(name)
  for package in [h for h in heavy if h in sys.modules]:
    found.setdefault(package, name)
print(json.dumps(found))
"""


def test_importing_any_module_loads_nothing_heavy():
  ours = [
    name if name.startswith(("bigtrain", "configs")) else f"bigtrain.{name}"
    for name in MODULES
  ]
  command = [sys.executable, "-c", _IMPORT_ALL]
  command += [json.dumps(_HEAVY), json.dumps(ours)]
  done = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found == {}, f"which module loads what: {found}"
