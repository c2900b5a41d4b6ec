"""Mixer, BiT and BERT against big_vision: golden/big_vision.json."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import resnet, text_transformer, vit
from bigtrain.models.layers import encoder

pytestmark = pytest.mark.golden

PATH = pathlib.Path(__file__).parents[1] / "golden" / "make_big_vision.py"
MIXER = dict(width=8, depth=2, mlp_dim=10, token_mlp_dim=6, variant="Mixer-B/8")
BERT = dict(width=8, depth=2, mlp_dim=12, num_heads=2, vocab_size=11)
BERT |= dict(post_norm=True, token_types=2, max_len=9, pad_id=0)
BERT |= dict(norm_eps=1e-12, pool_type="first")
BIT = dict(width=0.5, depth=(1, 1))
MODELS = {
  "mixer": (vit, MIXER),
  "bit": (resnet, dict(BIT, norm="bit")),
  "bit_paper": (resnet, dict(BIT, norm="bit_paper", version=2)),
  "bert": (text_transformer, BERT),
}


def script():
  spec = importlib.util.spec_from_file_location("make_big_vision", PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_big_vision(name):
  make = script()
  golden = json.loads(make.FILE.read_text())[name]
  module, options = MODELS[name]
  model = module.Model(num_classes=5, **options)
  x = make.TEXT if name == "bert" else make.image()
  init = lambda key: model.init(key, jnp.asarray(x))["params"]
  like = dict(trees.flatten_with_names(jax.eval_shape(init, jax.random.key(0))))
  flat = module.from_published(make.drawn(golden["shapes"]), like)
  assert set(flat) == set(like)
  params = trees.from_flat({n: np.asarray(flat[n][...]) for n in like})
  run = jax.jit(lambda params: [model.apply({"params": params}, x)[0]])
  rounding.assert_close(run, params, [np.asarray(golden["logits"])])


def test_the_paper_s_release_of_bit_has_other_names():
  names = {
    "resnet/root_block/standardized_conv2d/kernel": "conv_root/kernel",
    "resnet/group_norm/gamma": "gn_final/scale",
    "resnet/head/conv2d/kernel": "head/kernel",
    "resnet/block2/unit01/a/standardized_conv2d_3/kernel": (
      "stage2_block1/conv1/kernel"
    ),
    "resnet/block2/unit12/c/group_norm/beta": "stage2_block12/gn3/bias",
    "resnet/block2/unit01/a/proj/standardized_conv2d/kernel": (
      "stage2_block1/conv_proj/kernel"
    ),
  }
  shape = jax.ShapeDtypeStruct((3, 4), np.float32)
  flat = {name: np.zeros((1, 1, 3, 4), np.float32) for name in names}
  like = dict.fromkeys(names.values(), shape)
  result = resnet.from_published(flat, like)
  assert {name: x.shape for name, x in result.items()} == dict.fromkeys(
    names.values(), (3, 4)
  )


def test_stochastic_depth_of_a_mixer_does_not_rescale():
  key, x = jax.random.key(0), jnp.ones((64, 3, 2))
  kept = encoder.drop_path(x, 0.25, key, rescale=False)
  assert set(np.unique(kept)) == {0.0, 1.0}
  np.testing.assert_allclose(encoder.drop_path(x, 0.25, key), kept / 0.75)


def test_a_mixer_takes_images_of_one_shape():
  model = vit.Model(**MIXER)
  patches = jnp.zeros((1, 4, 192))
  with pytest.raises(ConfigError, match="token_mlp_dim=6"):
    model.init(jax.random.key(0), patches, shapes=jnp.asarray([[2, 2]]))
