"""Modules that a config names, and batches with missing features."""

import math
import re

import flax.linen as nn
import jax
import pytest

from bigtrain.config import modules, settings
from bigtrain.config.errors import ConfigError
from bigtrain.config.modules import find_attribute, find_module
from bigtrain.inputs.named_features import Features
from bigtrain.objective import building, model_variants

# What a module of each kind must define.
REQUIRED = {
  "tasks": ("inputs", "loss_fn", "predict_fns"),
  "models": ("Model",),
  "evaluators": ("Evaluator",),
  "data": ("Source",),
  "hooks": ("Hook",),
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_every_listed_module_defines_what_a_config_needs(kind):
  names = modules.module_names(kind)
  assert names
  for name in names:
    module = find_module(kind, name, "type")
    for attribute in REQUIRED[kind]:
      assert callable(getattr(module, attribute, None)), (
        f"bigtrain/{kind}/{name}.py has no {attribute}: move it to a package "
        "that no config can name"
      )


@pytest.mark.parametrize(
  "kind, name",
  [
    ("models", "mlp"),
    ("models", "attention"),
    ("models", "layers"),
    ("evaluators", "class_names"),
    ("evaluators", "evaluations"),
    ("data", "formats"),
    ("data", "token_files"),
    ("data", "window"),
    ("hooks", "hooks"),
  ],
)
def test_suggestions_are_modules_that_a_config_can_name(kind, name):
  with pytest.raises(
    ConfigError, match="key: unknown (model|evaluator|data source|hook) "
  ) as error:
    find_module(kind, name, "key")
  _, _, hint = str(error.value).partition(f"{name!r}.")
  hint, _, _ = hint.partition(" A module of your own")
  suggested = re.sub(r"Did you mean|There are|and \d+ more", "", hint)
  assert set(re.findall(r"\w+", suggested)) <= set(modules.module_names(kind))
  assert re.search(r"\w", suggested)


def test_a_helper_of_models_as_the_model_is_a_config_error():
  config = settings.Config({"model_name": "mlp"})
  message = r"config.model_name: unknown model 'mlp'\. (Did you|There are)"
  with pytest.raises(ConfigError, match=message):
    building.model(config)


def test_a_helper_of_evaluators_as_a_type_is_a_config_error():
  message = r"evals.val.type: unknown evaluator 'class_names'\. (Did|There)"
  with pytest.raises(ConfigError, match=message):
    find_module("evaluators", "class_names", "config.evals.val.type")


def test_find_module_imports_a_module_by_its_file_name():
  module = find_module("tasks", "classification", "config.task")
  assert module.__name__ == "bigtrain.tasks.classification"


@pytest.mark.parametrize(
  "name, message",
  [
    ("clasification", "config.task: unknown task 'clasification'.*Did you"),
    ("zzz", "There are: .*classification"),
    ("no_such_package.task", "no module named 'no_such_package'"),
    ("json.no_such_module", "no module named 'json.no_such_module'"),
    (".task", "expected package.module, got '.task'"),
    ("task.", "expected package.module"),
    ("", "expected a module's name, got ''"),
    (3, "expected a module's name, got 3"),
  ],
)
def test_find_module_rejects(name, message):
  with pytest.raises(ConfigError, match=message):
    find_module("tasks", name, "config.task")


def test_find_module_imports_a_dotted_path(tmp_path, monkeypatch):
  package = tmp_path / "my_project_of_test"
  package.mkdir()
  (package / "__init__.py").write_text("")
  (package / "good.py").write_text("answer = 42")
  (package / "broken.py").write_text("import no_such_dependency")
  monkeypatch.syspath_prepend(str(tmp_path))
  module = find_module("tasks", "my_project_of_test.good", "config.task")
  assert module.answer == 42
  # A broken import in the user's module is not reported as a missing task.
  with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
    find_module("tasks", "my_project_of_test.broken", "config.task")


def test_find_attribute_suggests_the_nearest_name():
  assert find_attribute("math.pi", "config.x") == math.pi
  with pytest.raises(
    ConfigError, match=r"config\.x: math has no 'sqrtt'.*sqrt"
  ):
    find_attribute("math.sqrtt", "config.x")
  with pytest.raises(ConfigError, match=r"expected package\.module\.name"):
    find_attribute("pi", "config.x")


def test_a_missing_feature_is_reported_with_the_nearest_one():
  batch = Features({"labels": 1, "image": 2, "_mask": 3}, "config.input")
  assert batch["labels"] == 1 and batch.get("label") is None
  message = r"config.input: .* no feature 'label'\. Did you mean 'labels'\?"
  with pytest.raises(ConfigError, match=message):
    batch["label"]
  with pytest.raises(ConfigError, match="'x'. There are: image, labels.$"):
    batch["x"]


def test_jax_transforms_batches_of_features():
  batch = Features({"b": 2.0, "a": 1.0}, "config.input")
  doubled = jax.jit(lambda batch: jax.tree.map(lambda x: 2 * x, batch))(batch)
  assert doubled == {"a": 2.0, "b": 4.0}
  with pytest.raises(ConfigError, match="config.input: .* 'c'"):
    doubled["c"]


class _Model(nn.Module):
  features: int


def test_drawn_fields_of_a_model_are_not_flaxs():
  cfg = settings.Config({"flexi": {"x": {"values": [1, 2]}}})
  message = r"config\.flexi: unknown 'x'\. There are: features\.$"
  with pytest.raises(ConfigError, match=message):
    model_variants.from_config(cfg, _Model(features=4))
