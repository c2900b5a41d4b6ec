"""Stopping rules on any history, and what hooks are told."""

import json
import logging
import math
import pathlib
import tempfile

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from bigtrain import main, settings
from bigtrain.runtime import hooks
from bigtrain.settings import ConfigError


def make(workdir="w", **entries):
  config = settings.Config({"hooks": entries})
  made = hooks.from_config(config, workdir)
  assert config.unread() == []
  return made


# Small numbers, so that equal values and exact tolerances come up.
VALUES = st.one_of(
  st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf])
)
HISTORIES = st.lists(VALUES, max_size=12)


def should_stop(values, mode, patience, atol, rtol):
  """The rule as its docstring says it, on the whole history."""
  if len(values) < patience + 1:
    return False
  for i in range(len(values) - patience, len(values)):
    before, now = values[i - 1], values[i]
    better = before - now if mode == "min" else now - before
    if better > atol + rtol * abs(before):
      return False
  return True


@given(
  HISTORIES,
  st.sampled_from(["min", "max"]),
  st.integers(1, 4),
  st.sampled_from([0.0, 0.5, 1.0]),
  st.sampled_from([0.0, 0.5]),
  st.data(),
)
def test_early_stopping_on_any_history(
  values, mode, patience, atol, rtol, data
):
  def start():
    entry = dict(
      type="early_stopping",
      metric="val/x",
      mode=mode,
      patience=patience,
      atol=atol,
      rtol=rtol,
    )
    return make(early=entry)

  running = start()
  for i, value in enumerate(values):
    if data.draw(st.booleans(), label=f"restart before {i}"):
      saved = json.loads(json.dumps(running.state()))
      running = start()
      running.restore(saved)
    # Rows of training, and of other evaluations, come in between.
    assert running.after_step(i, {"step": i, "loss": 0.0}) is None
    assert running.after_step(i, {"step": i, "other/x": 0.0}) is None
    stop = running.after_step(i, {"step": i, "val/x": value})
    expected = should_stop(values[: i + 1], mode, patience, atol, rtol)
    assert (stop is not None) == expected
    if stop:
      assert not stop.failure
      assert "'early'" in stop.reason and "val/x" in stop.reason


@given(
  st.lists(
    st.dictionaries(st.sampled_from(["loss", "val/a", "val/b"]), VALUES),
    max_size=6,
  ),
  st.sampled_from([None, "val/a", ["loss", "val/b"]]),
)
def test_stop_on_nan_on_any_history(rows, metrics):
  running = make(nan=dict(type="stop_on_nan", metrics=metrics))
  watched = [metrics] if isinstance(metrics, str) else metrics
  watched = watched or ["loss", "val/a", "val/b"]
  for i, row in enumerate(rows):
    stop = running.after_step(i, {"step": i, "count": 3, **row})
    bad = [k for k in watched if k in row and not math.isfinite(row[k])]
    assert (stop is not None) == bool(bad)
    if stop:
      assert stop.failure
      assert any(name in stop.reason for name in bad)


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good")])
def test_a_failure_never_passes_for_a_success(order):
  entries = {
    "good": dict(type="early_stopping", metric="loss", patience=1),
    "bad": dict(type="stop_on_nan"),
  }
  running = make(**{name: entries[name] for name in order})
  assert running.after_step(1, {"step": 1, "loss": 1.0}) is None
  stop = running.after_step(2, {"step": 2, "loss": math.nan})
  assert stop.failure and "'bad': loss is nan at step 2" in stop.reason


# Metrics that are not there.


def warnings(caplog, *rows, metric="val/los"):
  entry = dict(type="early_stopping", metric=metric)
  config = dict(hooks={"early": entry}, evals={"val": {}, "test": {}})
  running = hooks.from_config(settings.Config(config), "w")
  with caplog.at_level(logging.WARNING, logger="absl"):
    for row in rows:
      assert running.after_step(row["step"], row) is None
  return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_a_metric_that_never_comes_is_told_once_with_the_nearest(caplog):
  training = {"step": 1, "loss": 1.0}
  evaluation = {"step": 1, "val/loss": 1.0, "val/acc": 1.0}
  (message,) = warnings(caplog, training, evaluation, training, evaluation)
  assert "'val/los' is not in the rows. Did you mean 'val/loss'?" in message


