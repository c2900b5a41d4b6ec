"""Whole runs: the rows and files they write, and their numbers against numpy.

For other modes of the program see test_modes.py, for mistakes in a config
test_config_mistakes.py, for interrupted runs the folder faults.
"""

import functools
import json
import math
import os
import tempfile

import jax
import numpy as np
import optax
import pytest
import tiny
from golden import make_losses

from bigtrain import main, sharding
from bigtrain.arrays import trees
from bigtrain.models import vit
from bigtrain.tools import evaluate

# Metrics of every training row except the first, which has no rates.
NAMES = {
  "step",
  "loss",
  "lr",
  "grad_norm",
  "param_norm",
  "update_norm",
  "examples_seen",
  "epoch",
  "progress",
  "examples_per_sec",
  "step_secs",
  "data_wait_fraction",
  "mfu",
  "device_hours",
  "eta_secs",
  "host_rss_bytes",
}
RATES = {
  "examples_per_sec",
  "step_secs",
  "data_wait_fraction",
  "mfu",
  "eta_secs",
}


def read_rows(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def start_info(workdir):
  """The entry of run.json about the only start of a run."""
  (start,) = json.loads((workdir / "run.json").read_text())["starts"]
  return start


@pytest.fixture(scope="module")
def plain_run(tiny_config, tmp_path_factory):
  """(config, workdir, results of train) of a run without optional features.

  As in a notebook: with a ConfigDict, and a workdir that does not exist yet.
  """
  import ml_collections

  workdir = tmp_path_factory.mktemp("plain") / "new" / "run"
  config = tiny_config({"peak_flops_per_device": 1e12, "tensorboard": True})
  results = main.train(ml_collections.ConfigDict(config), str(workdir))
  return config, workdir, results


def test_rows_have_the_documented_names(plain_run):
  _, workdir, _ = plain_run
  rows = {row["step"]: row for row in read_rows(workdir)}
  assert list(rows) == [1, 2, 3, 4, 6]
  assert set(rows[1]) >= NAMES - RATES | {"compile_secs"}
  for step in (2, 4, 6):
    assert set(rows[step]) >= NAMES
    assert rows[step]["examples_seen"] == 16 * step
    assert rows[step]["progress"] == step / 6
    assert rows[step]["epoch"] == 16 * step / tiny.NUM_TRAIN
    assert all(math.isfinite(v) for v in rows[step].values())
  evaluation = {"val/acc", "val/top5_acc", "val/loss", "val/secs"}
  assert set(rows[3]) == {"step"} | evaluation
  assert set(rows[6]) >= evaluation


def test_rows_after_a_save_show_its_stall_and_write_time(plain_run):
  _, workdir, _ = plain_run
  rows = {row["step"]: row for row in read_rows(workdir)}
  # The run saves at steps 3 and 6.
  for step in (4, 6):
    assert rows[step]["ckpt_stall_secs"] > 0
    assert rows[step].get("ckpt_write_secs", 1) > 0
  assert rows[6]["ckpt_write_secs"] > 0


def test_train_returns_the_newest_value_of_each_metric(plain_run):
  _, workdir, results = plain_run
  expected = {}
  for row in read_rows(workdir):
    expected |= row
  assert tiny.without_times(results) == tiny.without_times(expected)
  assert results["step"] == 6


@pytest.mark.parametrize("workdir", [(), (None,)])
def test_a_run_without_a_workdir_keeps_no_files(
  workdir, tiny_config, tmp_path, monkeypatch, caplog
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  results = main.train(tiny_config({"total_steps": 2}), *workdir)
  assert results["step"] == 2 and np.isfinite(results["loss"])
  assert os.listdir(tmp_path) == []
  assert "keeps no files and no checkpoints" in caplog.text


def test_a_row_has_the_mean_loss_since_the_previous_row(
  plain_run, tiny_config, tmp_path
):
  _, workdir, _ = plain_run
  main.train(tiny_config({"log_steps": 1}), str(tmp_path))
  each = {s: r["loss"] for s, r in tiny.rows(tmp_path).items()}
  assert list(each) == [1, 2, 3, 4, 5, 6]
  rows = tiny.rows(workdir)
  assert rows[1]["loss"] == each[1]
  assert rows[2]["loss"] == each[2]
  assert rows[4]["loss"] == pytest.approx((each[3] + each[4]) / 2, rel=1e-6)
  assert rows[6]["loss"] == pytest.approx((each[5] + each[6]) / 2, rel=1e-6)
  assert rows[6]["loss_last"] == each[6]


def test_a_workdir_has_the_documented_files(plain_run):
  config, workdir, _ = plain_run
  assert json.loads((workdir / "config.json").read_text()) == config
  start = start_info(workdir)
  assert start["devices"] == 8
  assert start["mesh"] == dict(
    replica=1, pipeline=1, fsdp=8, sequence=1, tensor=1
  )
  assert start["packages"]["jax"] == jax.__version__
  assert start["model_flops_per_step"] > 0
  assert start["param_bytes"] == 4 * start["num_params"] > 0
  assert start["num_trained_params"] == start["num_params"]
  table = (workdir / "parameters.txt").read_text()
  assert f"{start['num_params']:,} parameters" in table
  assert table.endswith("bytes, from scratch\n")
  for program in ("update", "val"):
    facts = start["programs"][program]
    assert facts["argument_bytes"] > 0
    assert facts["compile_secs"] > 0 and facts["trace_secs"] > 0
    assert facts["cache"] in ("hit", "miss")
  checkpoints = sorted(os.listdir(workdir / "checkpoints"))
  assert checkpoints == ["00000003", "00000006"]
  assert os.listdir(workdir / "tensorboard")
  assert sorted(os.listdir(workdir)) == [
    "checkpoints",
    "config.json",
    "finished.json",
    "metrics.jsonl",
    "parameters.txt",
    "run.json",
    "tensorboard",
  ]


# The numbers of a run with all optional features, against numpy.


@pytest.fixture(scope="module")
def full_run(tiny_config, tmp_path_factory):
  """Workdir of a run with a checkpoint and a row at each step."""
  workdir = tmp_path_factory.mktemp("full")
  val = tiny_config()["evals"]["val"]
  config = tiny_config(
    {
      "log_steps": 1,
      "ckpt_steps": 1,
      "keep_ckpts": 10,
      "ema_decay": 0.5,
      "weight_stats": "per_param",
      "loss": dict(kind="sigmoid_xent"),
      "schedule": [
        ("first/.*", None),
        (".*", dict(decay_type="constant")),
      ],
      "evals": {
        "val": val,
        "averaged": {**val, "weights": "ema"},
        "means": {**val, "type": "mean", "pred": "loss"},
        "kept": {**val, "type": "save", "keys": ["id"]},
        "off": {**val, "enabled": False},
      },
    }
  )
  main.train(config, str(workdir))
  return workdir


def val_data(tiny_config):
  path = tiny_config()["evals"]["val"]["data"]["path"]
  with np.load(path) as file:
    return dict(file)


def forward(arrays, prefix, image):
  """Logits of tiny.net."""
  p = {k.removeprefix(prefix + "/"): v for k, v in arrays.items()}
  x = image.reshape(len(image), -1) @ p["first/kernel"] + p["first/bias"]
  return np.maximum(x, 0) @ p["head/kernel"] + p["head/bias"]


def cross_entropy(logits, labels):
  shifted = logits - logits.max(1, keepdims=True)
  log_probs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
  return -log_probs[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize(
  ("evaluation", "weights"), [("val", "params"), ("averaged", "ema")]
)
def test_an_evaluation_uses_the_weights_of_its_config(
  full_run, tiny_config, evaluation, weights
):
  data = val_data(tiny_config)
  for step in (3, 6):
    row = tiny.rows(full_run)[step]
    logits = forward(tiny.arrays(full_run, step), weights, data["image"])
    loss = cross_entropy(logits, data["labels"])
    hits = logits.argmax(1) == data["labels"]
    assert row[f"{evaluation}/loss"] == pytest.approx(loss, rel=1e-5)
    assert row[f"{evaluation}/acc"] == pytest.approx(hits.mean())


def test_ema_matches_its_formula(full_run):
  states = [tiny.arrays(full_run, step) for step in range(1, 7)]
  assert states[0]["ema/head/kernel"].any()
  for t, (before, now) in enumerate(zip(states, states[1:]), start=1):
    d = min(0.5, (1 + t) / (10 + t))
    np.testing.assert_allclose(
      now["ema/head/kernel"],
      d * before["ema/head/kernel"] + (1 - d) * now["params/head/kernel"],
      rtol=1e-5,
    )


def test_frozen_parameters_do_not_change_and_have_no_optimizer_state(full_run):
  first, last = tiny.arrays(full_run, 1), tiny.arrays(full_run, 6)
  tiny.assert_same(first["params/first/kernel"], last["params/first/kernel"])
  assert (first["params/head/kernel"] != last["params/head/kernel"]).any()
  state = [name for name in last if name.startswith("opt/")]
  assert [name for name in state if "head" in name]
  assert not [name for name in state if "first" in name]


def test_per_parameter_statistics_match_the_checkpoints(full_run):
  before, after = tiny.arrays(full_run, 3), tiny.arrays(full_run, 4)
  row = tiny.rows(full_run)[4]

  def rms(x):
    return pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-4)

  kernel = after["params/head/kernel"]
  assert row["weight_rms/head/kernel"] == rms(kernel)
  assert row["weight_max/head/kernel"] == np.abs(kernel).max()
  change = kernel - before["params/head/kernel"]
  assert row["update_rms/head/kernel"] == rms(change)
  ratio = change / before["params/head/kernel"]
  name = "weight_update_divided_by_weight_rms/head/kernel"
  assert row[name] == pytest.approx(np.sqrt(np.mean(ratio**2)), rel=1e-3)
  assert row["grad_rms/head/kernel"] > 0
  norm = row["grad_rms/head/kernel"] * np.sqrt(kernel.size)
  assert row["grad_norm/head/kernel"] == pytest.approx(norm, rel=1e-4)
  assert "weight_rms/first/kernel" in row
  assert "grad_rms/first/kernel" not in row
  changes = [
    after[name] - before[name] for name in after if name.startswith("params/")
  ]
  norm = np.sqrt(sum(np.sum(x**2) for x in changes))
  assert row["update_norm"] == pytest.approx(norm, rel=1e-4)


def test_mean_and_classification_evaluators_agree(full_run):
  row = tiny.rows(full_run)[6]
  assert row["means/loss"] == pytest.approx(row["val/loss"], rel=1e-6)
  assert row["means/accuracy"] == row["val/acc"]


def test_saved_predictions_are_in_the_order_of_the_examples(
  full_run, tiny_config
):
  data = val_data(tiny_config)
  names = sorted(os.listdir(full_run / "predictions"))
  assert names == ["kept-00000003.npz", "kept-00000006.npz"]
  with np.load(full_run / "predictions" / names[0]) as file:
    np.testing.assert_array_equal(file["id"], data["id"])
    logits = forward(tiny.arrays(full_run, 3), "params", data["image"])
    np.testing.assert_allclose(file["predictions"], logits, atol=1e-5)
  assert tiny.rows(full_run)[3]["kept/num_examples"] == tiny.NUM_VAL


def test_loss_options_reach_the_loss(full_run):
  # Initial loss: 10 log(2) with a sigmoid for each of ten classes, log(10) with
  # a softmax.
  rows = tiny.rows(full_run)
  assert rows[3]["val/loss"] < 4 < rows[1]["loss"]


def test_an_evaluation_can_be_disabled(full_run):
  assert not [k for k in tiny.rows(full_run)[6] if k.startswith("off/")]


# Devices and microbatches change the results by rounding only.


def losses(config, workdir):
  main.train(config, str(workdir))
  return [row["loss"] for row in tiny.rows(workdir).values()]


@pytest.mark.slow
@pytest.mark.parametrize(("replica", "fsdp"), [(1, 8), (2, 4)])
@pytest.mark.golden
def test_the_quickstart_has_the_golden_losses_of_one_device(
  tiny_config, tmp_path, replica, fsdp
):
  values = make_losses.make(
    str(tmp_path),
    mesh=dict(replica=replica, fsdp=fsdp),
    compile_cache=tiny_config()["compile_cache"],
  )
  golden = json.loads(make_losses.FILE.read_text())
  for name, rtol in (("loss", 5e-6), ("grad_norm", 2e-4)):
    np.testing.assert_allclose(
      values[name],
      golden[name],
      rtol=rtol,
      err_msg=(
        f"The {name} of digits:runlocal has changed. If only one of the meshes "
        "fails, sharding changes the result, which is a bug. If both fail, a "
        "commit changed the numbers: find it. If the change is intended, run "
        "`JAX_PLATFORMS=cpu python -m tests.golden.make_losses` and commit "
        "losses.json with the reason."
      ),
    )


def test_losses_are_the_same_on_every_mesh(tiny_config, tmp_path, monkeypatch):
  changes = {"log_steps": 1, "evals": {}, "model.dropout": 0.1}
  by_fsdp = {}
  for replica, fsdp in ((1, 8), (2, 4), (8, 1)):
    mesh = dict(replica=replica, fsdp=fsdp)
    workdir = tmp_path / f"fsdp{fsdp}"
    by_fsdp[fsdp] = losses(tiny_config(changes | {"mesh": mesh}), workdir)
  one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
  monkeypatch.setattr(sharding.mesh, "make_mesh", one)
  expected = losses(tiny_config(changes), tmp_path / "one")
  assert start_info(tmp_path / "one")["devices"] == 1
  assert np.ptp(expected) > 0.1
  for fsdp in by_fsdp:
    np.testing.assert_allclose(by_fsdp[fsdp], expected, rtol=1e-5)
  # The more devices share the state, the smaller are the arguments of each.
  programs = {
    fsdp: start_info(tmp_path / f"fsdp{fsdp}")["programs"]["update"]
    for fsdp in by_fsdp
  }
  assert programs[8]["argument_bytes"] < programs[4]["argument_bytes"]
  assert programs[4]["argument_bytes"] < programs[1]["argument_bytes"] / 2


def test_rows_are_the_same_with_microbatches(tiny_config, tmp_path):
  changes = {"log_steps": 1, "evals": {}, "mesh": dict(replica=2, fsdp=4)}
  main.train(tiny_config(changes), str(tmp_path / "whole"))
  changes["microbatches"] = 2
  main.train(tiny_config(changes), str(tmp_path / "parts"))
  whole, parts = tiny.rows(tmp_path / "whole"), tiny.rows(tmp_path / "parts")
  assert parts != whole, "microbatches had no effect"
  for step, row in whole.items():
    assert parts[step] == pytest.approx(row, rel=1e-5)


def test_each_of_8_devices_holds_an_eighth_of_a_vit():
  mesh = sharding.make_mesh(replica=1, fsdp=8)
  model = vit.Model(variant="S/16", num_classes=1000)
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), "float32")
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  state = {
    "params": params,
    "opt": jax.eval_shape(optax.adam(1.0).init, params),
    "ema": params,
  }
  layout, _ = sharding.state_shardings(state, mesh)
  whole = trees.num_bytes(jax.tree.leaves(state))
  assert whole > 4 * 4 * 22e6
  held = sharding.bytes_per_device(state, layout)
  assert whole / 8 <= held <= 1.05 * whole / 8


