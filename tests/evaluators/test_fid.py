"""Frechet distances against the formula with scipy's matrix square root."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from tiny import evaluating

from bigtrain import sharding
from bigtrain.evaluators import fid

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


def test_distances_are_scipys():
  assert fid.frechet_distance(X, Y) == pytest.approx(expected(X, Y), rel=1e-9)
  # Of normal variables in one dimension: of means and standard deviations.
  x, y = X[:, :1].astype(np.float64), Y[:, :1].astype(np.float64)
  means, stds = x.mean() - y.mean(), x.std(ddof=1) - y.std(ddof=1)
  assert fid.frechet_distance(x, y) == pytest.approx(means**2 + stds**2)


def test_singular_covariances():
  """As with fewer examples than features."""
  few = X[:4]
  assert fid.frechet_distance(few, few) == pytest.approx(0, abs=1e-6)
  assert fid.frechet_distance(few, few + 2) == pytest.approx(6 * 4, rel=1e-6)
  both = fid.frechet_distance(few, Y), fid.frechet_distance(Y, few)
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
