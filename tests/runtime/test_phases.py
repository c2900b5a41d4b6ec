"""Phases of the loop: watchdog, console and clock change together."""

import contextlib

import pytest

from bigtrain.cluster import process, watchdog
from bigtrain.reports import chrono, console
from bigtrain.runtime import phases


class Recorder:
  """Stands in for watchdog, console and clock; notes calls in order."""

  def __init__(self):
    self.calls = []

  def enter(self, phase, step):
    self.calls.append((phase, step))

  def beat(self):
    self.calls.append("beat")

  def status(self, text):
    self.calls.append(text)

  def evaluation_progress(self, done, batches):
    self.calls.append(f"{done}/{batches}")

  @contextlib.contextmanager
  def account(self, name):
    self.calls.append(f"+{name}")
    try:
      yield
    finally:
      self.calls.append(f"-{name}")


@pytest.fixture
def recorder():
  return Recorder()


@pytest.fixture
def phase(recorder):
  return phases.Phases(recorder, recorder, recorder)


@pytest.mark.parametrize(
  "name, account, status",
  [
    ("compile", "compile", "compiling"),
    ("evaluation", "eval", "evaluating"),
    ("save", "save", "saving"),
  ],
)
def test_a_phase_begins_and_training_follows(
  phase, recorder, name, account, status
):
  with phase(name, 7):
    assert recorder.calls == [(name, 7), status, f"+{account}"]
    recorder.calls.clear()
  assert recorder.calls == [f"-{account}", ("step", 7), "training"]


def test_the_status_names_the_evaluation(phase, recorder):
  with phase("evaluation", 7, "val"):
    assert "evaluating val" in recorder.calls


def test_a_nested_phase_returns_to_the_outer_one(phase, recorder):
  with phase("evaluation", 7, "val"):
    with phase("save", 7):
      recorder.calls.clear()
    assert recorder.calls == ["-save", ("evaluation", 7), "evaluating val"]
    recorder.calls.clear()
  assert recorder.calls == ["-eval", ("step", 7), "training"]


def test_a_phase_ends_after_an_error(phase, recorder):
  with pytest.raises(OSError, match="disk full"):
    with phase("save", 7):
      raise OSError("disk full")
  assert recorder.calls[-3:] == ["-save", ("step", 7), "training"]
  recorder.calls.clear()
  with phase("save", 8):
    pass
  assert recorder.calls[-2:] == [("step", 8), "training"]


def test_a_step_begins(phase, recorder):
  phase.step(8)
  assert recorder.calls == [("step", 8), "training"]


def test_evaluation_progress_restarts_the_limit(phase, recorder):
  with phase("evaluation", 7, "val"):
    recorder.calls.clear()
    phase.evaluation_progress(1, 4)
    assert recorder.calls == ["beat", "1/4"]


def test_a_signal_interrupts_an_evaluation(phase, recorder, monkeypatch):
  monkeypatch.setattr(process, "_signals", [15])
  with pytest.raises(process.Preempted, match="evaluating step 7, which is"):
    with phase("evaluation", 7, "val"):
      phase.evaluation_progress(1, 4)
  assert recorder.calls[-1] == "training"


def test_an_unknown_phase_is_an_error(phase, recorder):
  with pytest.raises(ValueError, match="phase 'sve': expected one of compile"):
    with phase("sve", 7):
      pass
  assert recorder.calls == []


def test_with_the_real_watchdog_console_and_clock(tmp_path):
  now = [0.0]
  clock = chrono.Chrono(
    batch_size=1, total_steps=10, clock=lambda: now[0], memory=dict
  )
  dog = watchdog.Watchdog(None, str(tmp_path))
  phase = phases.Phases(dog, console.Console(10, bar=False), clock)
  with phase("compile", 0):
    now[0] += 2
  clock.start(0)
  clock.warm(0)
  phase.step(1)
  now[0] += 3
  with phase("evaluation", 1, "val"):
    now[0] += 5
    with phase("save", 1):
      now[0] += 7
  accounts = {name: secs for name, secs in clock.accounts().items() if secs}
  assert accounts == {"compile": 2, "step": 3, "eval": 5, "save": 7}


def test_every_phase_has_a_limit_and_an_account():
  assert set(phases._PHASES) < set(watchdog.LIMITS)
  accounts = {account for _, account in phases._PHASES.values()}
  assert accounts < set(chrono.ACCOUNTS)
