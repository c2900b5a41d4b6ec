"""Frechet distances against the formula with scipy's matrix square root."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from tiny import evaluating

from bigtrain import sharding
from bigtrain.evaluation import frechet

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
MIX = RNG.normal(size=(6, 6))
X = (RNG.normal(size=(61, 6)) @ MIX + 1).astype(np.float32)
Y = (RNG.normal(size=(43, 6)) * 2).astype(np.float32)
VARIABLES = {"scale": jnp.float32(1.0)}


def expected(x, y):
  x, y = x.astype(np.float64), y.astype(np.float64)
  first, second = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
  root = scipy.linalg.sqrtm(first @ second).real
  apart = x.mean(0) - y.mean(0)
  return apart @ apart + np.trace(first + second - 2 * root)


def distance(x, y):
  return frechet.distance(*map(frechet.Moments.of, (x, y)))


def test_moments_of_uneven_batches_are_numpys():
  far = X.astype(np.float64) + 1e6  # Float32 would keep no digit of these.
  streamed = frechet.Moments()
  for batch in np.split(far, [7, 7, 40, 60]):
    streamed.add(batch)
  assert streamed.number == len(far)
  np.testing.assert_allclose(streamed.mean_D, far.mean(0), 1e-14)
  expected_DD = np.cov(far, rowvar=False)
  np.testing.assert_allclose(streamed.covariance_DD, expected_DD, 1e-8, 1e-8)


def test_distances_are_scipys():
  assert distance(X, Y) == pytest.approx(expected(X, Y), rel=1e-9)
  # Of normal variables in one dimension: of means and standard deviations.
  x, y = X[:, :1].astype(np.float64), Y[:, :1].astype(np.float64)
  means, stds = x.mean() - y.mean(), x.std(ddof=1) - y.std(ddof=1)
  assert distance(x, y) == pytest.approx(means**2 + stds**2)


def test_singular_covariances():
  """As with fewer examples than features."""
  few = X[:4]
  assert distance(few, few) == pytest.approx(0, abs=1e-6)
  assert distance(few, few + 2) == pytest.approx(6 * 4, rel=1e-6)
  both = distance(few, Y), distance(Y, few)
  assert both[0] == pytest.approx(both[1], rel=1e-6)


def arrays(x):
  return dict(type="arrays", arrays=dict(x=x))


def build(mesh=(2, 4), **options):
  context = evaluating.context(mesh=sharding.make_mesh(*mesh), batch_size=16)
  sets = dict(data=arrays(X), reference_data=arrays(Y)) | options
  features = lambda variables, batch: batch["x"] * variables["scale"]
  return evaluating.build("fid", features, context, **sets)


@pytest.mark.parametrize("mesh", [(2, 4), (1, 8)])
def test_the_distance_of_two_sources(mesh):
  results = build(mesh).run(VARIABLES, 1)
  assert results == {"fid": pytest.approx(expected(X, Y), rel=1e-6)}
  results = build(num_examples=30).run(VARIABLES, 1)
  assert results == {"fid": pytest.approx(expected(X[:30], Y), rel=1e-6)}


def test_features_that_are_not_finite():
  x = X.copy()
  x[3] = np.inf
  results = build(data=arrays(x)).run(VARIABLES, 1)
  assert np.isnan(results["fid"]) and results["nonfinite"] == 1
