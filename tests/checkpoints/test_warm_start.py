import logging
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec
from saved_states import path_of

from bigtrain import sharding, trees
from bigtrain.checkpoints import checkpointer, warm_start
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError
from bigtrain.settings import ConfigError
from bigtrain.tools import checkpoint as tool

SHAPES = {
  "encoder/kernel": (8, 16),
  "encoder/bias": (16,),
  "pos_embedding": (1, 4, 8),
  "head/kernel": (16, 4),
}


def model(mesh_size=(2, 4), dtype=jnp.float32, **shapes):
  """ShapeDtypeStructs of a model's parameters."""
  mesh = sharding.make_mesh(*mesh_size)

  def spec(shape):
    spec = PartitionSpec("fsdp" if shape[0] % 8 == 0 else None)
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, spec)
    )

  flat = {name: spec(shape) for name, shape in (SHAPES | shapes).items()}
  return trees.from_flat(flat)


def arrays(prefix="", **shapes):
  """Values for them, by name."""
  rng = np.random.default_rng(0)
  return {
    prefix + name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in (SHAPES | shapes).items()
  }


def write_npz(path, flat):
  np.savez(path, **flat)
  return str(path)


def statuses(lines):
  return {line.name: line.status for line in lines}


def check(found, expected):
  flat = dict(trees.flatten_with_names(found))
  assert sorted(flat) == sorted(expected)
  for name, x in flat.items():
    np.testing.assert_array_equal(x, expected[name], name)


@pytest.fixture
def npz(tmp_path):
  return write_npz(tmp_path / "model.npz", arrays("params/"))


@pytest.fixture
def workdir(tmp_path):
  """A workdir whose checkpoints 1 and 2 have parameters, EMA and more."""
  workdir = str(tmp_path / "run")
  saver = checkpointer.Checkpointer(workdir)
  for step in (1, 2):
    params = jax.tree.map(
      lambda x, s, step=step: jax.device_put(x + step, s.sharding),
      trees.from_flat(arrays()),
      model((1, 8)),
    )
    ema = jax.tree.map(lambda x: (2 * x).astype(jnp.bfloat16), params)
    saver.save(step, {"params": params, "ema": ema, "step": jnp.int32(step)})
  saver.close()
  return workdir


@pytest.mark.parametrize("prefix", ["", "params/", "opt/target/"])
def test_npz_with_and_without_the_tree_around(tmp_path, prefix, caplog):
  flat = arrays(prefix)
  if prefix:  # What else the file holds is nobody's business.
    flat["step"] = np.int32(3)
  path = write_npz(tmp_path / "model.npz", flat)
  with caplog.at_level(logging.INFO):
    found, lines = warm_start.load_params(path, model())
  check(found, arrays())
  assert set(statuses(lines).values()) == {"loaded"}
  assert found["encoder"]["kernel"].sharding == (
    model()["encoder"]["kernel"].sharding
  )
  assert "encoder/kernel" in caplog.text and "4 loaded" in caplog.text


def test_a_checkpoint_of_another_mesh(workdir):
  for spec, step in (
    (workdir, 2),
    (f"{workdir}/checkpoints", 2),
    (path_of(workdir, 1), 1),
    ({"path": workdir, "step": 1}, 1),
  ):
    found, lines = warm_start.load_params(spec, model())
    check(found, {name: x + step for name, x in arrays().items()})
    assert set(statuses(lines).values()) == {"loaded"}
  found, lines = warm_start.load_params(
    {"path": workdir, "prefix": "ema"}, model()
  )
  ema = {
    name: (2 * (x + 2)).astype(ml_dtypes.bfloat16).astype(np.float32)
    for name, x in arrays().items()
  }
  check(found, ema)
  assert set(statuses(lines).values()) == {"cast"}


