"""A user's function that is called with every row."""

import sys

import pytest
from tiny import hooking

from bigtrain.config.errors import ConfigError
from bigtrain.runtime import hook_context

rows_seen = []


def note(step, row, *, at=None, tag=""):
  """A user's function."""
  rows_seen.append((step, dict(row), tag))
  return "enough" if step == at else None


def test_a_function_by_its_dotted_path(monkeypatch):
  monkeypatch.setitem(sys.modules, "users.functions", sys.modules[__name__])
  rows_seen.clear()
  function = "users.functions.note"
  running = hooking.build(c=dict(type="call", function=function, at=2, tag="t"))
  assert hooking.show(running, {"step": 1}) is None
  stop = hooking.show(running, {"step": 2, "loss": 1.0})
  assert stop == hook_context.Stop("hook 'c': enough", False)
  expected = [(1, {"step": 1}, "t"), (2, {"step": 2, "loss": 1.0}, "t")]
  assert rows_seen == expected


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(function="nodots"), r"hooks.h.function: .*package.module.name"),
    (dict(), r"hooks.h.function: missing"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    hooking.build(h=dict(type="call", **options))
