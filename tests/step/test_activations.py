"""Statistics of activations: equal to those by hand, however a model runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from bigtrain import main, metrics, settings, trees
from bigtrain.models import vit

_SIZES = dict(patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2)
_MODEL = dict(num_classes=10, head_zeroinit=False, **_SIZES)
# All of the data in one batch, so that its order is of no importance.
_CHANGES = {
  "evals": {},
  "total_steps": 2,
  "log_steps": 2,
  "ckpt_steps": 2,
  "save_at_start": True,
  # Adam would make updates of the rounding in gradients of keys' biases.
  "optimizer": dict(name="sgd"),
  "weight_stats": "none",
  "schedule": dict(decay_type="constant"),
  "input.batch_size": tiny.NUM_TRAIN,
  "model_name": "vit",
  "activation_stats": ".*",
}
_NAME = re.compile(r"activation_(mean|rms|max|nonfinite)/(.*)")


def _run(tiny_config, workdir, model=(), **changes):
  model = _MODEL | dict(model)
  config = tiny_config(_CHANGES | {"model": model} | changes)
  main.train(config, str(workdir))
  return tiny.rows(workdir)


def _stats(row):
  named = {_NAME.fullmatch(name): x for name, x in row.items()}
  return {(m[1], m[2]): x for m, x in named.items() if m}


def _unrolled(name):
  """The name of a scanned layer's module, as without scan."""
  path, _, layer = name.rpartition("/")
  if not layer.isdigit():
    return name
  return path.replace("encoderblock", f"encoderblock_{layer}")


@pytest.fixture(scope="module")
def reference(tiny_config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("one")
  return workdir, _run(tiny_config, workdir)


def _by_hand(params, image):
  """{(statistic, module): value} of everything that a module returns first."""
  model = vit.Model(**_MODEL)
  _, variables = model.apply(
    {"params": params}, image, capture_intermediates=True, mutable=True
  )
  expected = {}
  for name, x in trees.flatten_with_names(variables["intermediates"]):
    module, _, rest = f"/{name}".partition("/__call__/")
    if rest not in ("0", "0/0"):
      continue
    x, module = np.asarray(x, np.float64), module[1:] or "model"
    expected["mean", module] = x.mean()
    expected["rms", module] = np.sqrt((x**2).mean())
    expected["max", module] = np.abs(x).max()
    expected["nonfinite", module] = 0.0
  return expected


def test_statistics_of_every_module_equal_those_by_hand(reference, tiny_config):
  workdir, rows = reference
  arrays = tiny.arrays(workdir, 0)
  params = {
    name.removeprefix("params/"): x
    for name, x in arrays.items()
    if name.startswith("params/")
  }
  with np.load(tiny_config()["input"]["data"]["path"]) as data:
    expected = _by_hand(trees.from_flat(params), data["image"])
  got = _stats(rows[1])
  assert got.keys() == expected.keys()
  assert len(got) == 4 * 34
  for name, value in expected.items():
    assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
  # Those of the row's own step alone.
  assert _stats(rows[2]) != got


_VARIANTS = {
  "scan": (dict(scan=True), {}),
  "remat": (dict(remat_policy="nothing_saveable"), {}),
  "scan, remat of every second, microbatches": (
    dict(scan=True, remat_policy="nothing_saveable(every=2)"),
    {"microbatches": 2},
  ),
  "scan, devices, microbatches": (
    dict(scan=True, remat_policy="dots_saveable"),
    {"mesh": dict(replica=2, fsdp=2, tensor=2), "microbatches": 2},
  ),
  "pipeline": (
    dict(scan=True),
    {"mesh": dict(replica=2, fsdp=1, tensor=2, pipeline=2)},
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _VARIANTS)
def test_the_same_however_the_model_runs(
  reference, tiny_config, tmp_path, name
):
  model, changes = _VARIANTS[name]
  rows = _run(tiny_config, tmp_path, model, **changes)
  for step, expected in reference[1].items():
    expected = _stats(expected)
    got = {(s, _unrolled(n)): x for (s, n), x in _stats(rows[step]).items()}
    assert got.keys() == expected.keys()
    for key, value in expected.items():
      assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key


def test_the_share_that_is_not_finite_and_the_others():
  x = np.array([[3.0, np.nan, -4.0], [np.inf, -np.inf, 0.0]], np.float32)
  of = metrics.ArrayStats.of
  both = of(jnp.asarray(x)).merge(of(jnp.full(2, 6.0)))
  stats = metrics.ArrayStats(both.sums[None], both.largest[None], ("Dense_0",))
  rms = np.sqrt((9 + 16 + 36 + 36) / 5)
  assert metrics.host_values([{"activation": stats}]) == {
    "activation_mean/Dense_0": pytest.approx(11 / 5),
    "activation_rms/Dense_0": pytest.approx(rms),
    "activation_max/Dense_0": 6.0,
    "activation_nonfinite/Dense_0": 3 / 8,
  }


@pytest.mark.slow
def test_without_the_key_the_step_is_the_same(tiny_config, tmp_path):
  def text(**changes):
    config = tiny_config({"evals": {}} | changes)
    lowered = lambda run, update_fn, specs, _: (
      jax.jit(update_fn).lower(*specs).as_text()
    )
    return main.train(config, str(tmp_path), on_update=lowered)

  assert text() == text(activation_stats="")
  assert text() != text(activation_stats=".*")


def test_a_pattern_without_modules_is_an_error(tiny_config, tmp_path):
  config = tiny_config({"activation_stats": "heads"})
  with pytest.raises(
    settings.ConfigError,
    match=r"config.activation_stats: 'heads' matches no module.* mean 'head'",
  ):
    main.train(config, str(tmp_path))