@pytest.mark.parametrize("kind", ["npz", "safetensors", "workdir"])
def test_mutable_collections_come_along(tmp_path, kind):
  stats = {"batch_stats/bn/mean": np.float32([1, 2, 3])}
  flat = arrays() | stats
  like = {
    **model(),
    "batch_stats": {"bn": {"mean": jax.ShapeDtypeStruct((3,), jnp.float32)}},
  }
  if kind == "workdir":  # As main has them in its state.
    path = str(tmp_path / "run")
    saver = checkpointer.Checkpointer(path)
    mutable = jax.tree.map(jnp.asarray, trees.from_flat(stats))
    params = jax.tree.map(jnp.asarray, trees.from_flat(arrays()))
    saver.save(1, {"params": params, "mutable": mutable, "step": jnp.int32(1)})
    saver.close()
  elif kind == "npz":
    path = write_npz(tmp_path / "model.npz", arrays("params/") | stats)
  else:
    path = str(tmp_path / "model.safetensors")
    mutable = {f"mutable/{name}": x for name, x in stats.items()}
    safetensors.numpy.save_file(arrays("params/") | mutable, path)
  found, lines = warm_start.load_params(path, like, collections=["batch_stats"])
  check(found, flat)
  assert statuses(lines)["batch_stats/bn/mean"] == "loaded"
  # A model without them does not see them.
  found, _ = warm_start.load_params(path, model())
  check(found, arrays())


def test_mutable_collections_that_a_file_lacks_are_told(npz):
  stats = {"bn": {"mean": jax.ShapeDtypeStruct((3,), jnp.float32)}}
  like = {**model(), "batch_stats": stats}
  options = dict(collections=["batch_stats"])
  with pytest.raises(ConfigError, match=r"missing +batch_stats/bn/mean"):
    warm_start.load_params(npz, like, **options)
  fresh = {**trees.from_flat(arrays()), "batch_stats": {"bn": {"mean": 7}}}
  spec = dict(path=npz, allow_missing=["batch_stats/.*"])
  found, _ = warm_start.load_params(spec, like, init=lambda: fresh, **options)
  assert found["batch_stats"]["bn"]["mean"] == 7


def test_only_the_parameters_have_to_be_whole(workdir):
  checkpoint_2 = path_of(workdir, 2)
  (tmp := open(f"{checkpoint_2}/ema/head/kernel/c.0.0", "w")).close()
  assert tmp.closed
  warm_start.load_params(workdir, model())
  with pytest.raises(DamagedError, match="ema/head/kernel"):
    warm_start.load_params({"path": workdir, "prefix": "ema"}, model())


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "ema"])
def test_what_the_tool_exports_is_loaded(workdir, tmp_path, kind, prefix):
  out = str(tmp_path / f"exported.{kind}")
  tool.export(workdir, out, prefix=prefix)
  spec = {"path": out, "prefix": prefix} if prefix else out
  found, _ = warm_start.load_params(spec, model())
  expected, _ = warm_start.load_params(
    {"path": workdir, "prefix": prefix or "params"}, model()
  )
  check(found, dict(trees.flatten_with_names(expected)))


def test_safetensors_and_bfloat16_in_npz(tmp_path):
  flat = {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays().items()}
  path = str(tmp_path / "model.safetensors")
  safetensors.numpy.save_file(flat, path)
  for file in (path, write_npz(tmp_path / "model.npz", flat)):
    found, lines = warm_start.load_params(file, model(dtype=jnp.bfloat16))
    check(found, flat)
    assert set(statuses(lines).values()) == {"loaded"}


def test_renames_drop_and_move_whole_names(tmp_path):
  flat = {f"img/{name}": x for name, x in arrays().items()}
  flat["txt/encoder/kernel"] = np.zeros(3)
  path = write_npz(tmp_path / "model.npz", flat)
  rename = [
    ("img/head/(.*)", r"head/\1"),
    ("img/(.+)", r"\1"),
    ("txt/.*", None),
  ]
  found, lines = warm_start.load_params(
    {"path": path, "rename": rename}, model()
  )
  check(found, arrays())
  assert statuses(lines)["txt/encoder/kernel"] == "dropped"

  def refused(rename, match):
    with pytest.raises(ConfigError, match=match):
      warm_start.load_params({"path": path, "rename": rename}, model())

  refused([("imgs/(.*)", r"\1")], r"model_init\.rename\[0\].*matches no")
  refused([("img/.*", "x")], "both 'img/.*' and 'img/.*' become 'x'")
  refused([("img/(.*)", r"\2")], "bad replacement")
  refused([("img/(.*", "x")], "bad regex")
  refused(["img"], "expected a list of")