def test_rows_of_another_kind_are_no_reason_to_warn(caplog):
  training, other = {"step": 1, "loss": 1.0}, {"step": 1, "test/los": 1.0}
  assert warnings(caplog, training, other, training) == []


def test_a_metric_of_training_that_never_comes(caplog):
  (message,) = warnings(caplog, {"step": 1, "loss": 1.0}, metric="los")
  assert "'los' is not in the rows. Did you mean 'loss'?" in message


def test_a_metric_that_is_no_number(caplog):
  (message,) = warnings(caplog, {"step": 1, "val/los": "much"})
  assert "'val/los' is not a number" in message


def test_a_metric_of_an_evaluation_that_there_is_not(caplog):
  for entry, told in (
    (dict(type="early_stopping", metric="vall/loss"), ["'vall/loss'"]),
    (dict(type="stop_on_nan", metrics=["loss", "tst/a"]), ["'tst/a'"]),
    (dict(type="checkpoint_best", metric="val/sub/loss"), []),
    (dict(type="stop_on_nan", metrics="grad_rms/head/kernel"), []),
  ):
    caplog.clear()
    config = settings.Config({"hooks": {"h": entry}, "evals": {"val": {}}})
    with caplog.at_level(logging.WARNING, logger="absl"):
      hooks.from_config(config, "w")
    found = [r.getMessage() for r in caplog.records]
    assert len(found) == len(told)
    assert all(name in text for name, text in zip(told, found))
    assert all("config.hooks.h" in text for text in found)


# Rows, seen once each; decisions, taken once.


def test_a_row_that_a_resumed_run_shows_again_counts_once():
  entry = dict(type="early_stopping", metric="val/x", patience=2)
  running = make(early=entry)
  running.after_step(1, {"step": 1, "val/x": 1.0})
  running.after_step(2, {"step": 2, "loss": 1.0, "val/x": 1.0})
  saved = json.loads(json.dumps(running.state()))
  again = make(early=entry)
  again.restore(saved)
  assert again.after_step(2, {"step": 2, "val/x": 1.0}) is None
  # What came after the checkpoint is new.
  assert again.after_step(2, {"step": 2, "other/x": 1.0}) is None
  assert again.after_step(3, {"step": 3, "val/x": 1.0}) is not None


def test_a_stop_is_remembered_until_the_hooks_are_changed():
  entry = dict(type="early_stopping", metric="x", patience=1)
  running = make(early=entry)
  assert running.stopped is None
  running.after_step(1, {"step": 1, "x": 1.0})
  stop = running.after_step(2, {"step": 2, "x": 1.0})
  saved = json.loads(json.dumps(running.state()))
  for changes, expected in (({}, stop), ({"patience": 2}, None)):
    again = make(early=entry | changes)
    again.restore(saved)
    assert again.stopped == expected


# The best checkpoint.


@given(
  st.lists(st.tuples(VALUES, st.booleans(), st.booleans()), max_size=12),
  st.sampled_from(["min", "max"]),
)
def test_the_best_checkpoint_on_any_history(events, mode):
  """The loop as main has it: save, evaluate, perhaps die and come back.

  Of each step: the value of its evaluation, whether a checkpoint is due, and
  whether the process dies afterwards.
  """
  with tempfile.TemporaryDirectory() as workdir:

    def start(state):
      entry = dict(type="checkpoint_best", metric="val/x", mode=mode)
      running = make(workdir, best=entry)
      running.restore(state)
      return running

    running, saves = start({}), {}

    def save(step):
      running.call("before_save", step)
      saves[step] = json.loads(json.dumps(running.state()))
      folder = pathlib.Path(workdir, "checkpoints", f"{step:08d}")
      folder.mkdir(parents=True, exist_ok=True)
      (folder / "manifest.json").touch()

    evaluated, step, deaths = {}, 0, set()
    while step < len(events):
      value, due, dies = events[step]
      step += 1
      running.after_step(step, {"step": step, "loss": 0.0})
      if due:
        save(step)
      running.after_step(step, {"step": step, "val/x": value})
      evaluated[step] = value
      if running.wants_save(step) and step not in saves:
        save(step)
      # The rule, on all that was evaluated up to here.
      known = [s for s in evaluated if not math.isnan(evaluated[s])]
      pick = min if mode == "min" else max
      best = pick(known, key=evaluated.get, default=None)
      assert running.keep_steps() == ({best} if known else set())
      if known:
        assert best in saves
        with open(f"{workdir}/best_best.json") as file:
          told = json.load(file)
        assert told == {
          "step": best,
          "metric": "val/x",
          "value": evaluated[best],
        }
      if dies and step not in deaths:
        deaths.add(step)
        step = max(saves, default=0)
        running = start(saves.get(step, {}))
        evaluated = {s: v for s, v in evaluated.items() if s <= step}
        if step in evaluated:  # As main does for a row that is there.
          row = {"step": step, "val/x": evaluated[step]}
          running.after_step(step, row)


