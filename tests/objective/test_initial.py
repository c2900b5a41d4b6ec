"""Names of axes in a user's model: tests/tiny/axes.py."""

import concurrent.futures

import jax
import numpy as np
import pytest
import tiny

import bigtrain
from bigtrain import main, sharding
from bigtrain.checkpoints import folders
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.objective import building, initial

_RULES = dict(rows=("replica", "fsdp"), pixels=None, hidden="fsdp", classes=())


def _config(tiny_config, changes=None, **model):
  given = {"model_name": "tiny.axes", "model": dict(num_classes=10, **model)}
  return tiny_config(given | (changes or {"logical_axes": _RULES}))


@pytest.fixture(scope="module")
def runs(tiny_config, tmp_path_factory):
  """Folder of runs: with names on eight devices and on one, without names."""
  folder = tmp_path_factory.mktemp("axes")
  config = _config(tiny_config)
  main.train(config | {"stop_at_steps": 3}, str(folder / "eight"))
  main.train(config, str(folder / "eight"))  # From the checkpoint.
  main.train(_config(tiny_config, {}, named=False), str(folder / "plain"))
  one = sharding.make_mesh(devices=jax.devices()[:1])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, "from_config", lambda config: one)
    main.train(config, str(folder / "one"))
  return folder


@pytest.mark.parametrize("other", ["one", "plain"])
def test_names_of_axes_do_not_change_what_is_learned(runs, other):
  first, second = tiny.arrays(runs / "eight"), tiny.arrays(runs / other)
  assert list(first) == list(second)
  for name, value in first.items():
    np.testing.assert_allclose(value, second[name], rtol=1e-3, atol=1e-5)
  rows, expected = tiny.rows(runs / "eight"), tiny.rows(runs / other)
  assert list(rows) == list(expected) == [1, 2, 3, 4, 6]
  for step in (1, 2, 4, 6):
    assert rows[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4)
  for step in (3, 6):
    loss = expected[step]["val/loss"]
    assert rows[step]["val/loss"] == pytest.approx(loss, rel=1e-4)


def test_the_state_is_split_by_the_rules(runs):
  manifest = folders.read_manifest(folders.find(str(runs / "eight"), 6))
  split = {
    name: array.sharding["spec"]
    for name, array in manifest.arrays.items()
    if any(array.sharding["spec"])
  }
  # config.sharding would split the other dimension of the first kernel, and
  # nothing else.
  kernels = {"first/kernel": [None, "fsdp"], "head/kernel": ["fsdp", None]}
  assert split == {
    "mutable/running/mean": ["fsdp"],
    **{
      f"{part}/{name}": spec
      for part in ("params", "opt/0/mu", "opt/0/nu")
      for name, spec in kernels.items()
    },
  }


def test_the_trained_model_predicts(runs):
  images = np.ones((3, 8, 8, 1), np.float32)
  one, plain = (
    bigtrain.load(runs / name).run("logits", {"image": images})
    for name in ("one", "plain")
  )
  np.testing.assert_allclose(one, plain, rtol=1e-3, atol=1e-4)


def test_constraints_hold_in_every_thread(tiny_config):
  config = settings.Config(_config(tiny_config))
  _, model = building.model(config)
  image = np.zeros((8, 8, 8, 1), np.float32)
  variables = jax.eval_shape(
    lambda: initial.unboxed(model.init(jax.random.key(0), image))
  )

  def trace():
    with jax.set_mesh(sharding.make_mesh()):
      return str(jax.make_jaxpr(model.clone().apply)(variables, image))

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    assert "sharding_constraint" in pool.submit(trace).result()


def test_a_constraint_of_training_alone_needs_a_rule(tiny_config, tmp_path):
  changes = {"model": dict(num_classes=10, named=False, in_training=True)}
  config = tiny_config({"model_name": "tiny.axes"} | changes)
  with pytest.raises(ConfigError, match="rule for 'rows', an axis"):
    main.train(config, str(tmp_path))
