"""Starts of whole runs. Interrupted runs end bit-equal to straight ones."""

import json
import logging
import shutil
import signal
import types

import ml_dtypes
import numpy as np
import pytest
import tiny
from models.published import folders

import bigtrain
from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.checkpoints import folders as checkpoint_folders
from bigtrain.checkpoints import restore, start
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import mean
from bigtrain.inputs import pipeline
from bigtrain.objective import building
from bigtrain.runtime import programs
from bigtrain.tools import checkpoint

# Every kind of state in a checkpoint (moments, running statistics, averaged
# parameters), and randomness in the step and in the input.
EVERYTHING = {
  "model.statistics": True,
  "model.dropout": 0.3,
  "ema_decay": 0.5,
  "input.pp": "random_crop(8,pad=1)",
}


@pytest.fixture
def seen(monkeypatch):
  """Ids of the examples of each batch, in the order of the loop."""
  start = pipeline.TrainInput.start
  ids = []

  def recorded(self, *args):
    batches = start(self, *args)
    get = batches.__next__

    class Recorded:
      def __next__(self):
        batch = get()
        ids.append(np.asarray(batch["id"]).tolist())
        return batch

      def close(self):
        batches.close()

    return Recorded()

  monkeypatch.setattr(pipeline.TrainInput, "start", recorded)
  return ids


@pytest.fixture(scope="module")
def straight(tiny_config, tmp_path_factory):
  """{log_steps: workdir of a run without interruptions}."""
  workdirs = {}
  for log_steps in (2, 4):
    workdirs[log_steps] = tmp_path_factory.mktemp(f"straight{log_steps}")
    config = tiny_config(EVERYTHING | {"log_steps": log_steps})
    main.train(config, str(workdirs[log_steps]))
  return workdirs


@pytest.mark.parametrize(
  ("log_steps", "stops"),
  [
    (2, (3,)),
    # Two interruptions: between two rows, and at a row.
    (4, (3, 4)),
    pytest.param(4, (5,), marks=pytest.mark.slow),
  ],
)
def test_resumed_runs_end_bit_equal(
  straight, tiny_config, tmp_path, seen, log_steps, stops
):
  config = tiny_config(EVERYTHING | {"log_steps": log_steps})
  for stop in stops:
    main.train(config | {"stop_at_steps": stop}, str(tmp_path))
    assert tiny.checkpoint_steps(tmp_path)[-1] == stop
  main.train(config, str(tmp_path))
  arrays = tiny.arrays(tmp_path)
  assert {name.split("/")[0] for name in arrays} == {
    "params",
    "opt",
    "mutable",
    "ema",
    "step",
  }
  assert arrays["mutable/running/mean"].any()
  tiny.assert_same(arrays, tiny.arrays(straight[log_steps]))
  tiny.assert_same(tiny.rows(tmp_path), tiny.rows(straight[log_steps]))
  # Despite the restarts, the first epoch has each example once.
  assert len(seen) == 6
  assert sorted(np.ravel(seen[:5])) == list(range(1000, 1080))
  starts = json.loads((tmp_path / "run.json").read_text())["starts"]
  assert len(starts) == len(stops) + 1


def test_rows_after_the_checkpoint_are_written_again(
  straight, tiny_config, tmp_path, seen
):
  config = tiny_config(EVERYTHING)
  fails = config | {"hooks": {"fails": dict(type="tiny.hooks.Fails", step=6)}}
  with pytest.raises(RuntimeError, match="fails before step 6"):
    main.train(fails, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [3]
  assert list(tiny.rows(tmp_path)) == [1, 2, 3, 4]
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  assert list(tiny.rows(tmp_path)) == [1, 2, 3]
  main.train(config, str(tmp_path))
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(straight[2]))
  tiny.assert_same(tiny.rows(tmp_path), tiny.rows(straight[2]))
  assert seen[3:5] == seen[5:7], "the second run sees other examples"


