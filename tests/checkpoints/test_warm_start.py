import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints.parameters import (
  SHAPES,
  arrays,
  check,
  model,
  statuses,
  write_npz,
  write_workdir,
)
from support.saved_states import path_of

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.config.errors import ConfigError


@pytest.fixture
def npz(tmp_path):
  return write_npz(tmp_path / "model.npz", arrays("params/"))


@pytest.fixture
def workdir(tmp_path):
  return write_workdir(tmp_path / "run")


def test_a_checkpoint_of_another_mesh(workdir):
  for spec, step in (
    (workdir, 2),
    (f"{workdir}/checkpoints", 2),
    (path_of(workdir, 1), 1),
    ({"path": workdir, "step": 1}, 1),
  ):
    params, lines = warm_start.load_params(spec, model())
    check(params, {name: x + step for name, x in arrays().items()})
    assert set(statuses(lines).values()) == {"loaded"}
  params, lines = warm_start.load_params(
    {"path": workdir, "prefix": "ema"}, model()
  )
  ema = {
    name: (2 * (x + 2)).astype(ml_dtypes.bfloat16).astype(np.float32)
    for name, x in arrays().items()
  }
  check(params, ema)
  assert set(statuses(lines).values()) == {"cast"}


def test_missing_mutable_collections_must_be_allowed(npz):
  stats = {"bn": {"mean": jax.ShapeDtypeStruct((3,), jnp.float32)}}
  like = {**model(), "batch_stats": stats}
  options = dict(collections=["batch_stats"])
  with pytest.raises(ConfigError, match=r"missing +batch_stats/bn/mean"):
    warm_start.load_params(npz, like, **options)
  fresh = {**trees.from_flat(arrays()), "batch_stats": {"bn": {"mean": 7}}}
  spec = dict(path=npz, allow_missing=["batch_stats/.*"])
  loaded, _ = warm_start.load_params(spec, like, init=lambda: fresh, **options)
  assert loaded["batch_stats"]["bn"]["mean"] == 7


def test_renames_move_or_drop_full_names(tmp_path):
  flat = {f"img/{name}": x for name, x in arrays().items()}
  flat["txt/encoder/kernel"] = np.zeros(3)
  path = write_npz(tmp_path / "model.npz", flat)
  rename = [
    ("img/head/(.*)", r"head/\1"),
    ("img/(.+)", r"\1"),
    ("txt/.*", None),
  ]
  params, lines = warm_start.load_params(
    {"path": path, "rename": rename}, model()
  )
  check(params, arrays())
  assert statuses(lines)["txt/encoder/kernel"] == "dropped"

  def refused(rename, match):
    with pytest.raises(ConfigError, match=match):
      warm_start.load_params({"path": path, "rename": rename}, model())

  refused([("imgs/(.*)", r"\1")], r"model_init\.rename\[0\].*matches no")
  refused([("img/.*", "x")], "both 'img/.*' and 'img/.*' become 'x'")
  refused([("img/(.*)", r"\2")], "bad replacement")
  refused([("img/(.*", "x")], "bad regex")
  refused(["img"], "expected a list of")


def test_arrays_that_do_not_fit_are_listed_and_refused(tmp_path):
  flat = arrays(**{"head/kernel": (16, 10), "pos_embedding": (1, 9, 8)})
  flat["extra/scale"] = np.zeros(2)
  flat["encoder/bias"] = np.zeros(16, np.int32)
  del flat["encoder/kernel"]
  path = write_npz(tmp_path / "model.npz", flat)
  with pytest.raises(ConfigError) as e:
    warm_start.load_params(path, model())
  text = str(e.value)
  for status, name, what in (
    ("missing", "encoder/kernel", "expected float32[8,16]"),
    ("retyped", "encoder/bias", "expected float32[16], found int32[16]"),
    ("reshaped", "head/kernel", "found float32[16,10]"),
    ("reshaped", "pos_embedding", "found float32[1,9,8]"),
    ("unused", "extra/scale", "found float64[2]"),
  ):
    (line,) = [line for line in text.splitlines() if f" {name} " in line]
    assert line.split()[0] == status and what in line
  last = text.splitlines()[-1]
  assert last.startswith("config.model_init: ") and "5 array(s)" in last
  assert "config.model_init.allow_missing" in last


