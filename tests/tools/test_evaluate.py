"""The tool that evaluates a checkpoint; test_modes.py compares its results."""

import shutil

import numpy as np

from bigtrain.tools import evaluate


def test_files_of_the_run_are_not_overwritten(picture_run, tmp_path):
  run = shutil.copytree(picture_run / "runs" / "mine", tmp_path / "run")
  own = run / "predictions" / "val-00000030.npz"
  content = own.read_bytes()
  changes = ("evals.val.num_examples=2",)
  assert evaluate.evaluate(str(run), changes=changes)["val/num_examples"] == 2
  assert own.read_bytes() == content
  new = run / "evaluate" / "predictions" / own.name
  assert len(np.load(new)["predictions"]) == 2
  new.unlink()
  words = [f"--workdir={run}", f"--output={tmp_path / 'out'}"]
  assert evaluate.main(words) == 0
  new = tmp_path / "out" / "predictions" / own.name
  np.testing.assert_allclose(
    np.load(new)["predictions"], np.load(own)["predictions"], rtol=1e-5
  )
  assert own.read_bytes() == content
  assert not (run / "evaluate" / "predictions" / own.name).exists()