def test_another_mesh_sees_the_same_examples(
  straight, tiny_config, tmp_path, seen
):
  config = tiny_config(EVERYTHING)
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  config["mesh"] = dict(replica=4, fsdp=2)
  main.train(config, str(tmp_path))
  assert sorted(np.ravel(seen[:5])) == list(range(1000, 1080))
  expected, rows = tiny.rows(straight[2]), tiny.rows(tmp_path)
  assert list(rows) == list(expected)
  for step in rows:
    assert rows[step] == pytest.approx(expected[step], rel=1e-4)


SIGNALS = []  # Signals that the next test's process has received.


def signal_on_row_2(step, row):
  """A user's hook."""
  if step == 2:
    SIGNALS.append(signal.SIGTERM)


def test_a_signal_saves_and_the_resumed_run_is_bit_equal(
  straight, tiny_config, tmp_path, monkeypatch
):
  SIGNALS.clear()
  monkeypatch.setattr(process, "_signals", SIGNALS)
  config = tiny_config(EVERYTHING)
  hook = dict(type="call", function=f"{__name__}.signal_on_row_2")
  with pytest.raises(process.Preempted, match="saved step 3 of 6"):
    main.train(config | {"hooks": {"signal": hook}}, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [3]
  SIGNALS.clear()
  main.train(config, str(tmp_path))
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(straight[2]))
  tiny.assert_same(tiny.rows(tmp_path), tiny.rows(straight[2]))


def test_hooks_resume_with_their_state(tiny_config, tmp_path):
  # Progress never decreases, so the run stops at the fourth row, of step 6.
  early = dict(type="early_stopping", metric="progress", patience=4)
  config = tiny_config({"total_steps": 12, "hooks": {"early": early}})
  for name, stops in (("straight", ()), ("cut", (1, 3, 5))):
    for stop in (*stops, None):
      main.train(config | {"stop_at_steps": stop}, str(tmp_path / name))
    assert list(tiny.rows(tmp_path / name)) == [1, 2, 3, 4, 6]
    assert tiny.checkpoint_steps(tmp_path / name)[-1] == 6
  tiny.assert_same(
    tiny.arrays(tmp_path / "cut"), tiny.arrays(tmp_path / "straight")
  )


# Evaluations.


@pytest.fixture
def two_evaluations(tiny_config):
  """Evaluations "a" and "b", both due at 3 and 6."""
  val = tiny_config()["evals"]["val"] | {"type": "mean", "pred": "loss"}
  return tiny_config({"evals": {"a": val, "b": val}})


@pytest.fixture
def runs(monkeypatch):
  """.started: (name, step) of each evaluation; evaluation .fail fails."""
  init, run = mean.Evaluator.__init__, mean.Evaluator.run
  record = types.SimpleNamespace(started=[], fail=None)

  def named(self, predict_fn, batches):
    init(self, predict_fn, batches)
    self.name = batches.context.name

  def recorded(self, variables, step):
    this = (self.name, step)
    record.started.append(this)
    if this == record.fail:
      raise OSError("the data are gone")
    return run(self, variables, step)

  monkeypatch.setattr(mean.Evaluator, "__init__", named)
  monkeypatch.setattr(mean.Evaluator, "run", recorded)
  return record


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_an_interrupted_evaluation_runs_at_the_next_start(
  two_evaluations, tmp_path, runs, step
):
  runs.fail = ("b", step)
  with pytest.raises(OSError, match="data are gone"):
    main.train(two_evaluations, str(tmp_path))
  row = tiny.rows(tmp_path)[step]
  assert "a/loss" in row and "b/loss" not in row
  runs.started, runs.fail = [], None
  main.train(two_evaluations, str(tmp_path))
  assert runs.started == [("b", step)] + [("a", 6), ("b", 6)] * (step == 3)
  row = tiny.rows(tmp_path)[step]
  assert row["a/loss"] == row["b/loss"]
  runs.started = []
  main.train(two_evaluations, str(tmp_path))
  assert runs.started == []


