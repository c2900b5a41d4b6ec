"""Statistics of activations: equal to those by hand, however a model runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import net

from bigtrain import main, metrics
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import two_towers, vit
from bigtrain.models.published import conversions

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


def _by_hand(model, workdir, **inputs):
  """{(statistic, module): value} of everything that a module returns first."""
  arrays = tiny.arrays(workdir, 0)
  params = conversions.below("params/", arrays)
  _, variables = model.apply(
    {"params": trees.from_flat(params)},
    **inputs,
    capture_intermediates=True,
    mutable=True,
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


def _assert_close(got, expected):
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.fixture(scope="module")
def image(tiny_config):
  with np.load(tiny_config()["input"]["data"]["path"]) as data:
    return data["image"]


def test_statistics_equal_those_by_hand(image, tiny_config, tmp_path):
  changes = {"model_name": "tiny.net", "model": dict(num_classes=10)}
  main.train(
    tiny_config(_CHANGES | changes | {"total_steps": 1}), str(tmp_path)
  )
  got = _stats(tiny.rows(tmp_path)[1])
  _assert_close(got, _by_hand(net.Model(num_classes=10), tmp_path, image=image))


@pytest.mark.slow
def test_statistics_of_every_module_equal_those_by_hand(reference, image):
  workdir, rows = reference
  got = _stats(rows[1])
  assert len(got) == 4 * 34
  _assert_close(got, _by_hand(vit.Model(**_MODEL), workdir, image=image))
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
    _assert_close(got, expected)


_SPREAD = {"microbatches": 2, "mesh": dict(replica=2, fsdp=4)}


@pytest.mark.slow
def test_gsam_reports_the_unperturbed_parameters(
  reference, tiny_config, tmp_path
):
  gsam = dict(rho_max=0.5, alpha=0.5)
  rows = _run(tiny_config, tmp_path, gsam=gsam, **_SPREAD)
  expected = reference[1]
  _assert_close(_stats(rows[1]), _stats(expected[1]))
  assert _stats(rows[2])["mean", "model"] != pytest.approx(
    _stats(expected[2])["mean", "model"], rel=1e-3
  )


@pytest.mark.slow
def test_adapters_that_are_still_zero(reference, tiny_config, tmp_path):
  workdir, expected = reference
  adapters = dict(targets=".*/(query|Dense_0)/kernel", rank=2)
  init = dict(path=str(workdir), step=0)
  rows = _run(
    tiny_config, tmp_path, model_init=init, adapters=adapters, **_SPREAD
  )
  _assert_close(_stats(rows[1]), _stats(expected[1]))
  assert _stats(rows[2]) != _stats(rows[1])


@pytest.mark.slow
def test_flexivit_reports_the_size_of_the_step(image, tiny_config, tmp_path):
  sizes, model = (1, 4), dict(depth=1, seqhw=2, posemb_grid=2)
  flexi = dict(seqhw=dict(values=sizes))
  rows = _run(tiny_config, tmp_path, model, flexi=flexi, **_SPREAD)
  got, drawn = _stats(rows[1]), []
  for size in sizes:
    of_size = vit.Model(**_MODEL | model | dict(seqhw=size))
    expected = _by_hand(of_size, tmp_path, image=image)
    drawn.append(got["rms", "model"] == pytest.approx(expected["rms", "model"]))
    if drawn[-1]:
      _assert_close(got, expected)
  assert sum(drawn) == 1


@pytest.mark.slow
def test_contrastive_microbatches(image, tiny_config, tmp_path):
  labels = np.random.default_rng(0).integers(1, 9, (len(image), 5))
  np.savez(tmp_path / "texts.npz", image=image, labels=labels.astype(np.int32))
  sizes = dict(width=16, depth=1, mlp_dim=24, num_heads=2)
  model = dict(
    image=dict(sizes, patch_size=4, pool_type="tok"),
    text=dict(sizes, vocab_size=9),
    out_dim=8,
  )
  changes = {
    "task": "contrastive",
    "input.data.path": str(tmp_path / "texts.npz"),
    "model_name": "two_towers",
    "model": model,
  }
  config = tiny_config(_CHANGES | changes | _SPREAD)
  main.train(config, str(tmp_path / "run"))
  got = _stats(tiny.rows(tmp_path / "run")[1])
  towers = two_towers.Model(**model)
  expected = _by_hand(towers, tmp_path / "run", image=image, text=labels)
  _assert_close(got, expected)


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
    ConfigError,
    match=r"config.activation_stats: 'heads' matches no module.* mean 'head'",
  ):
    main.train(config, str(tmp_path))
