"""Checkpoints that big_vision and T5X wrote themselves; jax reads ours."""

import shutil

import jax
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import jax_folders
from bigtrain.checkpoints.manifest import DamagedError
from bigtrain.config.errors import ConfigError
from bigtrain.models import t5, vit

T5 = dict(
  vocab_size=24,
  width=8,
  num_heads=2,
  depth=2,
  decoder_depth=2,
  head_dim=3,
  mlp_dim=12,
  mlp="geglu",
  tied_head=False,
)
VIT = dict(
  num_classes=5, width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(4, 4)
)


def spec_of(model, *inputs):
  """Parameters of the model, split over all devices."""
  mesh = sharding.make_mesh(fsdp=-1)
  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
  rules = [(".*", "fsdp(min_size=1)")]
  return sharding.state_spec(shapes["params"], mesh, rules)


def arrays_of(path):
  return jax_folders.open_folder(jax_folders.find(str(path))).arrays


def load(source, spec, module):
  return warm_start.load_params(source, spec, convert=module.from_published)[0]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
  "where",
  ["t5x", "t5x/checkpoint_1000", "t5x_ocdbt", "t5x_zarr/checkpoint_1000"],
)
def test_a_checkpoint_of_t5x_gives_its_logits(old_runs, scan, where):
  if scan and where != "t5x":
    return
  golden = np.load(old_runs / "t5x.npz")
  inputs = golden["source"], golden["target"]
  model = t5.Model(**T5, scan=scan)
  params = load(str(old_runs / where), spec_of(model, *inputs), t5)
  logits, _ = jax.jit(model.apply)({"params": params}, *inputs)
  np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)


def test_stacked_layers_of_t5x(old_runs):
  """scalable_t5 stacks the layers along the second axis."""
  flat = jax_folders.open_folder(
    str(old_runs / "t5x" / "checkpoint_1000")
  ).arrays
  flat = {
    name.removeprefix("target/"): array[...]
    for name, array in flat.items()
    if name.startswith("target/")
  }
  stacked = {n: x for n, x in flat.items() if "/layers_" not in n}
  for name, array in flat.items():
    if "/layers_0/" in name:
      stack = name.split("/")[0]
      layers = [array, flat[name.replace("layers_0", "layers_1")]]
      stacked[name.replace("layers_0", stack)] = np.stack(layers, 1)
  model = t5.Model(**T5)
  like = dict(
    trees.flatten_with_names(
      spec_of(model, np.ones((1, 3), int), np.ones((1, 2), int))
    )
  )
  one, other = (t5.from_published(x, like) for x in (flat, stacked))
  assert one.keys() == other.keys() == like.keys()
  for name in like:
    np.testing.assert_array_equal(one[name][...], other[name][...])


@pytest.mark.parametrize("where", ["bv", "bv-000000012", "npz"])
def test_a_checkpoint_of_big_vision_gives_its_logits(old_runs, tmp_path, where):
  golden = np.load(old_runs / "big_vision.npz")
  path = old_runs / f"big_vision.{where}"
  if where == "npz":  # The older format of a single host: all in one file.
    folder = jax_folders.open_folder(str(old_runs / "big_vision.bv-000000012"))
    path = tmp_path / "checkpoint.npz"
    np.savez(path, **{name: x[...] for name, x in folder.arrays.items()})
  model = vit.Model(**VIT, rep_size=True, pool_type="tok")
  params = load(str(path), spec_of(model, golden["image"]), vit)
  logits, _ = model.apply({"params": params}, golden["image"])
  np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)


def test_all_arrays_of_a_state_with_their_step(old_runs):
  folder = jax_folders.open_folder(str(old_runs / "big_vision.bv-000000012"))
  assert folder.step == folder.arrays["opt/1/0/0/0"][()] == 12
  moment = folder.arrays["opt/1/0/2/1/head/kernel"]
  assert moment.dtype == "bfloat16" and moment.shape == (16, 5)
  np.testing.assert_array_equal(moment[2:4], moment[...][2:4])
  path = jax_folders.find(str(old_runs / "t5x"))
  folder = jax_folders.open_folder(path)
  assert folder.step == 1000
  # This array is in the msgpack file itself.
  scale = folder.arrays["target/encoder/encoder_norm/scale"]
  assert isinstance(scale, np.ndarray) and scale.shape == (8,)


@pytest.mark.parametrize("name", ["t5x_ocdbt", "t5x_zarr"])
def test_all_arrays_that_t5x_wrote_through_orbax(old_runs, name):
  expected = jax_folders.open_folder(
    jax_folders.find(str(old_runs / "t5x"))
  ).arrays
  folder = jax_folders.open_folder(jax_folders.find(str(old_runs / name)))
  assert folder.step == 1000
  # To keep the archive small, they have no moments.
  assert folder.arrays.keys() == {
    n for n in expected if "param_states" not in n
  }
  for name, array in folder.arrays.items():
    np.testing.assert_array_equal(array[...], expected[name][...], strict=True)


def test_other_steps_missing_files_and_damage(old_runs, tmp_path):
  model = vit.Model(**VIT, rep_size=True, pool_type="tok")
  spec = spec_of(model, np.zeros((1, 8, 8, 3), "float32"))
  path = str(old_runs / "big_vision.bv")
  assert load(dict(path=path, step=12), spec, vit)
  with pytest.raises(ConfigError, match="no checkpoint of step 13 .* are 12"):
    load(dict(path=path, step=13), spec, vit)
  with pytest.raises(ConfigError, match="no checkpoint of step 7"):
    load(dict(path=str(old_runs / "t5x"), step=7), spec, vit)
  with pytest.raises(ConfigError, match="no checkpoint of step 7 .* are 1000"):
    load(dict(path=str(old_runs / "t5x_ocdbt"), step=7), spec, vit)
  database = tmp_path / "checkpoint_5"
  shutil.copytree(old_runs / "t5x_ocdbt" / "checkpoint_1000", database)
  shutil.rmtree(database / "state" / "d")
  with pytest.raises((ValueError, DamagedError), match="NOT_FOUND"):
    for array in jax_folders.open_folder(str(database)).arrays.values():
      array[...]
  copy = tmp_path / "copy.bv-000000012"
  shutil.copytree(f"{path}-000000012", copy)
  (copy / "params~head~kernel" / "0.0").unlink()
  with pytest.raises(DamagedError, match="params~head~kernel"):
    load(str(copy), spec, vit)
