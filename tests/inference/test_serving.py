"""Exports for serving, called in a process that has jax alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
from jax import export
from support import processes
from support.saved_models import TOWER, saved

import bigtrain
from bigtrain.inference import serving
from bigtrain.tools import checkpoint

_SERVE = """
import json, sys
import numpy as np
import jax
from jax import export
with open(sys.argv[1], "rb") as file:
  exported = export.deserialize(file.read())
outputs = exported.call({"image": np.load(sys.argv[2])})
np.save(sys.argv[3], outputs)
ours = [n for n in sys.modules if n.startswith(("bigtrain", "flax"))]
print(json.dumps(ours))
"""


def test_jax_alone_runs_an_export(picture_run, tmp_path, capsys):
  run = str(picture_run / "runs" / "mine")
  out, images, results = (
    str(tmp_path / name) for name in ("m.stablehlo", "x.npy", "y.npy")
  )
  assert checkpoint.main(["export", run, out, "--format=stablehlo"]) == 0
  assert f"{out}: 4 arrays" in capsys.readouterr().out
  image = np.random.default_rng(0).normal(size=(3, 6, 6, 3)).astype(np.float32)
  np.save(images, image)
  done = subprocess.run(
    [sys.executable, "-c", _SERVE, out, images, results],
    env=processes.environment(1, PYTHONPATH=""),
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert [n for n in json.loads(done.stdout) if "finder" not in n] == []
  expected = bigtrain.load(run).run("logits", {"image": image})
  np.testing.assert_allclose(np.load(results), expected, rtol=1e-4, atol=1e-5)
  with open(f"{out}.json") as file:
    about = json.load(file)
  assert about == {
    "step": 30,
    "pred": "logits",
    "options": {},
    "inputs": {"image": {"dtype": "float32", "shape": ["b", 6, 6, 3]}},
    "outputs": {"output": {"dtype": "float32", "shape": ["b", 3]}},
    "platforms": ["cpu", "cuda", "tpu"],
    "class_names": ["cat", "dog", "owl"],
    "pp": "decode|resize(6)|value_range(-1,1)",
  }


def test_onnx_runtime_runs_an_export(picture_run, tmp_path):
  runtime = pytest.importorskip("onnxruntime", reason="needs bigtrain[onnx]")
  pytest.importorskip("jax2onnx", reason="needs bigtrain[onnx]")
  run = str(picture_run / "runs" / "mine")
  out = str(tmp_path / "m.onnx")
  assert checkpoint.main(["export", run, out, "--format=onnx"]) == 0
  image = np.random.default_rng(0).normal(size=(3, 6, 6, 3)).astype(np.float32)
  session = runtime.InferenceSession(out)
  (actual,) = session.run(None, {"image": image})
  expected = bigtrain.load(run).run("logits", {"image": image})
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
  with open(f"{out}.json") as file:
    about = json.load(file)
  assert about["inputs"]["image"]["shape"] == ["b", 6, 6, 3]
  assert "platforms" not in about


def test_onnx_without_the_package(picture_run, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "jax2onnx", None)
  run, out = str(picture_run / "runs" / "mine"), str(tmp_path / "m.onnx")
  assert checkpoint.main(["export", run, out, "--format=onnx"]) == 2
  error = capsys.readouterr().err
  assert "pip install 'bigtrain[onnx]'" in error


@pytest.mark.parametrize(
  "words, message",
  [
    (["--pred=logit"], "mean 'logits'"),
    (["--platforms=cpu,tpuu"], "mean 'tpu'"),
    (["--prefix=opt"], "expected params or ema as --prefix, got 'opt'"),
    (["--prefix=ema"], "weights='ema': not in the checkpoint"),
    (["--batch_size=0"], "expected a whole number at least 1"),
  ],
)
def test_mistakes_give_a_one_line_error(
  picture_run, tmp_path, capsys, words, message
):
  run, out = str(picture_run / "runs" / "mine"), str(tmp_path / "x")
  assert (
    checkpoint.main(["export", run, out, "--format=stablehlo", *words]) == 2
  )
  assert message in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_any_batch_size_of_transformers(tmp_path):
  t5 = dict(width=8, depth=1, num_heads=2, mlp_dim=8, vocab_size=30)
  configs = {
    "vit": (
      dict(
        task="classification",
        model_name="vit",
        model=dict(num_classes=2, patch_size=4, **TOWER),
      ),
      dict(image=((8, 8, 3), "float32")),
    ),
    "t5": (
      dict(task="seq2seq", model_name="t5", model=dict(variant="t5_1_1", **t5)),
      dict(inputs=((9,), "int32"), targets=((5,), "int32")),
    ),
  }
  for name, (config, features) in configs.items():
    reference = saved(tmp_path / name, config, **features)
    out = str(tmp_path / f"{name}.stablehlo")
    serving.export(str(tmp_path / name), out, pred="logits")
    with open(out, "rb") as file:
      exported = export.deserialize(file.read())
    for size in (1, 3):
      rng = np.random.default_rng(size)
      batch = {
        name: rng.integers(1, 30, size=(size, *shape)).astype(dtype)
        for name, (shape, dtype) in features.items()
      }
      np.testing.assert_allclose(
        exported.call(batch), reference("logits", batch), rtol=1e-3, atol=1e-5
      )
