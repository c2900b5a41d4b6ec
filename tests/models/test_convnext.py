"""ConvNeXt: sizes and stochastic depth. Outputs: published/."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, rounding

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models import convnext

TINY = dict(widths=(4, 8), depths=(1, 1), num_classes=3)


# As counted by timm.
@pytest.mark.parametrize(
  ("variant", "version", "published"),
  [
    ("tiny", 1, 28_589_128),
    pytest.param("small", 1, 50_223_688, marks=pytest.mark.slow),
    pytest.param("base", 1, 88_591_464, marks=pytest.mark.slow),
    pytest.param("large", 1, 197_767_336, marks=pytest.mark.slow),
    ("tiny", 2, 28_635_496),
    ("huge", 2, 660_289_640),
  ],
)
def test_variants_have_the_published_number_of_parameters(
  variant, version, published
):
  model = convnext.Model(
    1000, variant, version, layer_scale=1e-6 if version == 1 else None
  )
  init = functools.partial(model.init, jax.random.key(0))
  shapes = jax.eval_shape(init, jnp.zeros((1, 64, 64, 3)))["params"]
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == published


def test_stochastic_depth_leaves_out_branches_in_training():
  image = jax.random.normal(jax.random.key(1), (16, 32, 32, 3))
  model = convnext.Model(**TINY, drop_path=0.5)
  params = jax.jit(model.init)(jax.random.key(0), image)
  keys = {"dropout": jax.random.key(2)}
  apply = jax.jit(model.apply, static_argnames="train")
  trained, _ = apply(params, image, train=True, rngs=keys)
  evaluated, _ = apply(params, image)
  same = np.isclose(trained, evaluated, atol=1e-6).all(axis=1)
  assert not same.any()  # What is kept is rescaled, so that the mean stays.
  plain = convnext.Model(**TINY)
  apply = jax.jit(plain.apply, static_argnames="train")
  np.testing.assert_array_equal(apply(params, image, train=True)[0], evaluated)


def test_sums_of_shifted_images_are_the_convolution_of_other_platforms():
  numbers = ("NHWC", "HWIO", "NHWC")
  how = dict(dimension_numbers=numbers, feature_group_count=3)
  how |= dict(window_strides=(1, 1), padding=[(3, 3)] * 2)
  keys = jax.random.split(jax.random.key(0), 3)
  x, dy = (jax.random.normal(key, (2, 5, 4, 3)) for key in keys[:2])
  kernel = jax.random.normal(keys[2], (7, 7, 1, 3))

  def run(conv, platforms=None):
    conv = functools.partial(conv, **how)
    both = jax.jit(lambda *args: (conv(*args), jax.vjp(conv, *args)[1](dy)))
    if platforms is None:
      return both(x, kernel)
    return jax.export.export(both, platforms=platforms)(x, kernel).mlir_module()

  for ours, xla in zip(
    jax.tree.leaves(run(convnext._by_device)),
    jax.tree.leaves(run(jax.lax.conv_general_dilated)),
  ):
    # Sums of 49 products, in another order.
    atol = rounding.ROUNDINGS * rounding.EPSILON * np.abs(xla).max()
    np.testing.assert_allclose(ours, xla, rtol=0, atol=atol)
  for platform in ("cuda", "tpu"):
    program = run(convnext._by_device, [platform])
    assert "while" not in program and "stablehlo.convolution" in program


@pytest.mark.parametrize(
  "sizes",
  cases.quick([dict(fsdp=8), dict(fsdp=4, tensor=2)], dict(fsdp=4, tensor=2)),
)
def test_gradients_on_eight_devices_are_those_on_one(sizes):
  image = jax.random.normal(jax.random.key(1), (8, 32, 32, 3))
  model = convnext.Model(**TINY)
  params = jax.jit(model.init)(jax.random.key(0), image)
  loss = lambda params, image: model.apply(params, image)[0].std()
  gradients = lambda *args: jax.jit(jax.grad(loss))(*args)
  one = gradients(params, image)
  mesh = sharding.make_mesh(**sizes)
  with jax.set_mesh(mesh):
    rows = jax.NamedSharding(mesh, jax.P(("replica", "fsdp")))
    eight = gradients(params, jax.device_put(image, rows))
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
  jax.tree.map(close, eight, one)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(variant="tinny"), "Did you mean 'tiny'"),
    (dict(depths=(1, 1)), "as many as widths, None, or a variant"),
    (dict(TINY, depths=(1,)), "expected as many as widths"),
    (dict(TINY, version=3), "config.model.version"),
  ],
)
def test_wrong_options_are_errors(options, message):
  with pytest.raises(ConfigError, match=message):
    convnext.Model(**options)