def test_a_signal_ends_an_evaluation_between_its_batches(
  two_evaluations, tmp_path, runs, monkeypatch
):
  monkeypatch.setattr(process, "_signals", signals := [])
  evaluate = mean.Evaluator.run

  def signalled(self, variables, step):
    signals.append(signal.SIGTERM)
    return evaluate(self, variables, step)

  monkeypatch.setattr(mean.Evaluator, "run", signalled)
  for _ in range(2):  # The second start stops in the same evaluation.
    with pytest.raises(process.Preempted):
      main.train(two_evaluations, str(tmp_path))
    signals.clear()
  assert tiny.checkpoint_steps(tmp_path) == [3]
  assert runs.started == [("a", 3), ("a", 3)]
  monkeypatch.setattr(mean.Evaluator, "run", evaluate)
  main.train(two_evaluations, str(tmp_path))
  assert runs.started[2:] == [("a", 3), ("b", 3), ("a", 6), ("b", 6)]


def test_a_finished_run_neither_changes_nor_compiles(
  straight, tiny_config, caplog, monkeypatch
):
  def files():
    return {
      path: path.stat().st_mtime_ns
      for path in straight[2].rglob("*")
      if path.is_file() and path.name != "lease.json"
    }

  def refuse(*args, **kwargs):
    raise AssertionError("not needed")

  before, written = tiny.rows(straight[2]), files()
  with monkeypatch.context() as patch:
    patch.setattr(programs.Programs, "lower", refuse)
    patch.setattr(restore, "load", refuse)
    patch.setattr(pipeline.TrainInput, "start", refuse)
    with caplog.at_level(logging.INFO, logger="absl"):
      results = main.train(tiny_config(EVERYTHING), str(straight[2]))
  assert "nothing is left to do" in caplog.text
  assert tiny.rows(straight[2]) == before and files() == written
  assert results["val/loss"] == before[6]["val/loss"]
  assert results["step"] == 6


def test_a_finished_run_evaluates_what_is_new(tiny_config, tmp_path):
  main.train(tiny_config({"evals": {}}), str(tmp_path))
  results = main.train(tiny_config(), str(tmp_path))
  assert "val/loss" in results and results["step"] == 6


# A changed config.


def test_a_change_of_the_trajectory_is_refused_naming_the_key(
  tiny_config, tmp_path
):
  main.train(tiny_config({"stop_at_steps": 3}), str(tmp_path))
  changed = tiny_config({"input.shuffle": False, "lr": 0.1})
  with pytest.raises(ConfigError) as refused:
    main.train(changed, str(tmp_path))
  assert "config.input.shuffle: None -> false" in str(refused.value)
  assert "config.lr: 0.01 -> 0.1" in str(refused.value)
  with pytest.raises(ConfigError, match=r"config.lr: 0.01") as refused:
    main.train(changed | {"allow_changes": ["input.shuffle"]}, str(tmp_path))
  assert "shuffle" not in str(refused.value)
  # A refused start does not overwrite config.json.
  written = json.loads((tmp_path / "config.json").read_text())
  assert written["lr"] == 0.01
  main.train(changed | {"allow_changes": ["input", "lr"]}, str(tmp_path))
  written = json.loads((tmp_path / "config.json").read_text())
  assert written["lr"] == 0.1
  assert tiny.rows(tmp_path)[4]["lr"] > 0.01


def test_harmless_changes_are_allowed(straight, tiny_config, tmp_path, caplog):
  main.train(tiny_config(EVERYTHING | {"stop_at_steps": 3}), str(tmp_path))
  harmless = {
    "log_steps": 1,
    "ckpt_steps": 2,
    "evals": {},
    "keep_ckpts": 1,
    "tensorboard": True,
    "weight_stats": "per_param",
    "nonfinite": "skip",
    "input.prefetch": 1,
    "hooks": {"nan": dict(type="stop_on_nan")},
  }
  with caplog.at_level(logging.INFO, logger="absl"):
    main.train(tiny_config(EVERYTHING | harmless), str(tmp_path))
  assert "config.log_steps: 2 -> 1 (harmless)" in caplog.text
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(straight[2]))
  assert list(tiny.rows(tmp_path)) == [1, 2, 3, 4, 5, 6]