def test_whatever_does_not_fit_is_listed_and_refused(tmp_path):
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


def test_what_is_allowed_keeps_its_fresh_values(tmp_path):
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
  found, lines = warm_start.load_params(spec, model(), init=lambda: fresh)
  expected = arrays()
  for name in ("head/kernel", "pos_embedding"):
    expected[name] = np.full(SHAPES[name], 7)
  expected |= {n: flat[n] for n in ("encoder/kernel", "encoder/bias")}
  check(found, expected)
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

  found, lines = warm_start.load_params(path, model(), convert=convert)
  expected = arrays()
  expected["pos_embedding"] = np.repeat(old["pos_embedding"], 4, axis=1)
  check(found, expected)
  assert statuses(lines) == {
    "encoder/kernel": "converted",
    "encoder/bias": "converted",
    "pos_embedding": "converted",
    "head/kernel": "loaded",
  }

  def never(flat, like):
    raise AssertionError("everything fits as it is")

  warm_start.load_params(npz, model(), convert=never)


class _Bomb:
  def __reduce__(self):
    return (print, ("pickle was read",))


def test_pickles_are_refused(tmp_path, capsys):
  flat = arrays()
  flat["encoder/bias"] = np.array([_Bomb()], dtype=object)
  path = write_npz(tmp_path / "objects.npz", flat)
  with pytest.raises(ConfigError, match="'encoder/bias' is refused"):
    warm_start.load_params(path, model())
  pickled = tmp_path / "pickled.npz"
  pickled.write_bytes(pickle.dumps(_Bomb()))
  with pytest.raises(ConfigError, match=r"pickled\.npz: cannot be read"):
    warm_start.load_params(str(pickled), model())
  assert "pickle was read" not in capsys.readouterr().out


def test_files_that_are_none(tmp_path, workdir, npz):
  def refused(spec, match, error=ConfigError):
    with pytest.raises(error, match=match):
      warm_start.load_params(spec, model())

  refused(str(tmp_path / "no.npz"), "config.model_init: no such file")
  refused(str(tmp_path / "no"), "config.model_init: no such file")
  refused({"path": workdir, "step": 7}, "no checkpoint of step 7; there are 1")
  refused({"path": npz, "step": 7}, r"model_init\.step: .* one state only")
  refused({"path": workdir, "prefix": "emma"}, "Did you mean 'ema'")
  refused({"path": npz, "allow_mising": []}, "Did you mean 'allow_missing'")
  refused({"step": 1}, r"model_init\.path: missing")
  refused({"path": npz, "allow_missing": "head"}, "expected a list")
  refused({"path": npz, "allow_missing": ["("]}, "bad regex")
  refused(3, "expected a path or a dict")
  (tmp_path / "cut.npz").write_bytes(open(npz, "rb").read()[:500])
  refused(str(tmp_path / "cut.npz"), r"cut\.npz: cannot be read")
  (tmp_path / "cut.safetensors").write_bytes(b"x" * 100)
  refused(str(tmp_path / "cut.safetensors"), "cannot be read")
  empty = tmp_path / "empty"
  empty.mkdir()
  refused(str(empty), "no checkpoint", CheckpointError)


def test_a_whole_state_from_elsewhere(workdir):
  like = {
    "params": model(),
    "ema": model(dtype=jnp.bfloat16),
    "step": jax.ShapeDtypeStruct(
      (), jnp.int32, sharding=sharding.replicated(sharding.make_mesh(2, 4))
    ),
  }
  state, told = warm_start.load_state({"path": workdir, "step": 1}, like)
  assert told.step == state["step"] == 1
  check(state["params"], {name: x + 1 for name, x in arrays().items()})
  del like["ema"]
  with pytest.raises(ConfigError, match="extra: ema/encoder/bias"):
    warm_start.load_state(workdir, like)
  with pytest.raises(ConfigError, match=r"config\.resume\.prefix: unknown key"):
    warm_start.load_state({"path": workdir, "prefix": "ema"}, like)
  with pytest.raises(ConfigError, match=r"config\.resume: no such file"):
    warm_start.load_state(workdir + "x", like)
