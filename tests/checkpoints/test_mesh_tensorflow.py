"""Checkpoints of Mesh TensorFlow's T5: transformers' logits, and mistakes."""

import shutil

import jax
import numpy as np
import pytest
from models.published import folders
from support import mesh_tensorflow, rounding

from bigtrain.checkpoints.foreign import jax_folders
from bigtrain.checkpoints.manifest import DamagedError
from bigtrain.config.errors import ConfigError

pytestmark = pytest.mark.golden

STEP = 1_000_000
UNUSED = "decoder/block_000/layer_001/EncDecAttention/relative_attention_bias"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
  """{layout: folder with a checkpoint of golden weights, as Google's}."""
  result = {}
  for layout in ("t5", "t5_1_1"):
    arrays = mesh_tensorflow.from_published(folders.arrays_of(layout))
    if layout == "t5_1_1":
      arrays = mesh_tensorflow.later_names(arrays)
    else:
      arrays[UNUSED] = np.zeros((3, 8), np.float32)
    moments = {f"{n}_slot_v": np.square(x) for n, x in arrays.items()}
    folder = result[layout] = tmp_path_factory.mktemp(layout)
    prefix = folder / f"model.ckpt-{STEP}"
    mesh_tensorflow.write(prefix, arrays | moments, STEP)
    state = f'model_checkpoint_path: "{prefix.name}"\n'
    (folder / "checkpoint").write_text(state)
  return result


@pytest.mark.parametrize(
  "layout, scan, name",
  [
    ("t5", False, ""),
    ("t5_1_1", False, f"model.ckpt-{STEP}"),
    ("t5_1_1", True, f"model.ckpt-{STEP}.index"),
  ],
)
def test_the_logits_of_transformers(released, layout, scan, name):
  golden = np.load(folders.GOLDEN / f"hf_{layout}" / "golden.npz")
  model = folders.model_of(layout, scan=scan)
  params = folders.load(layout, model, path=released[layout] / name)
  inputs = golden["inputs"], golden["targets"]
  run = jax.jit(lambda params: [model.apply({"params": params}, *inputs)[0]])
  rounding.assert_close(run, params, [golden["logits"]])


def test_all_variables_and_slots_with_their_step(released):
  path = str(released["t5"])
  folder = jax_folders.open_folder(jax_folders.find(path))
  assert folder.step == STEP
  name = "encoder/block_001/layer_000/SelfAttention/q"
  array, moment = (
    folder.arrays[n] for n in (f"target/{name}", f"state/param_states/{name}/v")
  )
  assert array.shape == (12, 15) and array.dtype == "float32"
  np.testing.assert_array_equal(array[2:5] ** 2, moment[...][2:5])


def test_other_steps_other_models_and_damage(released, tmp_path):
  model = folders.model_of("t5")
  with pytest.raises(ConfigError, match=f"step 7 at .*; there are {STEP}"):
    folders.load("t5", model, path=released["t5"], step=7)
  deeper = folders.model_of("t5", depth=3)
  name = "encoder/block_002/layer_000/SelfAttention/q"
  with pytest.raises(ConfigError, match=f"the file has no {name}"):
    folders.load("t5", deeper, path=released["t5"])
  shutil.copytree(released["t5"], tmp_path, dirs_exist_ok=True)
  (data,) = tmp_path.glob("*.data*")
  data.write_bytes(data.read_bytes()[:20_000])
  with pytest.raises(DamagedError, match=f"model.ckpt-{STEP}: "):
    folders.load("t5", model, path=tmp_path)
  (index,) = tmp_path.glob("*.index")
  index.write_bytes(b"")
  with pytest.raises(ConfigError, match="cannot be read: .*too short"):
    folders.load("t5", model, path=tmp_path)
