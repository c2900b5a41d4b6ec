"""Samples in pictures and files, and judged by the model of another run."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from evaluators import test_fid
from tiny import evaluating

from bigtrain import main, sharding
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import generated
from bigtrain.evaluators import samples as sheets
from bigtrain.tools import sample

PIXELS = np.random.default_rng(0).uniform(-1, 1, (30, 8, 8, 1))
PIXELS = np.float32(np.round((PIXELS + 1) / 2 * 255) / 255 * 2 - 1)


def predict(variables, batch):
  """Sample i is image i of PIXELS."""
  return jnp.asarray(PIXELS)[batch["_index"]] * variables["scale"]


VARIABLES = {"scale": jnp.float32(1.0)}


@pytest.mark.parametrize("mesh, number", [((2, 4), 13), ((1, 8), 30)])
def test_samples_are_in_order_whatever_the_mesh(mesh, number):
  context = evaluating.context(mesh=sharding.make_mesh(*mesh), batch_size=8)
  made = generated.Generated(predict, context, number)
  assert made.num_batches == -(-number // 8)
  np.testing.assert_array_equal(made.on_host(VARIABLES), PIXELS[:number])


def test_a_sheet_and_files_of_samples(tmp_path):
  context = evaluating.context(workdir=str(tmp_path), name="s")
  evaluator = evaluating.build(
    "samples", predict, context, num_samples=5, columns=3, zoom=2, files=True
  )
  results = evaluator.run(VARIABLES, 7)
  pixels = results["samples"].uint8()
  assert pixels.shape == (2 * 18, 3 * 18, 1)  # With a line beside each.
  expected = np.round((PIXELS[4] + 1) / 2 * 255)
  np.testing.assert_array_equal(pixels[18:34, 18:34][::2, ::2], expected)
  assert not pixels[18:, 36:].any()
  files = sorted((tmp_path / "samples/s-00000007").iterdir())
  assert [file.name for file in files] == [f"{i:06d}.png" for i in range(5)]
  assert sheets.sheet(PIXELS[:2], 10).shape == (9, 18, 1)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
  """A small classifier of digits."""
  folder = tmp_path_factory.mktemp("judge")
  data = dict(type="arrays", name="digits")
  pp = "value_range(-1,1,0,16)|copy('label','labels')|keep('image','labels')"
  model = dict(patch_size=4, width=16, depth=1, num_heads=2, num_classes=10)
  config = dict(
    task="classification",
    model_name="vit",
    model=model | dict(head_zeroinit=False),
    input=dict(data=dict(**data, split="train"), pp=pp, batch_size=16),
    optimizer=dict(name="sgd"),
    lr=0.1,
    total_steps=1,
  )
  main.train(config, str(folder))
  return str(folder)


def test_fid_of_samples_is_that_of_the_models_features(judge):
  data = dict(type="arrays", arrays=dict(image=PIXELS[:21] ** 3))
  context = evaluating.context(mesh=sharding.make_mesh(2, 4), batch_size=8)
  options = dict(path=judge, pred_kw=dict(layer="encoded", pool=True))
  evaluator = evaluating.build(
    "sample_fid", predict, context, data=data, num_samples=13, model=options
  )
  results = [evaluator.run(VARIABLES, step)["fid"] for step in (1, 2)]
  look = lambda x: np.asarray(evaluator._model(jnp.asarray(x)))
  ours, theirs = look(PIXELS[:13]), look(PIXELS[:21] ** 3)
  assert results[0] == pytest.approx(test_fid.expected(ours, theirs), rel=1e-3)
  assert results[0] == results[1] > 0
  # The model's own features, of images with the levels of files.
  assert ours.shape == (13, 16)
  wild = evaluator.run({"scale": jnp.float32(np.nan)}, 3)
  assert np.isnan(wild["fid"]) and wild["nonfinite"] == 13


def test_accuracy_of_samples_is_that_of_the_classifier(judge):
  context = evaluating.context(batch_size=8)
  evaluator = evaluating.build(
    "sample_accuracy",
    predict,
    context,
    num_samples=30,
    num_classes=10,
    model=dict(path=judge),
  )
  results = evaluator.run(VARIABLES, 1)
  logits = np.asarray(evaluator._model(jnp.asarray(PIXELS)))
  right = (logits.argmax(1) == np.arange(30) % 10).reshape(3, 10)
  assert results["acc"] == pytest.approx(right.mean())
  assert results["acc_worst_class"] == right.mean(0).min()


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(path="nowhere"), "config.evals.val.model.path: .*nowhere"),
    (dict(pred="caption"), "config.evals.val.model.pred: .*'caption'"),
    (dict(sizes=3), "config.evals.val.model.sizes: unknown key. Did you mean"),
    (dict(pred_kw=dict(lair="x")), "config.evals.val.model.pred_kw.lair: unk"),
  ],
)
def test_mistakes_have_their_line(judge, options, message):
  with pytest.raises(ConfigError, match=message):
    evaluating.build(
      "sample_accuracy",
      predict,
      num_classes=10,
      model=dict(path=judge) | options,
    )


@pytest.mark.slow
def test_a_tool_writes_samples_of_a_run(tiny_config, tmp_path, capsys):
  model = dict(image_size=8, channels=1, num_classes=10, patch_size=4, width=16)
  config = tiny_config(
    {
      "task": "flow_matching",
      "model_name": "dit",
      "model": model | dict(depth=1, num_heads=2),
      "ema_width": 0.1,
      "evals": dict(
        made=dict(
          type="samples", pred="samples", pred_kw=dict(steps=3), weights="ema",
          num_samples=4,
        )
      ),
    }
  )  # fmt: skip
  workdir = tmp_path / "run"
  main.train(config, str(workdir))
  assert (workdir / tiny.rows(workdir)[6]["made/samples"]).exists()
  command = f"--workdir={workdir} --num_samples=5 --steps=2 --sampler=euler"
  assert sample.main([*command.split(), f"--output={tmp_path / 'out'}"]) == 0
  results = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert results["step"] == 6
  assert pathlib.Path(tmp_path / "out" / results["sample/samples"]).exists()
  files = [*(tmp_path / "out/samples/sample-00000006").iterdir()]
  assert len(files) == 5
  assert sample.main([f"--workdir={workdir}", "--sampler=rk4"]) == 2
  assert "unknown 'rk4'" in capsys.readouterr().err