ROUNDED = EVERYTHING | {"ckpt_dtype": dict(params="bfloat16", ema="bfloat16")}


def test_a_checkpoint_may_have_parameters_in_bfloat16(
  straight, tiny_config, tmp_path
):
  main.train(tiny_config(ROUNDED), str(tmp_path))
  exact, saved = tiny.arrays(straight[2]), tiny.arrays(tmp_path)
  for name, array in exact.items():
    if name.startswith(("params", "ema")):
      # numpy's rounding: to the nearest value, of two the even one.
      array = array.astype(ml_dtypes.bfloat16)
    assert saved[name].dtype == array.dtype, name
    np.testing.assert_array_equal(saved[name], array, err_msg=name)
  assert not any(checkpoint.verify(str(tmp_path)).values())
  variables = bigtrain.load(str(tmp_path)).variables
  rounded = {n: x for n, x in saved.items() if n.startswith("params")}
  for name, x in trees.flatten_with_names(variables["params"]):
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, rounded.pop(f"params/{name}"))
  assert not rounded


@pytest.mark.slow
def test_a_run_resumes_from_rounded_parameters_and_says_so(
  straight, tiny_config, tmp_path, caplog
):
  main.train(tiny_config(ROUNDED | {"stop_at_steps": 3}), str(tmp_path))
  assert "rounded values" not in caplog.text
  main.train(tiny_config(EVERYTHING), str(tmp_path))
  assert caplog.text.count("rounded values") == 1
  exact, end = tiny.arrays(straight[2]), tiny.arrays(tmp_path)
  assert any(np.any(end[name] != array) for name, array in exact.items())
  for name, array in exact.items():
    assert end[name].dtype == array.dtype
    if name.startswith("params"):
      np.testing.assert_allclose(end[name], array, atol=0.02, err_msg=name)


@pytest.mark.parametrize(
  ("dtypes", "message"),
  [
    (dict(parms="bfloat16"), "config.ckpt_dtype.parms: unknown key. Did you"),
    (dict(params="float8"), "config.ckpt_dtype.params: unknown 'float8'"),
    ("bfloat16", "config.ckpt_dtype: expected a dict"),
  ],
)
def test_wrong_dtypes_of_checkpoints_are_errors(
  tiny_config, tmp_path, dtypes, message
):
  with pytest.raises(ConfigError, match=message):
    main.train(tiny_config({"ckpt_dtype": dtypes}), str(tmp_path))


def test_the_full_state_of_another_workdir(straight, tiny_config, tmp_path):
  config = tiny_config(EVERYTHING)
  source, here = tmp_path / "source", tmp_path / "here"
  main.train(config | {"stop_at_steps": 3}, str(source))
  main.train(config | {"resume": str(source)}, str(here))
  tiny.assert_same(tiny.arrays(here), tiny.arrays(straight[2]))
  rows = tiny.rows(here)
  assert list(rows) == [4, 6]
  tiny.assert_same(rows, {s: tiny.rows(straight[2])[s] for s in (4, 6)})


def test_the_parameters_of_another_workdir(straight, tiny_config, tmp_path):
  init = dict(path=str(straight[2]), prefix="ema")
  # The first step of the warm-up has a learning rate of 0.
  config = tiny_config(EVERYTHING | {"model_init": init, "stop_at_steps": 1})
  main.train(config, str(tmp_path))
  source, arrays = tiny.arrays(straight[2]), tiny.arrays(tmp_path)
  for name in ("first/kernel", "head/bias"):
    tiny.assert_same(arrays[f"params/{name}"], source[f"ema/{name}"])
    np.testing.assert_allclose(
      arrays[f"ema/{name}"], source[f"ema/{name}"], rtol=1e-6
    )
  assert arrays["step"] == 1
  moments = [name for name in arrays if name.endswith("/mu/head/bias")]
  assert moments
  for name in moments:
    assert np.abs(arrays[name] - source[name]).max() > 0


