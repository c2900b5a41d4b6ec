"""`tools.checkpoint import`: what T5X and big_vision wrote becomes a run."""

import jax
import numpy as np
from jax.experimental.array_serialization import serialization

import bigtrain
from bigtrain import sharding
from bigtrain.checkpoints import folders
from bigtrain.checkpoints.foreign import jax_folders
from bigtrain.tools import checkpoint as tool
from bigtrain.tools import evaluate

CONFIG = """
def get_config():
  data = dict(type="arrays", path={data!r})
  return dict(
    total_steps=5,
    task="classification",
    input=dict(data=data, batch_size=8),
    model_name="vit",
    model=dict(
      num_classes=5, width=16, depth=2, mlp_dim=24, num_heads=2,
      patch_size=(4, 4), rep_size=True, pool_type="tok",
    ),
    optimizer=dict(name="sgd"),
    lr=0.1,
    evals=dict(val=dict(type="classification", pred="logits", data=data)),
  )
"""


def test_all_arrays_of_t5x_and_jax_reads_them(old_runs, tmp_path, capsys):
  out = str(tmp_path / "out")
  assert tool.main(["import", str(old_runs / "t5x"), out]) == 0
  assert "checkpoints/00001000: " in capsys.readouterr().out
  assert tool.main(["verify", out]) == 0
  given = jax_folders.open_folder(str(old_runs / "t5x/checkpoint_1000"))
  directory = folders.find(out)
  assert folders.read_manifest(directory).arrays.keys() == {
    *given.arrays,
    "step",
  }
  # The documented call: jax reads our arrays, under any sharding.
  names = [name for name in given.arrays if name.endswith("wi_0/kernel")]
  over = sharding.make_mesh(fsdp=-1)
  split = jax.sharding.NamedSharding(over, jax.P("fsdp"))
  arrays = serialization.run_deserialization(
    [split] * len(names),
    [
      serialization.get_tensorstore_spec(f"{directory}/{name}", driver="zarr3")
      for name in names
    ],
  )
  for name, array in zip(names, arrays):
    assert array.sharding == split
    np.testing.assert_array_equal(array, given.arrays[name][...])
  assert tool.main(["import", str(old_runs / "t5x"), out]) == 2
  assert "already has checkpoints" in capsys.readouterr().err


def test_a_model_of_big_vision_becomes_a_run(old_runs, tmp_path, capsys):
  golden = np.load(old_runs / "big_vision.npz")
  labels = golden["logits"].argmax(1).astype("int32")
  data = tmp_path / "data.npz"
  np.savez(
    data, image=np.tile(golden["image"], (4, 1, 1, 1)), labels=[*labels] * 4
  )
  config = tmp_path / "config.py"
  config.write_text(CONFIG.format(data=str(data)))
  out = str(tmp_path / "out")
  words = ["import", str(old_runs / "big_vision.bv"), out, f"--config={config}"]
  assert tool.main(words) == 0, capsys.readouterr().err
  results = evaluate.evaluate(out)
  assert results["step"] == 12 and results["val/acc"] == 1.0
  model = bigtrain.load(out)
  assert model.step == 12
  words[1] = str(old_runs / "t5x")
  words[2] = f"{out}2"
  assert tool.main(words) == 2
  assert "does not fit the model" in capsys.readouterr().err
