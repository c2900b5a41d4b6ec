"""Modules that a config can name: every one of them works, and no others."""

import re

import jax
import pytest

from bigtrain import parts, settings
from bigtrain.settings import ConfigError

# What a module of each kind must define.
REQUIRED = {
  "tasks": ("inputs", "loss_fn", "predict_fns"),
  "models": ("Model",),
  "evaluators": ("Evaluator",),
  "data": ("Source",),
  "hooks": ("Hook",),
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_every_listed_module_has_what_a_config_needs(kind):
  names = parts.module_names(kind)
  assert names
  for name in names:
    module = parts.find_module(kind, name, "type")
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
def test_only_modules_that_a_config_can_name_are_suggested(kind, name):
  with pytest.raises(ConfigError, match=f"key: no {kind} module") as error:
    parts.find_module(kind, name, "key")
  _, _, hint = str(error.value).partition(f"{name!r}.")
  suggested = re.sub("Did you mean|There are", "", hint)
  assert set(re.findall(r"\w+", suggested)) <= set(parts.module_names(kind))
  assert re.search(r"\w", suggested)


def test_a_helper_of_models_as_the_model_is_a_config_error():
  config = settings.Config({"model_name": "mlp"})
  message = r"config.model_name: no models module 'mlp'\. (Did you|There are)"
  with pytest.raises(ConfigError, match=message):
    parts.model(config)


def test_a_helper_of_evaluators_as_a_type_is_a_config_error():
  message = r"evals.val.type: no evaluators module 'class_names'\. (Did|There)"
  with pytest.raises(ConfigError, match=message):
    parts.find_module("evaluators", "class_names", "config.evals.val.type")


def test_a_missing_feature_is_reported_with_the_nearest_one():
  batch = parts.Features({"labels": 1, "image": 2, "_mask": 3}, "config.input")
  assert batch["labels"] == 1 and batch.get("label") is None
  message = r"config.input: .* no feature 'label'\. Did you mean 'labels'\?"
  with pytest.raises(ConfigError, match=message):
    batch["label"]
  with pytest.raises(ConfigError, match="'x'. There are: image, labels.$"):
    batch["x"]


def test_jax_transforms_batches_of_features():
  batch = parts.Features({"b": 2.0, "a": 1.0}, "config.input")
  doubled = jax.jit(lambda batch: jax.tree.map(lambda x: 2 * x, batch))(batch)
  assert doubled == {"a": 2.0, "b": 4.0}
  with pytest.raises(ConfigError, match="config.input: .* 'c'"):
    doubled["c"]