@pytest.mark.parametrize("name", ["schedule_free_sgd", "mechanize"])
def test_optimizers_begin_with_the_loaded_parameters(
  name, straight, tiny_config, tmp_path
):
  """Both keep copies of the initial parameters in their state."""
  base = dict(base_optimizer=dict(name="adam")) if name == "mechanize" else {}
  init = dict(path=str(straight[2]), prefix="ema")
  changes = {"model_init": init, "stop_at_steps": 1, "save_at_start": True}
  config = tiny_config(EVERYTHING | changes | {"keep_ckpts": 3})
  config["optimizer"] = dict(name=name, **base)
  main.train(config, str(tmp_path))
  source = tiny.arrays(straight[2])
  start = tiny.arrays(tmp_path, 0)
  kept = "z" if name == "schedule_free_sgd" else "x0"
  for array in ("first/kernel", "head/bias"):
    tiny.assert_same(start[f"params/{array}"], source[f"ema/{array}"])
    tiny.assert_same(start[f"opt/{kept}/{array}"], source[f"ema/{array}"])


def test_a_new_run_drops_rows_of_an_older_run(tiny_config, tmp_path):
  old = '{"step": 1, "old": 9.0}\n{"step": 50, "old": 9.0}\n'
  (tmp_path / "metrics.jsonl").write_text(old)
  results = main.train(tiny_config({"stop_at_steps": 2}), str(tmp_path))
  assert "old" not in tiny.rows(tmp_path)[1]
  assert list(tiny.rows(tmp_path)) == [1, 2]
  assert results["step"] == 2


def test_the_options_are_read_from_the_config():
  config = settings.Config(
    {
      "resume": "there",
      "model_init": {"path": "x.npz", "rename": [("a", None)]},
      "allow_changes": ["lr"],
    }
  )
  options = start.read(config)
  assert options.resume == "there"
  assert options.model_init == {"path": "x.npz", "rename": [("a", None)]}
  assert options.allow_changes == ["lr"]
  assert options.fallback is False
  assert config.unread() == []


@pytest.mark.slow
def test_a_run_from_a_published_folder(tmp_path):
  folder, workdir = tmp_path / "llama", tmp_path / "run"
  folder.mkdir()
  folders.copy("llama", folder)
  features = {"tokens": "int32[16] < 61", "targets": "int32[16] < 61"}
  config = dict(
    total_steps=1,
    task="language_modeling",
    model_name="decoder",
    model=dict(published=str(folder), scan=True),
    model_init=str(folder),
    optimizer=dict(name="sgd"),
    lr=0.0,
    input=dict(data=dict(type="synthetic", features=features), batch_size=8),
  )
  wrong = dict(variant="llama", vocab_size=61, width=24, depth=2, num_heads=4)
  with pytest.raises(ConfigError, match="num_heads=4, .* has 6"):
    main.train(config | {"model": wrong}, workdir)
  assert not workdir.exists()
  main.train(config, workdir)
  loaded = tiny.arrays(workdir)["params/norm/scale"]
  expected = folders.arrays_of("llama")["model.norm.weight"]
  np.testing.assert_array_equal(loaded, expected)
  shutil.rmtree(folder)
  saved = json.loads((workdir / "config.json").read_text())["model"]
  assert "published" not in saved and saved["num_kv_heads"] == 2
  manifest = checkpoint_folders.read_manifest(
    checkpoint_folders.find(str(workdir), None)
  )
  _, model = building.model(settings.Config(manifest.host_state.config))
  assert model.head_dim == 8