def test_a_metric_of_training_counts_where_the_step_is_saved(tmp_path):
  entry = dict(type="checkpoint_best", metric="loss")
  running = make(str(tmp_path), best=entry)
  running.after_step(1, {"step": 1, "loss": 1.0})  # Step 2 is under way.
  assert not running.wants_save(2) and running.keep_steps() == set()
  running.after_step(4, {"step": 4, "loss": 2.0})
  running.call("before_save", 4)
  assert running.keep_steps() == {4}
  running.after_step(6, {"step": 6, "loss": 0.5})
  assert not running.wants_save(7) and running.keep_steps() == {4}


def test_a_best_checkpoint_that_is_gone_is_told(tmp_path, caplog):
  entry = dict(type="checkpoint_best", metric="val/x")
  running = make(str(tmp_path), best=entry)
  for step, value in ((1, 1.0), (2, 3.0)):
    running.call("before_save", step)
    running.after_step(step, {"step": step, "val/x": value})
  running.call("before_save", 3)
  again = make(str(tmp_path), best=entry)
  with caplog.at_level(logging.WARNING, logger="absl"):
    again.restore(running.state())  # The folder has no checkpoint of step 1.
  assert "of step 1 with val/x 1, is no longer there" in caplog.text
  again.after_step(3, {"step": 3, "val/x": 2.0})
  assert again.keep_steps() == {3}


def test_the_best_checkpoint_of_a_run_outlives_the_newer_ones(
  tiny_config, tmp_path
):
  """In main, and over a resume."""
  val = tiny_config()["evals"]["val"] | {"log_steps": 2}
  best = dict(type="checkpoint_best", metric="val/loss")
  config = tiny_config(
    {"keep_ckpts": 1, "evals": {"val": val}, "hooks": {"best": best}, "lr": 0.1}
  )
  # Too fast a learning rate: step 2, where no checkpoint is due, is best.
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [2, 3]
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  losses = {s: row["val/loss"] for s, row in rows.items() if "val/loss" in row}
  assert min(losses, key=losses.get) == 2
  assert tiny.checkpoint_steps(tmp_path) == [2, 6]
  with open(tmp_path / "best_best.json") as file:
    assert json.load(file)["value"] == losses[2]


def test_a_result_that_is_not_finite_fails_a_run(tiny_config, tmp_path):
  path = "tiny.mine"
  config = tiny_config(
    {
      "task": path,
      "model_name": path,
      "model": {},
      "input.data": dict(type=path, length=64),
      "evals": {
        "own": dict(type=path, pred="shifted", at=math.nan, log_steps=2)
      },
      "hooks": {"nan": dict(type="stop_on_nan", metrics="own/out")},
    }
  )
  with pytest.raises(RuntimeError, match="'nan': own/out is nan at step 2"):
    main.train(config, str(tmp_path))
  assert max(tiny.rows(tmp_path)) == 2


# Users' own.

seen = []


def note(step, row, *, at=None, tag=""):
  """A user's function."""
  seen.append((step, dict(row), tag))
  return "enough" if step == at else None


class Own:
  """A user's class, with all of the methods."""

  failure = True

  def __init__(self, limit):
    self.limit, self.calls = limit, []

  def before_train(self, step):
    self.calls.append(("before_train", step))

  def before_step(self, step):
    self.calls.append(("before_step", step))

  def after_step(self, step, row):
    return "too much" if row.get("x", 0) > self.limit else None

  def after_train(self, step):
    self.calls.append(("after_train", step))

  def state(self):
    return {"calls": self.calls}

  def restore(self, state):
    self.calls = [tuple(call) for call in state["calls"]]


