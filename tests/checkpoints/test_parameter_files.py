import logging
import os
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints.parameters import (
  arrays,
  check,
  model,
  statuses,
  write_npz,
  write_workdir,
)
from support.saved_states import path_of

from bigtrain.arrays import trees
from bigtrain.checkpoints import checkpointer, warm_start
from bigtrain.checkpoints.foreign import parameter_files, safetensors_files
from bigtrain.checkpoints.manifest import DamagedError
from bigtrain.config.errors import ConfigError
from bigtrain.tools import checkpoint_export


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_safetensors_files_have_the_mode_of_other_files(tmp_path, umask):
  path = tmp_path / "model.safetensors"
  before = os.umask(umask)
  try:
    safetensors_files.write(
      str(path), {"x": ((2,), "float32")}, [np.zeros(2, np.float32)], {}
    )
    assert os.umask(umask) == umask
  finally:
    os.umask(before)
  assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.fixture
def npz(tmp_path):
  return write_npz(tmp_path / "model.npz", arrays("params/"))


@pytest.fixture
def workdir(tmp_path):
  return write_workdir(tmp_path / "run")


@pytest.mark.parametrize("prefix", ["", "params/", "opt/target/"])
def test_the_tree_of_the_parameters_is_detected(tmp_path, prefix, caplog):
  flat = arrays(prefix)
  if prefix:  # Arrays outside of the tree are ignored.
    flat["step"] = np.int32(3)
  path = write_npz(tmp_path / "model.npz", flat)
  with caplog.at_level(logging.INFO):
    params, lines = warm_start.load_params(path, model())
  check(params, arrays())
  assert set(statuses(lines).values()) == {"loaded"}
  assert params["encoder"]["kernel"].sharding == (
    model()["encoder"]["kernel"].sharding
  )
  assert "encoder/kernel" in caplog.text and "4 loaded" in caplog.text


@pytest.mark.parametrize("kind", ["npz", "safetensors", "workdir"])
def test_mutable_collections_are_read_too(tmp_path, kind):
  stats = {"batch_stats/bn/mean": np.float32([1, 2, 3])}
  flat = arrays() | stats
  like = {
    **model(),
    "batch_stats": {"bn": {"mean": jax.ShapeDtypeStruct((3,), jnp.float32)}},
  }
  if kind == "workdir":  # As in main's state.
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
  variables, lines = warm_start.load_params(
    path, like, collections=["batch_stats"]
  )
  check(variables, flat)
  assert statuses(lines)["batch_stats/bn/mean"] == "loaded"
  # A model without the collection does not read it.
  params, _ = warm_start.load_params(path, model())
  check(params, arrays())


def test_damage_outside_of_the_tree_does_not_matter(workdir):
  checkpoint_2 = path_of(workdir, 2)
  (tmp := open(f"{checkpoint_2}/ema/head/kernel/c.0.0", "w")).close()
  assert tmp.closed
  warm_start.load_params(workdir, model())
  with pytest.raises(DamagedError, match="ema/head/kernel"):
    warm_start.load_params({"path": workdir, "prefix": "ema"}, model())


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "ema"])
def test_exports_of_the_tool_are_read(workdir, tmp_path, kind, prefix):
  out = str(tmp_path / f"exported.{kind}")
  checkpoint_export.to_file(workdir, out, prefix=prefix)
  spec = {"path": out, "prefix": prefix} if prefix else out
  params, _ = warm_start.load_params(spec, model())
  expected, _ = warm_start.load_params(
    {"path": workdir, "prefix": prefix or "params"}, model()
  )
  check(params, dict(trees.flatten_with_names(expected)))


def test_bfloat16_in_safetensors_and_npz(tmp_path):
  flat = {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays().items()}
  path = str(tmp_path / "model.safetensors")
  safetensors.numpy.save_file(flat, path)
  for file in (path, write_npz(tmp_path / "model.npz", flat)):
    params, lines = warm_start.load_params(file, model(dtype=jnp.bfloat16))
    check(params, flat)
    assert set(statuses(lines).values()) == {"loaded"}


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


def test_missing_and_broken_files_are_refused(tmp_path, workdir, npz):
  def refused(spec, match):
    with pytest.raises(ConfigError, match=match):
      warm_start.load_params(spec, model())

  refused(str(tmp_path / "no.npz"), "config.model_init: no such file")
  refused(str(tmp_path / "no"), "config.model_init: no such file")
  refused({"path": workdir, "step": 7}, "no checkpoint of step 7; there are 1")
  refused({"path": npz, "step": 7}, r"model_init\.step=7: .* one state only")
  refused({"path": workdir, "prefix": "emma"}, "Did you mean 'ema'")
  (tmp_path / "cut.npz").write_bytes(open(npz, "rb").read()[:500])
  refused(str(tmp_path / "cut.npz"), r"cut\.npz: cannot be read")
  (tmp_path / "cut.safetensors").write_bytes(b"x" * 100)
  refused(str(tmp_path / "cut.safetensors"), "cannot be read")
  empty = tmp_path / "empty"
  empty.mkdir()
  refused(str(empty), r"config\.model_init: .*/empty: neither a workdir nor a")


def test_pickled_tensors_are_refused_with_what_to_do(tmp_path):
  file = tmp_path / "deit_3_small_224_21k.pth"
  file.write_bytes(b"PK")
  with pytest.raises(ConfigError, match=r"\.pth: expected .* PyTorch's \.pth"):
    parameter_files.open_file(str(file), step=None, prefix=None, key="x")
