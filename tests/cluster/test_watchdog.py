"""Limits that the watchdog learns from a run's steps, and what it clears."""

import socket
import subprocess
import sys
import types

import pytest

from bigtrain.cluster import watchdog

LIMITS = {**watchdog.LIMITS, "step": 3600.0, "step_floor": 5.0}


@pytest.fixture
def dog(tmp_path, monkeypatch):
  """A watchdog whose thread does not run, with a clock that tests set."""
  clock = [0.0]
  time = types.SimpleNamespace(monotonic=lambda: clock[0])
  monkeypatch.setattr(watchdog, "time", time)
  monkeypatch.setattr(watchdog.process, "on_hang", lambda call: None)
  monkeypatch.setattr(watchdog.process, "report_phase", lambda *args: None)
  result = watchdog.Watchdog(None, str(tmp_path))
  result._limits = LIMITS

  def run(steps, secs, phase="step"):
    for _ in range(steps):
      result.enter(phase, result._phase[1] + 1)
      clock[0] += secs

  result.run = run
  return result


@pytest.mark.parametrize(
  "secs, limit, origin",
  [
    (2.0, 40.0, "the median of the last 20 steps is 2 s"),
    (0.1, 5.0, "config.watchdog.step_floor_secs"),
    (1000.0, 3600.0, "config.watchdog.step_secs"),
  ],
)
def test_a_step_may_take_twenty_times_the_median(dog, secs, limit, origin):
  dog.run(20, secs)
  assert dog._limit("step") == (3600.0, "config.watchdog.step_secs")
  dog.run(1, secs)  # Only now have 20 steps ended.
  found, reason = dog._limit("step")
  assert found == pytest.approx(limit) and origin in reason
  assert dog._limit("save") == (LIMITS["save"], "config.watchdog.save_secs")


def test_the_newest_hundred_steps_count_and_nothing_else(dog):
  dog.run(150, 1.0)
  dog.run(150, 50.0, phase="evaluation")
  assert dog._limit("step")[0] == pytest.approx(20.0)
  dog.run(60, 3.0)
  assert dog._limit("step")[0] == pytest.approx(60.0)


def test_a_run_of_an_instant_clears_what_killed_processes_left(tmp_path):
  ended = subprocess.Popen([sys.executable, "-c", ""])
  ended.wait()
  host = socket.gethostname()
  empty = tmp_path / f"stacks-{host}-{ended.pid}.txt"
  full = tmp_path / f"stacks-{host}-{ended.pid}0.txt"
  running = tmp_path / f"stacks-{host}-1.txt"
  for path in (empty, full, running):
    path.write_text("main.py, line 1" if path == full else "")
  watchdog.Watchdog(watchdog.LIMITS, str(tmp_path)).close()
  assert set(tmp_path.iterdir()) == {full, running}