def test_allowed_arrays_keep_their_fresh_values(tmp_path):
  flat = arrays(**{"head/kernel": (16, 10)})
  flat["extra/scale"] = np.zeros(2)
  del flat["pos_embedding"]
  spec = {
    "path": write_npz(tmp_path / "model.npz", flat),
    "allow_missing": ["pos_embedding", "head/.*"],
    "allow_reshaped": ["head/.*"],
    "allow_unused": ["extra/.*"],
  }
  fresh = jax.tree.map(
    lambda x: jax.device_put(np.full(x.shape, 7, x.dtype), x.sharding), model()
  )
  params, lines = warm_start.load_params(spec, model(), init=lambda: fresh)
  expected = arrays()
  for name in ("head/kernel", "pos_embedding"):
    expected[name] = np.full(SHAPES[name], 7)
  expected |= {n: flat[n] for n in ("encoder/kernel", "encoder/bias")}
  check(params, expected)
  assert statuses(lines) == {
    "encoder/kernel": "loaded",
    "encoder/bias": "loaded",
    "pos_embedding": "missing",
    "head/kernel": "reshaped",
    "extra/scale": "unused",
  }
  for key in ("allow_missing", "allow_reshaped", "allow_unused"):
    with pytest.raises(ConfigError, match=f"model_init.{key}"):
      warm_start.load_params({**spec, key: []}, model(), init=lambda: fresh)


def test_a_models_own_conversion(tmp_path, npz):
  old = {name.replace("encoder", "Encoder"): x for name, x in arrays().items()}
  old["pos_embedding"] = old["pos_embedding"][:, :1]
  path = write_npz(tmp_path / "old.npz", old)

  def convert(flat, like):
    assert like["pos_embedding"].shape == (1, 4, 8)
    flat = {name.replace("Encoder", "encoder"): x for name, x in flat.items()}
    flat["pos_embedding"] = np.repeat(flat["pos_embedding"], 4, axis=1)
    return flat

  params, lines = warm_start.load_params(path, model(), convert=convert)
  expected = arrays()
  expected["pos_embedding"] = np.repeat(old["pos_embedding"], 4, axis=1)
  check(params, expected)
  assert statuses(lines) == {
    "encoder/kernel": "converted",
    "encoder/bias": "converted",
    "pos_embedding": "converted",
    "head/kernel": "loaded",
  }

  def never(flat, like):
    raise AssertionError("called although everything fits")

  warm_start.load_params(npz, model(), convert=never)


def test_wrong_options_are_refused(npz):
  def refused(spec, match):
    with pytest.raises(ConfigError, match=match):
      warm_start.load_params(spec, model())

  refused({"path": npz, "allow_mising": []}, "Did you mean 'allow_missing'")
  refused({"step": 1}, r"model_init\.path: missing")
  refused({"path": npz, "allow_missing": "head"}, "expected a list")
  refused({"path": npz, "allow_missing": ["("]}, "bad regex")
  refused(3, "expected a path or a dict")


def test_the_full_state_of_another_run(workdir):
  like = {
    "params": model(),
    "ema": model(dtype=jnp.bfloat16),
    "step": jax.ShapeDtypeStruct(
      (), jnp.int32, sharding=sharding.replicated(sharding.make_mesh(2, 4))
    ),
  }
  state, manifest = warm_start.load_state({"path": workdir, "step": 1}, like)
  assert manifest.step == state["step"] == 1
  check(state["params"], {name: x + 1 for name, x in arrays().items()})
  del like["ema"]
  with pytest.raises(ConfigError, match="extra: ema/encoder/bias"):
    warm_start.load_state(workdir, like)
  with pytest.raises(ConfigError, match=r"config\.resume\.prefix: unknown key"):
    warm_start.load_state({"path": workdir, "prefix": "ema"}, like)
  with pytest.raises(ConfigError, match=r"config\.resume: no such file"):
    warm_start.load_state(workdir + "x", like)


def test_options_of_a_models_own_conversion(tmp_path):
  old = arrays()
  old["pos_embedding"] = old["pos_embedding"][:, :1]
  path = write_npz(tmp_path / "old.npz", old)

  def convert(flat, like, *, times=1):
    return {**flat, "pos_embedding": np.repeat(flat["pos_embedding"], times, 1)}

  spec = dict(path=path, convert=dict(times=4))
  params, _ = warm_start.load_params(spec, model(), convert=convert)
  assert params["pos_embedding"].shape == (1, 4, 8)
  spec = dict(path=path, convert=dict(time=4))
  message = r"model_init\.convert\.time: unknown key. Did you mean 'times'"
  with pytest.raises(ConfigError, match=message):
    warm_start.load_params(spec, model(), convert=convert)
