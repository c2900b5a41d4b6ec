"""Profiles."""

import gzip
import os
import signal
import time

import jax
import numpy as np
import pytest
from tiny import hooking

from bigtrain import main
from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError


@pytest.fixture
def traces(monkeypatch):
  """Records the start and stop of traces."""
  events = []
  monkeypatch.setattr(
    jax.profiler, "start_trace", lambda folder: events.append(folder)
  )
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
  return events


@pytest.mark.parametrize(
  ("first", "last", "expected"),
  [
    (1, 9, {3: "w/profile", 5: "stop"}),
    (1, 4, {3: "w/profile", 4: "stop"}),  # The run ends during the trace.
    (1, 2, {}),
    (4, 9, {}),  # A restart after the first step of the trace.
    (7, 9, {}),
  ],
)
def test_the_traced_steps(traces, first, last, expected, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # Which gets the snapshot of the memory.
  running = hooking.build(p=dict(type="profile", start=3, steps=2))
  events = {}
  for step in range(first, last + 1):
    running.before_step(step)
    if traces:
      events[step] = traces.pop()
    assert not traces
  running.after_train(None, None, None)
  if traces:
    events[last] = traces.pop()
  assert events == expected


def test_a_resumed_run_keeps_the_profile(tiny_config, tmp_path):
  profile = dict(type="profile", start=2, steps=1)
  config = tiny_config({"hooks": {"profile": profile}, "evals": {}})
  main.train(config | {"stop_at_steps": 3}, str(tmp_path))
  traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
  assert len(traces) == 1
  main.train(config, str(tmp_path))
  assert list((tmp_path / "profile").rglob("*.xplane.pb")) == traces


def in_memory(workdir):
  """The strings of a snapshot of the devices' memory."""
  (path,) = (workdir / "profile").glob("memory-0.prof")
  return gzip.decompress(path.read_bytes())


def test_a_device_that_is_out_of_memory_leaves_a_snapshot(tmp_path):
  running = hooking.build(str(tmp_path))
  kept = jax.device_put(np.zeros(12_345, np.float32))
  other = ValueError("RESOURCE_EXHAUSTED")
  running.after_train(ValueError, other, None)
  assert not (tmp_path / "profile").exists()
  error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
  running.after_train(jax.errors.JaxRuntimeError, error, None)
  found = in_memory(tmp_path)
  assert b"buffer" in found and b"test_profile.py" in found
  del kept


def events(workdir):
  """(name, statistics) of the events of a run's traces on the host."""
  return [
    (event.name, dict(event.stats))
    for file in sorted((workdir / "profile").rglob("*.xplane.pb"))
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes
    for line in plane.lines
    for event in line.events
  ]


def test_a_trace_has_the_steps_and_phases(tiny_config, tmp_path):
  profile = dict(type="profile", start=2, steps=3)
  main.train(tiny_config({"hooks": {"profile": profile}}), str(tmp_path))
  found = events(tmp_path)
  steps = [stats["step_num"] for name, stats in found if name == "train"]
  assert sorted(steps) == [2, 3, 4]
  assert b"buffer" in in_memory(tmp_path)
  phases = {name: stats for name, stats in found if "step" in stats}
  assert phases["save"]["step"] == phases["evaluation val"]["step"] == 3


def ask_by_file(workdir):
  (workdir / "profile.request").touch()


def ask_by_signal(workdir):
  os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("ask", [ask_by_file, ask_by_signal])
def test_a_running_job_is_asked_for_a_profile(traces, tmp_path, ask):
  before = {n: signal.getsignal(n) for n in signal.valid_signals() if n < 16}
  process.catch_signals()
  try:
    running = hooking.build(str(tmp_path))
    running.before_step(1)
    assert not traces
    ask(tmp_path)
    # The file is found a second later.
    deadline = time.monotonic() + 20
    step = 2
    while not traces and time.monotonic() < deadline:
      running.before_step(step)
      step += 1
      time.sleep(0.05)
    first = step - 1
    assert traces == [str(tmp_path / "profile")]
    assert not (tmp_path / "profile.request").exists()
    for step in range(first + 1, first + 5):
      running.before_step(step)
    assert len(traces) == 1
    running.before_step(first + 5)
    assert traces[1:] == ["stop"]
  finally:
    for number, handler in before.items():
      if handler is not None and number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, handler)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(workdir="x"), r"hooks.h.workdir: unknown key"),
    (dict(context="x"), r"hooks.h.context: unknown key"),
    (dict(strt=1), r"hooks.h.strt: .* mean 'start'"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    hooking.build(h=dict(type="profile", **options))
