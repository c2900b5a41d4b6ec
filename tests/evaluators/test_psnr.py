"""PSNR against its formula."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError

RNG = np.random.default_rng(0)
N = 37
IMAGES = RNG.uniform(-1, 1, size=(N, 4, 5, 3)).astype(np.float32)
NOISE = RNG.normal(size=IMAGES.shape) * RNG.uniform(0.1, 1, size=(N, 1, 1, 1))


def build(images=IMAGES, mesh=(2, 4), **options):
  context = evaluating.context(mesh=sharding.make_mesh(*mesh), batch_size=16)
  columns = dict(image=images, noise=NOISE.astype(np.float32))
  data = dict(type="arrays", arrays=columns)
  noisy = lambda variables, batch: batch["image"] + batch["noise"]
  return evaluating.build("psnr", noisy, context, data=data, **options)


@pytest.mark.parametrize("mesh", [(2, 4), (1, 8)])
def test_psnr_of_images(mesh):
  """10 log10(range^2 / mean squared error), the formula of scikit-image."""
  errors = (NOISE**2).mean((1, 2, 3))
  results = build(mesh=mesh).run({}, 1)
  expected = np.mean(10 * np.log10(4 / errors))
  assert results == {"psnr": pytest.approx(expected, rel=1e-5)}
  larger = build(peak=20).run({}, 1)["psnr"]
  assert larger == pytest.approx(expected + 20, rel=1e-5)


def test_images_that_are_not_finite_are_counted():
  images = IMAGES.copy()
  images[5, 0, 0, 0] = jnp.nan
  results = build(images).run({}, 1)
  assert np.isnan(results["psnr"]) and results["nonfinite"] == 1


def test_mistakes():
  with pytest.raises(ConfigError, match="no feature 'imag'.* mean 'image'"):
    build(target_key="imag").run({}, 1)