def test_schedule_free_runs_evaluate_their_average(tiny_config, tmp_path):
  changes = {
    "optimizer": dict(name="schedule_free_sgd", b1=0.8),
    "schedule": dict(decay_type="optim.own_parts.steep"),
    "tensorboard": False,
  }
  main.train(tiny_config(changes), str(tmp_path))
  row, arrays = tiny.rows(tmp_path)[6], tiny.arrays(tmp_path, 6)
  assert row["lr"] == pytest.approx(tiny_config()["lr"] * (1 - 5 / 6) ** 4)
  b1, points = arrays["opt/b1"], dict(arrays)
  for name, z in arrays.items():
    if name.startswith("opt/z/"):
      param = name.replace("opt/z/", "params/")
      points[param] = (arrays[param] - (1 - b1) * z) / b1
  data = val_data(tiny_config)
  losses = [
    cross_entropy(forward(x, "params", data["image"]), data["labels"])
    for x in (points, arrays)
  ]
  assert row["val/loss"] == pytest.approx(losses[0], rel=1e-5)
  assert row["val/loss"] != pytest.approx(losses[1], rel=1e-5)
  results = evaluate.evaluate(str(tmp_path))
  assert results["val/loss"] == row["val/loss"]


def test_rows_count_the_sources_of_a_mixture_also_after_a_resume(
  tiny_config, tmp_path
):
  data = tiny_config()["input"]["data"]
  old = dict(at_percent=[0, 50], values=[3, 1])  # Up to step 3 of 6.
  config = tiny_config(
    {
      "input.data": None,
      "input.mixture": {
        "old": dict(data=data, weight=old),
        "new": dict(data=data, weight=1),
      },
      "log_steps": 1,
      "evals": {},
    }
  )
  main.train(config, str(tmp_path / "whole"))
  rows = tiny.rows(tmp_path / "whole")
  # Shares of 3/4, 7/10 and 5/8 of 16 rows: 12, 23.2 and 33.2. Then one half of
  # each block of 4,096 rows.
  seen = [rows[step]["examples_seen/old"] for step in range(1, 7)]
  assert seen[:3] == [12, 23, 33]
  assert abs(seen[5] - (33 + 24)) < 10
  for row in rows.values():
    new = row["examples_seen"] - row["examples_seen/old"]
    assert row["examples_seen/new"] == new
    assert row["epoch/new"] == new / tiny.NUM_TRAIN
  main.train(config | {"stop_at_steps": 3}, str(tmp_path / "parts"))
  main.train(config, str(tmp_path / "parts"))
  assert tiny.rows(tmp_path / "parts") == rows
