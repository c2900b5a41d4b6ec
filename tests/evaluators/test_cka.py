"""CKA against its definition, with kernels, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config import lengths
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.config.settings import Config
from bigtrain.evaluation import evaluations
from bigtrain.evaluators import cka

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
N = 37
X = RNG.normal(size=(N, 6)) + 3
Y = (X[:, :3] @ RNG.normal(size=(3, 50)) + RNG.normal(size=(N, 50))).reshape(
  N, 5, 10
)


def hsic(k, m):
  """The estimate of equation 3, of Gram matrices."""
  centre = np.eye(N) - 1 / N
  return np.trace(k @ centre @ m @ centre) / (N - 1) ** 2


def expected(x, y):
  k, m = (a.reshape(N, -1) @ a.reshape(N, -1).T for a in (x, y))
  return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def test_cka_is_its_definition_for_few_and_many_features():
  for x, y in ((X, Y), (Y, X), (X, X**2), (Y, Y**2)):
    assert cka.linear_cka(x, y) == pytest.approx(expected(x, y), rel=1e-12)
  assert 0.1 < cka.linear_cka(X, Y) < 0.9


def test_rotations_scales_and_shifts_change_nothing():
  rotation, _ = np.linalg.qr(RNG.normal(size=(6, 6)))
  assert cka.linear_cka(X, -7 * X @ rotation + 5) == pytest.approx(1)
  value = cka.linear_cka(X, Y)
  assert cka.linear_cka(3 * X @ rotation - 1, Y / 9) == pytest.approx(value)
  # An invertible map is no rotation.
  assert cka.linear_cka(X, X * [1, 9, 1, 1, 1, 1]) < 0.99


def predict(variables, batch):
  x, y = batch["x"], batch["y"]
  return {"x": x * variables["scale"], "y": y, "both": y * x[:, :1, None]}


def build(mesh=(2, 4), of=predict, kind="cka", workdir="", **options):
  mesh = sharding.make_mesh(*mesh)
  context = evaluating.context(mesh=mesh, batch_size=16, workdir=workdir)
  columns = dict(x=X.astype(np.float32), y=Y.astype(np.float32))
  data = dict(type="arrays", arrays=columns)
  return evaluating.build(kind, of, context, data=data, **options)


VARIABLES = {"scale": jnp.float32(1.0)}


@pytest.mark.parametrize("mesh", [(2, 4), (1, 8)])
def test_layers_are_compared_with_one_another(mesh):
  results = build(mesh).run(VARIABLES, 1)
  assert results == {
    "both:x": pytest.approx(expected(Y * X[:, :1, None], X), rel=1e-5),
    "both:y": pytest.approx(expected(Y * X[:, :1, None], Y), rel=1e-5),
    "x:y": pytest.approx(expected(X, Y), rel=1e-5),
  }
  results = build(mesh).run({"scale": jnp.float32(np.nan)}, 1)
  assert np.isnan(results["x:y"]) and results["nonfinite"] == N


def test_a_reference_is_a_file_of_save(tmp_path):
  one = lambda variables, batch: batch["y"]
  saver = build(of=one, kind="save", workdir=str(tmp_path))
  saver.run(VARIABLES, 3)
  path = str(tmp_path / "predictions" / "val-00000003.npz")
  results = build(of=one, reference=path).run(VARIABLES, 1)
  assert results == {"cka": pytest.approx(1)}
  results = build(reference=path).run(VARIABLES, 1)
  assert results["x:"] == pytest.approx(expected(X, Y), rel=1e-5)
  assert set(results) == {"x:", "y:", "both:"}
  with pytest.raises(DataError, match=f"reference: {N} examples; expected 30"):
    build(reference=path, num_examples=30).run(VARIABLES, 1)


def test_two_predict_functions_by_name():
  fns = {
    "first": lambda variables, batch, power=1: batch["x"] ** power,
    "second": lambda variables, batch: batch["y"],
  }
  context = evaluating.context()
  columns = dict(x=X.astype(np.float32), y=Y.astype(np.float32))

  def run(**options):
    entry = dict(type="cka", data=dict(type="arrays", arrays=columns)) | options
    (evaluation,) = evaluations.from_config(
      Config({"evals": {"val": entry}}),
      fns,
      lengths.Units(batch_size=8, total_steps=1),
      context,
      {"params": None},
    )
    return evaluation.build().run({}, 1)

  results = run(pred=["first", "second"], pred_kw=dict(first=dict(power=2)))
  assert results == {"first:second": pytest.approx(expected(X**2, Y), rel=1e-5)}
  with pytest.raises(ConfigError, match="'secnd'. Did you mean 'second'?"):
    run(pred=["first", "secnd"])
  with pytest.raises(ConfigError, match="pred_kw.frst: unknown key. Did you"):
    run(pred=["first", "second"], pred_kw=dict(frst={}))
