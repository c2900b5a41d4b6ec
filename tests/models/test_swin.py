"""Swin: sizes, windows and stochastic depth. Outputs: published/."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN
from support import cases

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import swin
from bigtrain.objective import building, published_sizes
from bigtrain.optim import views

TINY = dict(width=8, depths=(2, 1), num_heads=(2, 4), num_classes=3)
TINY |= dict(patch_size=2, window=3, image_size=14)
IMAGE = (8, 14, 14, 3)


def params_of(model, shape=IMAGE):
  """Random parameters; at the start, blocks of version 2 do nothing."""
  init = functools.partial(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(init, jnp.zeros(shape))
  noise = lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32)
  return jax.tree.map(noise, shapes)


# As counted by transformers.
@pytest.mark.parametrize(
  ("variant", "version", "published"),
  [
    ("tiny", 1, 28_288_354),
    pytest.param("small", 1, 49_606_258, marks=pytest.mark.slow),
    pytest.param("base", 1, 87_768_224, marks=pytest.mark.slow),
    pytest.param("large", 1, 196_532_476, marks=pytest.mark.slow),
    ("tiny", 2, 28_347_154),
    pytest.param("small", 2, 49_728_418, marks=pytest.mark.slow),
    pytest.param("base", 2, 87_918_816, marks=pytest.mark.slow),
    pytest.param("large", 2, 196_739_932, marks=pytest.mark.slow),
  ],
)
def test_variants_have_the_published_number_of_parameters(
  variant, version, published
):
  model = swin.Model(1000, variant, version, image_size=224)
  init = functools.partial(model.init, jax.random.key(0))
  shapes = jax.eval_shape(init, jnp.zeros((1, 56, 56, 3)))["params"]
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == published


def test_blocks_of_version_2_begin_as_identities():
  image = jax.random.normal(jax.random.key(1), (1, 4, 4, 3))
  model = swin.Model(**TINY | dict(depths=(1,), num_heads=(2,), version=2))
  params = model.init(jax.random.key(0), image)["params"]
  scales = {n: x for n, x in trees.flatten_with_names(params) if "/scale" in n}
  assert len(scales) == 4
  for name, value in scales.items():
    assert (value == (0 if "block" in name else 1)).all(), name


def test_a_grid_within_the_window_takes_the_middle_of_the_table():
  image = jax.random.normal(jax.random.key(1), (2, 6, 6, 3))
  model = swin.Model(**TINY | dict(depths=(2,), num_heads=(2,)))
  params = params_of(model, image.shape)
  wide = jax.tree.map(jnp.array, params)
  for block in ("stage1_block1", "stage1_block2"):
    table = params["params"][block]["relative_bias"].reshape(5, 5, 2)
    table = jnp.pad(table, ((4, 4), (4, 4), (0, 0)), constant_values=9.0)
    wide["params"][block]["relative_bias"] = table.reshape(-1, 2)
  expected = jax.jit(model.apply)(params, image)[0]
  actual = jax.jit(model.clone(window=7).apply)(wide, image)[0]
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", cases.quick([1, 2], 2))
def test_stochastic_depth_leaves_out_branches_in_training(version):
  image = jax.random.normal(jax.random.key(1), (16, *IMAGE[1:]))
  model = swin.Model(**TINY, version=version, drop_path=0.5)
  params = params_of(model)
  keys = {"dropout": jax.random.key(2)}
  apply = jax.jit(model.apply, static_argnames="train")
  trained, _ = apply(params, image, train=True, rngs=keys)
  evaluated, _ = apply(params, image)
  same = np.isclose(trained, evaluated, atol=1e-6).all(axis=1)
  assert not same.all()
  plain = jax.jit(
    swin.Model(**TINY, version=version).apply, static_argnames="train"
  )
  np.testing.assert_array_equal(plain(params, image, train=True)[0], evaluated)


@pytest.mark.parametrize(
  "case",
  cases.quick(
    [
      (1, (2, 1), dict(fsdp=8)),
      (2, (2, 1), dict(fsdp=8)),
      (1, (2, 1), dict(fsdp=4, tensor=2)),
      (2, (2, 1), dict(fsdp=4, tensor=2)),
      (2, (2,), dict(fsdp=4, tensor=2)),
    ],
    (2, (2,), dict(fsdp=4, tensor=2)),
  ),
)
def test_gradients_on_eight_devices_are_those_on_one(case):
  version, depths, sizes = case
  image = jax.random.normal(jax.random.key(1), IMAGE)
  heads = TINY["num_heads"][: len(depths)]
  model = swin.Model(
    **TINY | dict(version=version, depths=depths, num_heads=heads)
  )
  params = params_of(model)
  loss = lambda params, image: model.apply(params, image)[0].std()
  gradients = lambda *args: jax.jit(jax.grad(loss))(*args)
  one = gradients(params, image)
  mesh = sharding.make_mesh(**sizes)
  named = dict(trees.flatten_with_names(params["params"]))
  shapes = {name: x.shape for name, x in named.items()}
  places = sharding.place(swin.param_dims(model), shapes, sizes)
  if "tensor" in sizes:
    assert "stage1_block1/query/kernel" in places
  with jax.set_mesh(mesh):
    rows = jax.NamedSharding(mesh, jax.P(("replica", "fsdp")))
    rules = sharding.Rules(of_model=places)
    layout, _ = sharding.state_shardings(params["params"], mesh, rules)
    placed = {"params": jax.device_put(params["params"], layout)}
    eight = gradients(placed, jax.device_put(image, rows))
  largest = max(jnp.abs(x).max() for x in jax.tree.leaves(one))
  close = lambda x, y: np.testing.assert_allclose(
    x, y, rtol=0, atol=1e-5 * largest
  )
  jax.tree.map(close, eight, one)


def test_views_of_the_parameters():
  model = swin.Model(**TINY)
  of_names = views.of_model(swin, model, params_of(model)["params"])
  expected = {
    "stage1_block1/query/kernel": views.View((), (0,), (1, 2), heads=(1,)),
    "stage2_block1/out/kernel": views.View((), (0, 1), (2,), heads=(0,)),
    "stage1_block1/Dense_1/kernel": views.View((), (0,), (1,)),
    "merge1/kernel": views.View((), (0,), (1,)),
    "stage1_block1/relative_bias": views.View((), (0,), (1,), False, (1,)),
  }
  assert {name: of_names[name] for name in expected} == expected


def test_bfloat16_is_near_float32():
  image = jax.random.normal(jax.random.key(1), IMAGE)
  model = swin.Model(**TINY, version=2)
  params = params_of(model)
  half = jax.jit(model.clone(dtype="bfloat16").apply)(params, image)
  full = jax.jit(model.apply)(params, image)
  assert half[1]["encoded"].dtype == jnp.bfloat16
  assert half[0].dtype == jnp.float32
  np.testing.assert_allclose(half[0], full[0], rtol=0, atol=0.05)


def test_a_published_model_trains_on_larger_windows_and_images():
  folder = str(GOLDEN / "published_vision" / "swinv2")
  larger = dict(window=4, image_size=32, pretrained_windows=(3, 3, 2))
  config = dict(model_name="swin", model=dict(published=folder, **larger))
  with pytest.raises(ConfigError, match="window=4, but config.json"):
    published_sizes.with_published_sizes(settings.Config(config))
  source = dict(path=folder, allow_changed=[*larger])
  config["model_init"] = source
  config = published_sizes.with_published_sizes(settings.Config(config))
  module, model = building.model(config)
  warm_start.check_published(source, module, model)
  assert (model.window, model.image_size) == (4, 32)
  flat = safetensors_files.read(folder)
  # Older files have what the model computes.
  block = "encoder.layers.0.blocks.0.attention.self."
  flat[f"{block}relative_position_index"] = np.zeros((9, 9), np.int64)
  flat[f"{block}relative_coords_table"] = np.zeros((1, 5, 5, 2), np.float32)
  init = functools.partial(model.init, jax.random.key(0))
  like = jax.eval_shape(init, jnp.zeros((1, 32, 32, 3)))["params"]
  like = dict(trees.flatten_with_names(like))
  loaded = module.from_published(flat, like)
  assert {loaded[name].shape for name in like} == {
    x.shape for x in like.values()
  }
  others = {name: x.status for name, x in loaded.items() if name not in like}
  assert len(others) == 2 and {*others.values()} == {"ignored"}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(variant="tinny"), "Did you mean 'tiny'"),
    (dict(depths=(1, 1)), "as many as depths, .* or a variant"),
    (dict(TINY, num_heads=(2,)), "expected as many as depths"),
    (dict(TINY, num_heads=(2, 3)), "that divide the width, 8"),
    (dict(TINY, version=3), "config.model.version"),
    (dict(TINY, version=2, image_size=None), "config.model.image_size"),
  ],
)
def test_wrong_options_are_errors(options, message):
  with pytest.raises(ConfigError, match=message):
    swin.Model(**options)
