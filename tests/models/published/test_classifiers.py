"""Classifiers of texts in transformers' layout, in and out.

golden/make_classifiers.py made the folders.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
from support import rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.objective import building, published_sizes
from bigtrain.tasks import classification

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FOLDERS = {"llama": 3, "qwen3": 1}


def opened(folder, **model):
  """Returns (model, parameters) of a published folder."""
  config = settings.Config(
    {"model_name": "decoder", "model": dict(published=str(folder), **model)}
  )
  module, made = building.model(published_sizes.with_published_sizes(config))
  tokens = np.zeros((1, 4), np.int32)
  like = jax.eval_shape(made.init, jax.random.key(0), tokens)["params"]
  params, _ = warm_start.load_params(
    str(folder), like, convert=module.from_published
  )
  return made, params


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_the_library(name):
  folder = GOLDEN / "classifiers" / name
  model, params = opened(folder)
  assert model.num_classes == FOLDERS[name]
  reference = np.load(folder / "reference.npz")
  tokens = np.where(reference["tokens"] == 0, -1, reference["tokens"])
  logits = classification.predict_fns(model)["logits"]
  run = jax.jit(lambda params: [logits({"params": params}, {"tokens": tokens})])
  rounding.assert_close(run, params, [reference["logits"]])


@pytest.mark.parametrize("name", FOLDERS)
def test_the_layout_has_the_same_arrays_and_classes(name):
  folder = GOLDEN / "classifiers" / name
  model, params = opened(folder)
  shapes = {k: x.shape for k, x in trees.flatten_with_names(params)}
  config, tensors = decoder.to_published(model, shapes)
  theirs = json.loads((folder / "config.json").read_text())
  for key in ("architectures", "id2label", "label2id"):
    assert config[key] == theirs[key]
  file = safetensors_files.read(str(folder / "model.safetensors"))
  assert {t.name for t in tensors} == {*file}


def test_a_language_model_becomes_a_classifier(tmp_path):
  folder = GOLDEN / "published" / "llama"
  with pytest.raises(ConfigError, match="score/kernel"):
    opened(folder, num_classes=3)
  config = settings.Config(
    {
      "model_name": "decoder",
      "model": dict(published=str(folder), num_classes=3, pool="mean"),
    }
  )
  module, model = building.model(published_sizes.with_published_sizes(config))
  tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
  fresh = model.init(jax.random.key(0), tokens)["params"]
  params, _ = warm_start.load_params(
    dict(path=str(folder), allow_missing=["score/.*"]),
    jax.eval_shape(lambda: fresh),
    init=lambda: fresh,
    convert=module.from_published,
  )
  assert model.apply({"params": params}, tokens)[0].shape == (2, 3)
  shapes = {k: x.shape for k, x in trees.flatten_with_names(params)}
  with pytest.raises(ConfigError, match="pool='last'"):
    decoder.to_published(model, shapes)
  with pytest.raises(ConfigError, match="num_classes=3: expected None"):
    model.head_kernel(params)


@pytest.mark.parametrize("pool", decoder.POOLS)
def test_padding_changes_no_class(pool):
  sizes = dict(width=16, depth=1, num_heads=2, mlp_dim=24, vocab_size=31)
  model = decoder.Model(variant="llama", **sizes, num_classes=3, pool=pool)
  tokens = np.arange(1, 9, dtype=np.int32).reshape(1, 8)
  variables = model.init(jax.random.key(0), tokens)
  logits = classification.predict_fns(model)["logits"]
  padded = np.pad(tokens, ((0, 0), (0, 4)), constant_values=-1)
  alone = logits(variables, {"tokens": tokens})
  np.testing.assert_allclose(
    logits(variables, {"tokens": padded}), alone, rtol=1e-5
  )
  plain = model.clone(num_classes=None, tied_head=True)
  hidden = plain.apply(variables, tokens, head=False)[1]
  hidden = hidden["pre_logits"][0]
  want = dict(last=hidden[-1], first=hidden[0], mean=hidden.mean(0))[pool]
  score = variables["params"]["score"]["kernel"]
  np.testing.assert_allclose(alone[0], want @ score, rtol=1e-4, atol=1e-6)
