"""Profiles."""

import jax
import pytest
from tiny import hooking

from bigtrain import main
from bigtrain.settings import ConfigError


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
def test_the_traced_steps(traces, first, last, expected):
  running = hooking.build(p=dict(type="profile", start=3, steps=2))
  events = {}
  for step in range(first, last + 1):
    running.call("before_step", step)
    if traces:
      events[step] = traces.pop()
    assert not traces
  running.call("after_train", last)
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