class Nothing:
  """A user's class with none of them."""


def test_a_function_by_its_path():
  seen.clear()
  function = f"{__name__}.note"
  running = make(c=dict(type="call", function=function, at=2, tag="t"))
  assert running.after_step(1, {"step": 1}) is None
  stop = running.after_step(2, {"step": 2, "loss": 1.0})
  assert stop == hooks.Stop("hook 'c': enough", False)
  assert seen == [(1, {"step": 1}, "t"), (2, {"step": 2, "loss": 1.0}, "t")]


def test_a_class_by_its_path():
  entries = dict(
    own=dict(type=f"{__name__}.Own", limit=3),
    no=dict(type=f"{__name__}.Nothing"),
  )
  running = make(**entries)
  assert len(running) == 2
  running.call("before_train", 0)
  running.call("before_step", 1)
  running.call("after_train", 1)
  assert running.after_step(1, {"step": 1, "x": 3}) is None
  stop = running.after_step(2, {"step": 2, "x": 4})
  assert stop == hooks.Stop("hook 'own': too much", True)
  saved = json.loads(json.dumps(running.state()))
  assert list(saved["hooks"]) == ["own"]
  again = make(**entries)
  again.restore(saved)
  assert json.loads(json.dumps(again.state())) == saved
  # A hook that is new since the checkpoint, and one that is gone.
  make(new=dict(type=f"{__name__}.Own", limit=1)).restore(saved)


def test_no_hooks():
  config = settings.Config({})
  none = hooks.from_config(config, "w")
  assert len(none) == 0
  none.call("before_step", 1)
  assert none.after_step(1, {"step": 1, "loss": math.nan}) is None
  none.restore(none.state())


@pytest.mark.parametrize(
  ("entry", "message"),
  [
    (dict(type="early_stoping"), r"hooks.h.type: .* mean 'early_stopping'"),
    (dict(), r"hooks.h.type: no hook None. There are: call, checkpoint_best"),
    (3, r"hooks.h: expected a dict, got 3"),
    (dict(type="call", function="nodots"), r"package.module.name"),
    (dict(type="call"), r"hooks.h.function: missing"),
    (dict(type="test_hooks.Onw"), r"h.type: test_hooks has no 'Onw'.*'Own'"),
    (dict(type="test_hooks.Own"), r"config.hooks.h.limit: missing"),
    (dict(type="early_stopping"), r"config.hooks.h.metric: missing"),
    (
      dict(type="early_stopping", metric="x", mode="mn"),
      r"mode: no mode 'mn'. Did you mean 'min'",
    ),
    (
      dict(type="early_stopping", metric="x", patience=0),
      r"patience: expected at least 1, got 0",
    ),
    (dict(type="profile", workdir="x"), r"hooks.h.workdir: unknown key"),
    (
      dict(type="checkpoint_best", metric="x", mode="mxa"),
      r"checkpoint_best.mode: no mode 'mxa'. Did you mean 'max'",
    ),
    (dict(type="profile", strt=1), r"hooks.h.strt: .* mean 'start'"),
  ],
)
def test_mistakes(entry, message):
  with pytest.raises(ConfigError, match=message):
    make(h=entry)


# Profiles.


@pytest.fixture
def traces(monkeypatch):
  """Begins and ends of traces."""
  events = []
  monkeypatch.setattr(
    hooks.jax.profiler, "start_trace", lambda folder: events.append(folder)
  )
  monkeypatch.setattr(
    hooks.jax.profiler, "stop_trace", lambda: events.append("stop")
  )
  return events


@pytest.mark.parametrize(
  ("first", "last", "expected"),
  [
    (1, 9, {3: "w/profile", 5: "stop"}),
    (1, 4, {3: "w/profile", 4: "stop"}),  # The run ends inside of it.
    (1, 2, {}),
    (4, 9, {}),  # A restart has missed its beginning.
    (7, 9, {}),
  ],
)
def test_a_profile_is_of_the_steps_it_says(traces, first, last, expected):
  running = make(p=dict(type="profile", start=3, steps=2))
  found = {}
  for step in range(first, last + 1):
    running.call("before_step", step)
    if traces:
      found[step] = traces.pop()
    assert not traces
  running.call("after_train", last)
  if traces:
    found[last] = traces.pop()
  assert found == expected
