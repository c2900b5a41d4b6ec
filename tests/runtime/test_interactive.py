"""Training in a notebook or in a script."""

import logging
import signal
import sys
import types

import pytest
from absl import logging as absl_logging

from bigtrain.cluster import process
from bigtrain.reports import console
from bigtrain.runtime import interactive


@pytest.fixture(autouse=True)
def pythons_own_handler():
  """Ctrl-C as in a script, also where the tests run in the background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_asks_for_a_save_and_the_second_is_one(capsys):
  with interactive.session():
    signal.raise_signal(signal.SIGINT)
    assert process.received() == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert "a second Ctrl-C" in capsys.readouterr().out
  assert not process.received()
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_run_ends_like_any_interrupted_code():
  with (
    pytest.raises(KeyboardInterrupt, match="saved step 3") as e,
    interactive.session(),
  ):
    signal.raise_signal(signal.SIGINT)
    raise process.Preempted("saved step 3")
  (line,) = e.value._render_traceback_()
  assert line == "Interrupted: saved step 3. Call train again to continue."
  assert not process.received()


def test_other_signals_and_the_command_line_are_left_alone(monkeypatch):
  with pytest.raises(process.Preempted), interactive.session():
    raise process.Preempted("by SIGTERM")
  handler = lambda *_: None
  before = signal.signal(signal.SIGINT, handler)
  try:
    with interactive.session():
      assert signal.getsignal(signal.SIGINT) is handler
  finally:
    signal.signal(signal.SIGINT, before)


def test_messages_appear_in_a_notebook(monkeypatch, capsys):
  shell = types.SimpleNamespace(kernel=object())
  ipython = types.SimpleNamespace(get_ipython=lambda: shell)
  monkeypatch.setitem(sys.modules, "IPython", ipython)
  logger = absl_logging.get_absl_logger()
  before = logger.handlers[:], logger.propagate, absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.WARNING)
  try:
    with interactive.session():
      logging.getLogger("absl").info("step %d", 3)
      absl_logging.warning("slow")
      absl_logging.info("\n".join(map(str, range(20))))
    assert absl_logging.get_verbosity() == absl_logging.WARNING
  finally:
    absl_logging.set_verbosity(before[2])
  output = capsys.readouterr()
  assert output.out == "step 3\n0\n...\n19\n"
  assert output.err == "warning: slow\n"
  assert (logger.handlers, logger.propagate) == before[:2]
  shell.kernel = None
  del shell.kernel
  assert not console.in_notebook()
