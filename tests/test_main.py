"""What a run leaves behind, and that its parts work together.

Exact resume is in test_resume.py, mistakes of the user in
test_config_mistakes.py, real processes in test_processes.py.
"""

import functools
import json
import math
import os

import jax
import numpy as np
import optax
import pytest
import tiny
from golden import make_losses

from bigtrain import guard, main, settings, sharding, trees
from bigtrain.models import vit

# Of every row of training but the first, which has no rates yet.
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
  """What run.json says of the only start of a run."""
  (start,) = json.loads((workdir / "run.json").read_text())["starts"]
  return start


@pytest.fixture(scope="module")
def plain_run(tiny_config, tmp_path_factory):
  """(config, workdir, what train returned) of a run without anything special.

  As a user would call it: with a ConfigDict, and a workdir that is not there.
  """
  import ml_collections

  workdir = tmp_path_factory.mktemp("plain") / "new" / "run"
  config = tiny_config({"peak_flops_per_device": 1e12, "tensorboard": True})
  results = main.train(ml_collections.ConfigDict(config), str(workdir))
  return config, workdir, results


def test_rows_have_the_names_that_users_rely_on(plain_run):
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


def test_a_save_is_measured_where_it_took_its_time(plain_run):
  _, workdir, _ = plain_run
  rows = {row["step"]: row for row in read_rows(workdir)}
  # Saves at 3 and 6: the loop stood still for each, and both were written.
  for step in (4, 6):
    assert rows[step]["ckpt_stall_secs"] > 0
    assert rows[step].get("ckpt_write_secs", 1) > 0
  assert rows[6]["ckpt_write_secs"] > 0


def test_train_returns_the_newest_values(plain_run):
  _, workdir, results = plain_run
  expected = {}
  for row in read_rows(workdir):
    expected |= row
  assert tiny.without_times(results) == tiny.without_times(expected)
  assert results["step"] == 6


def test_a_row_is_the_mean_since_the_row_before(
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


def test_the_files_of_a_run(plain_run):
  config, workdir, _ = plain_run
  assert json.loads((workdir / "config.json").read_text()) == config
  start = start_info(workdir)
  assert start["devices"] == 8
  assert start["mesh"] == {"replica": 1, "fsdp": 8}
  assert start["packages"]["jax"] == jax.__version__
  assert start["update_bytes_per_device"]["arguments"] > 0
  checkpoints = sorted(os.listdir(workdir / "checkpoints"))
  assert checkpoints == ["00000003", "00000006"]
  assert os.listdir(workdir / "tensorboard")
  left = sorted(os.listdir(workdir))
  assert left == [
    "checkpoints",
    "config.json",
    "metrics.jsonl",
    "run.json",
    "tensorboard",
  ]


# What a run with everything switched on computes, against numpy.


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
def test_evaluations_are_of_the_weights_they_name(
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


def test_the_average_follows_the_parameters(full_run):
  states = [tiny.arrays(full_run, step) for step in range(1, 7)]
  assert states[0]["ema/head/kernel"].any()
  for t, (before, now) in enumerate(zip(states, states[1:]), start=1):
    d = min(0.5, (1 + t) / (10 + t))
    np.testing.assert_allclose(
      now["ema/head/kernel"],
      d * before["ema/head/kernel"] + (1 - d) * now["params/head/kernel"],
      rtol=1e-5,
    )


def test_frozen_parameters_stay_and_have_no_optimizer_state(full_run):
  first, last = tiny.arrays(full_run, 1), tiny.arrays(full_run, 6)
  tiny.assert_same(first["params/first/kernel"], last["params/first/kernel"])
  assert (first["params/head/kernel"] != last["params/head/kernel"]).any()
  state = [name for name in last if name.startswith("opt/")]
  assert [name for name in state if "head" in name]
  assert not [name for name in state if "first" in name]


def test_statistics_of_each_parameter(full_run):
  before, after = tiny.arrays(full_run, 3), tiny.arrays(full_run, 4)
  row = tiny.rows(full_run)[4]

  def rms(x):
    return pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-4)

  kernel = after["params/head/kernel"]
  assert row["weight_rms/head/kernel"] == rms(kernel)
  assert row["weight_max/head/kernel"] == np.abs(kernel).max()
  change = kernel - before["params/head/kernel"]
  assert row["update_rms/head/kernel"] == rms(change)
  assert row["grad_rms/head/kernel"] > 0
  assert "weight_rms/first/kernel" in row
  assert "grad_rms/first/kernel" not in row
  changes = [
    after[name] - before[name] for name in after if name.startswith("params/")
  ]
  norm = np.sqrt(sum(np.sum(x**2) for x in changes))
  assert row["update_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_mean_evaluator_agrees_with_the_classification_one(full_run):
  row = tiny.rows(full_run)[6]
  assert row["means/loss"] == pytest.approx(row["val/loss"], rel=1e-6)
  assert row["means/accuracy"] == row["val/acc"]


def test_saved_predictions_are_those_of_the_examples_in_order(
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


def test_an_evaluation_can_be_switched_off(full_run):
  assert not [k for k in tiny.rows(full_run)[6] if k.startswith("off/")]


# The number of devices, and how the batch is cut, change rounding only.


def losses(config, workdir):
  main.train(config, str(workdir))
  return [row["loss"] for row in tiny.rows(workdir).values()]


@pytest.mark.parametrize(("replica", "fsdp"), [(1, 8), (2, 4)])
def test_the_quickstart_has_the_losses_it_had_on_one_device(
  tiny_config, tmp_path, replica, fsdp
):
  found = make_losses.make(
    str(tmp_path),
    mesh=dict(replica=replica, fsdp=fsdp),
    compile_cache=tiny_config()["compile_cache"],
  )
  golden = json.loads(make_losses.FILE.read_text())
  for name, rtol in (("loss", 5e-6), ("grad_norm", 2e-4)):
    np.testing.assert_allclose(
      found[name],
      golden[name],
      rtol=rtol,
      err_msg=(
        f"digits:runlocal has another {name} than before. If only one of the "
        "meshes fails, sharding changes the result: a bug. If both fail, "
        "something changed the numbers: find the commit that did. Only if it "
        "was meant to, run `JAX_PLATFORMS=cpu python -m "
        "tests.golden.make_losses` and commit losses.json, saying why."
      ),
    )


def test_every_mesh_gives_the_losses_of_one_device(
  tiny_config, tmp_path, monkeypatch
):
  changes = {"log_steps": 1, "evals": {}, "model.dropout": 0.1}
  found = {}
  for replica, fsdp in ((1, 8), (2, 4), (8, 1)):
    mesh = dict(replica=replica, fsdp=fsdp)
    workdir = tmp_path / f"fsdp{fsdp}"
    found[fsdp] = losses(tiny_config(changes | {"mesh": mesh}), workdir)
  one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
  monkeypatch.setattr(sharding, "make_mesh", one)
  expected = losses(tiny_config(changes), tmp_path / "one")
  assert start_info(tmp_path / "one")["devices"] == 1
  assert np.ptp(expected) > 0.1
  for fsdp in found:
    np.testing.assert_allclose(found[fsdp], expected, rtol=1e-5)
  # The compiled program says that the state really is split.
  held = {
    fsdp: start_info(tmp_path / f"fsdp{fsdp}")["update_bytes_per_device"]
    for fsdp in found
  }
  assert held[8]["arguments"] < held[4]["arguments"]
  assert held[4]["arguments"] < held[1]["arguments"] / 2


def test_microbatches_give_the_losses_of_one_batch(tiny_config, tmp_path):
  changes = {"log_steps": 1, "evals": {}, "mesh": dict(replica=2, fsdp=4)}
  whole = losses(tiny_config(changes), tmp_path / "whole")
  cut = losses(tiny_config(changes | {"microbatches": 2}), tmp_path / "cut")
  np.testing.assert_allclose(cut, whole, rtol=1e-5)
  assert cut != whole, "microbatches had no effect"


def test_a_device_holds_its_part_of_a_vit():
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


# Users' own parts.

MINE = '''
"""All of a user's own in one file."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics
from bigtrain.pp import registry


@registry.register("my_double")
def my_double():
  return registry.Op(lambda features, u: {"x": features["x"] * 2})


class Source:
  spec = {"x": (np.dtype("float32"), (3,))}

  def __init__(self, length):
    self.length = length

  def __len__(self):
    return self.length

  def read(self, indices):
    return {"x": np.stack([indices] * 3, 1).astype(np.float32)}

  def where(self, index):
    return f"number {index}"

  def fingerprint(self):
    return f"mine {self.length}"


class Model(nn.Module):
  @nn.compact
  def __call__(self, x, *, train=False):
    return nn.Dense(1, name="only")(x)[:, 0]


def inputs(batch):
  return {"x": batch["x"]}


def loss_fn(variables, batch, rng, *, model, train, scale=1.0):
  out = model.apply(variables, **inputs(batch))
  seen = metrics.pair(batch["x"][:, 0])
  return {"loss": metrics.pair(scale * out**2), "seen": seen}, {}


def predict_fns(model):
  def shifted(variables, batch, *, by=0.0):
    return model.apply(variables, **inputs(batch)) + by
  return {"shifted": shifted}


class Evaluator:
  def __init__(self, predict_fn, context, *, at):
    self.predict_fn, self.at = predict_fn, jnp.full((1, 3), at)

  def run(self, variables, step):
    return {"out": float(self.predict_fn(variables, {"x": self.at})[0])}


class Hook:
  calls = []

  def __init__(self, tag):
    self.tag = tag

  def before_train(self, step):
    self.calls.append(("before_train", step, self.tag))

  def before_step(self, step):
    self.calls.append(("before_step", step))

  def after_step(self, step, row):
    self.calls.append(("after_step", step, "loss" in row))
    return "enough" if step == 4 else None

  def after_train(self, step):
    self.calls.append(("after_train", step))
'''


def test_a_user_brings_everything_from_outside_of_the_package(
  tiny_config, tmp_path, monkeypatch
):
  (tmp_path / "my_project").mkdir()
  (tmp_path / "my_project" / "mine.py").write_text(MINE)
  monkeypatch.syspath_prepend(tmp_path)
  mine = "my_project.mine"
  config = tiny_config(
    {
      "task": mine,
      "loss": dict(scale=0.5),
      "model_name": mine,
      "model": {},
      "input.data": dict(type=mine, length=64),
      "input.pp": "my_double",
      "input.shuffle": False,
      "pp_modules": (mine,),
      "evals": {
        "own": dict(
          type=mine,
          pred="shifted",
          pred_kw=dict(by=100.0),
          at=0.0,
          log_steps=2,
        )
      },
      "hooks": {"own": dict(type=f"{mine}.Hook", tag="t")},
    }
  )
  results = main.train(config, str(tmp_path / "run"))
  rows = tiny.rows(tmp_path / "run")
  assert list(rows) == [1, 2, 4]
  # Examples 32 to 63 are in the third and fourth batch; the op doubles them.
  assert rows[4]["seen"] == 2 * np.arange(32, 64).mean()
  bias = tiny.arrays(tmp_path / "run")["params/only/bias"][0]
  assert rows[4]["own/out"] == pytest.approx(100 + bias)
  assert results["step"] == 4
  import my_project.mine

  calls = my_project.mine.Hook.calls
  # A row is seen when the step after it is under way, unless it is waited for.
  assert calls == [
    ("before_train", 0, "t"),
    ("before_step", 1),
    ("before_step", 2),
    ("after_step", 1, True),
    ("after_step", 2, True),
    ("after_step", 2, False),
    ("before_step", 3),
    ("before_step", 4),
    ("after_step", 4, True),
    ("after_step", 4, False),
    ("after_train", 4),
  ]
  assert sorted(tiny.checkpoint_steps(tmp_path / "run")) == [3, 4]


def test_arrays_of_a_notebook_are_trained_on_saved_and_resumed(
  tiny_config, tmp_path
):
  with np.load(tiny_config()["input"]["data"]["path"]) as file:
    data = dict(type="arrays", arrays=dict(file))
  straight, cut = tmp_path / "straight", tmp_path / "cut"
  main.train(tiny_config(), str(straight))
  config = tiny_config({"input.data": data})
  main.train(config | {"stop_at_steps": 3}, str(cut))
  main.train(config, str(cut))
  tiny.assert_same(tiny.arrays(straight), tiny.arrays(cut))
  other = {**data["arrays"], "image": np.zeros((80, 8, 8, 1), np.float32)}
  config["input"]["data"] = dict(type="arrays", arrays=other)
  with pytest.raises(settings.ConfigError, match=r"input.data.arrays.image:"):
    main.train(config, str(cut))


# Steps that are not finite.


@pytest.fixture
def spoilt_config(tiny_config, tmp_path):
  """A config whose fourth batch (examples 48 to 63) holds a NaN."""
  with np.load(tiny_config()["input"]["data"]["path"]) as file:
    data = dict(file)
  data["image"][55, 3, 3] = np.nan
  np.savez(tmp_path / "spoilt.npz", **data)
  return tiny_config(
    {
      "input.data.path": str(tmp_path / "spoilt.npz"),
      "input.shuffle": False,
      "log_steps": 3,
      "evals.val.log_steps": 1,
    }
  )


def test_nothing_of_a_step_that_is_not_finite_is_saved(spoilt_config, tmp_path):
  # Step 5 would save, and step 4 evaluates.
  config = spoilt_config | {"ckpt_steps": 5}
  with pytest.raises(guard.NotFinite) as told:
    main.train(config, str(tmp_path / "run"))
  message = str(told.value)
  for part in ("step 4", "loss nan", "first/bias", "48, 49", "spoilt.npz"):
    assert part in message
  assert tiny.checkpoint_steps(tmp_path / "run") == []
  assert list(tiny.rows(tmp_path / "run")) == [1, 2, 3]


def test_the_checkpoint_before_a_step_that_is_not_finite_stays(
  spoilt_config, tiny_config, tmp_path
):
  with pytest.raises(guard.NotFinite, match="step 4 is not finite"):
    main.train(spoilt_config, str(tmp_path / "run"))
  assert tiny.checkpoint_steps(tmp_path / "run") == [3]
  main.train(
    tiny_config({"input.shuffle": False, "stop_at_steps": 3}),
    str(tmp_path / "good"),
  )
  tiny.assert_same(
    tiny.arrays(tmp_path / "run"), tiny.arrays(tmp_path / "good")
  )


def test_skipped_steps_are_counted_and_change_nothing(spoilt_config, tmp_path):
  config = spoilt_config | {"nonfinite": "skip", "ckpt_steps": 1}
  config["keep_ckpts"] = 10
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert "skipped_steps" not in rows[3]
  assert rows[6]["skipped_steps"] == 1
  assert math.isfinite(rows[6]["loss"])
  before, after = tiny.arrays(tmp_path, 3), tiny.arrays(tmp_path, 4)
  assert before.pop("step") == 3 and after.pop("step") == 4
  tiny.assert_same(before, after)
  assert (
    tiny.arrays(tmp_path, 5)["params/head/bias"] != after["params/head/bias"]
  ).any()
  # What is saved is good, so the policy may change.
  longer = config | {"stop_at_steps": None, "nonfinite": "stop"}
  (tmp_path / "checkpoints" / "00000006").rename(tmp_path / "away")
  main.train(longer, str(tmp_path))
  assert rows == tiny.rows(tmp_path)


def test_too_many_skipped_steps_end_the_run(spoilt_config, tmp_path):
  config = spoilt_config | {"nonfinite": "skip", "max_nonfinite": 0}
  with pytest.raises(guard.NotFinite, match="step 4"):
    main.train(config, str(tmp_path / "run"))
  assert tiny.checkpoint_steps(tmp_path / "run") == [3]


def test_rolling_back_passes_over_the_batches(spoilt_config, tmp_path):
  config = spoilt_config | {"nonfinite": "rollback", "ckpt_steps": 2}
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert list(rows) == [1, 2, 3, 4, 5, 6]
  assert all(math.isfinite(row.get("loss", 0)) for row in rows.values())
  assert tiny.checkpoint_steps(tmp_path) == [4, 6]


def test_a_profile_is_taken_once(tiny_config, tmp_path):
  profile = dict(type="profile", start=2, steps=1)
  config = tiny_config({"hooks": {"profile": profile}, "evals": {}})
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
  assert len(traces) == 1
  main.train(config, str(tmp_path))
  assert list((tmp_path / "profile").rglob("*.xplane.pb")) == traces
