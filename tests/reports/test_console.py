"""Progress bars on pseudo-terminals, and plain lines."""

import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import types

import pytest
from support import cases

from bigtrain.reports import console

ROW = {"step": 50, "loss": 0.4312, "lr": 1e-3, "examples_per_sec": 8123.4}


def test_training_line():
  row = ROW | {
    "eta_secs": 4000.0,
    "mfu": 0.4567,
    "accuracy": 0.5,
    "host_rss_bytes": 10**9,
    "account/step_secs": 5.0,
    "note": "text",
  }
  assert console.training_line(row, 200) == (
    "step 50/200 (25.0%) loss 0.4312 accuracy 0.5 lr 1e-3 8,123 examples/s "
    "mfu 45.7% eta 1h06m"
  )
  row["tokens_per_sec"] = 1234567.8
  assert "1,234,568 tokens/s" in console.training_line(row, 200)


def test_long_lines_are_cut():
  many = {f"m{i}": 0.5 for i in range(40)}
  line = console.training_line(ROW | many, 200)
  assert "m3 0.5" in line and "m4" not in line
  results = {f"val/m{i}": 0.5 for i in range(40)}
  line = console.evaluation_line({"step": 50} | results, 200)
  assert line.endswith("val/m11 0.5 and 28 more")


def test_numbers_that_are_not_finite():
  row = {"step": 50, "loss": float("nan"), "lr": 0.0}
  assert console.training_line(row, 0) == "step 50/0 loss nan lr 0"


def test_other_processes_show_nothing(caplog):
  with caplog.at_level(logging.INFO):
    shown = console.Console(10, process_index=1, bar=True)
    shown.status("compiling")
    shown.step(1)
    shown.entry(ROW)
    shown.evaluation_progress(1, 2)
    shown.close()
  assert not caplog.records


# A shell makes its background processes ignore interrupts.
_OBEY_INTERRUPTS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def run_in_terminal(code, *, then=None, width=100):
  """Runs code on a pseudo-terminal; returns (its output, exit code)."""
  main, other = pty.openpty()
  env = os.environ | {"TERM": "xterm", "COLUMNS": str(width), "LINES": "24"}
  process = subprocess.Popen(
    [sys.executable, "-c", _OBEY_INTERRUPTS + textwrap.dedent(code)],
    stdin=other,
    stdout=other,
    stderr=other,
    env=env,
  )
  os.close(other)
  shown = b""
  deadline = time.monotonic() + 60
  while time.monotonic() < deadline:
    if select.select([main], [], [], 0.2)[0]:
      try:
        shown += os.read(main, 65536)
      except OSError:  # The other end is closed.
        break
    if then and b"now" in shown:
      process.send_signal(then)
      then = None
  os.close(main)
  return shown.decode(), process.wait(timeout=60)


SCRIPT = """
import sys, time
from absl import flags, logging
from bigtrain.reports import console
flags.FLAGS(["test"])  # As app.run does; before that absl logs elsewhere.
logging.use_absl_handler()
logging.set_verbosity(logging.INFO)
shown = console.Console(200)
try:
  shown.status("compiling")
  time.sleep(0.6)
  shown.status("training")
  shown.entry(
    dict(step=50, loss=0.4312, examples_per_sec=8123.4, eta_secs=80.0)
  )
  shown.step(60)
  logging.warning("a message in between")
  print("a print in between")
  time.sleep(0.6)
  shown.status("evaluating val")
  shown.evaluation_progress(3, 40)
  time.sleep(0.6)
  shown.entry({"step": 60, "val/acc": 0.975})
  LAST
finally:
  shown.close()
logging.info("the bar is gone")
"""


def plain(shown):
  return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_the_bar_on_a_terminal():
  shown, code = run_in_terminal(SCRIPT.replace("LAST", "pass"))
  assert code == 0
  # Messages are alone on their lines, without a rest of the bar.
  lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain(shown))]
  message = r"W\d{4} [^━]*\] a message in between"
  assert any(re.fullmatch(message, line) for line in lines)
  assert "a print in between" in lines
  assert "step 60/200 (30.0%) val/acc 0.975" in lines
  assert any(line.endswith("the bar is gone") for line in lines)
  assert any(re.fullmatch(r"compiling +━+ +0/200 0%", line) for line in lines)
  training = r"training +[━╸╺]+ +60/200 30% +loss 0.4312 +8,123 examples/s +"
  assert any(re.fullmatch(training + "1m[12]?[0-9]s left", x) for x in lines)
  assert any(line.startswith("evaluating val 3/40") for line in lines)
  # The cursor is visible while the bar is shown: a kill must not hide it.
  assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
  assert shown.index("\x1b[?25h") < shown.index("training")


@pytest.mark.parametrize("width", cases.quick([25, 40, 60], 25))
def test_the_bar_fits_narrow_terminals(width):
  shown, _ = run_in_terminal(SCRIPT.replace("LAST", "pass"), width=width)
  lines = re.split(r"[\r\n]+", plain(shown))
  bars = [x for x in lines if x.startswith(("training", "evaluating val 3"))]
  assert bars and all(len(line.rstrip()) < width for line in bars)


def test_an_interrupt_restores_the_terminal():
  last = "print('now'); time.sleep(60)"
  shown, code = run_in_terminal(
    SCRIPT.replace("LAST", last), then=signal.SIGINT
  )
  assert code in (1, -signal.SIGINT, 130)
  assert "KeyboardInterrupt" in shown
  assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
  # The interpreter prints the traceback after the bar.
  assert "\nKeyboardInterrupt" in plain(shown).replace("\r", "")


def test_no_bar_without_a_terminal():
  code = """
    from absl import logging
    from bigtrain.reports import console
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    shown = console.Console(200)
    shown.entry(dict(step=50, loss=0.5))
    shown.close()
  """
  process = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)],
    capture_output=True,
    text=True,
    check=True,
  )
  assert process.stderr.endswith("] step 50/200 (25.0%) loss 0.5\n")
  assert "\x1b" not in process.stderr


def test_plain_lines_if_the_bar_fails(monkeypatch, caplog):
  monkeypatch.setattr(console, "_Bar", lambda total: 1 / 0)
  with caplog.at_level(logging.INFO):
    shown = console.Console(200, bar=True)
    shown.status("compiling")
    shown.entry(ROW)
    shown.close()
  messages = [r.getMessage() for r in caplog.records]
  assert messages[0].startswith("No progress bar: ZeroDivisionError")
  assert messages[1] == "compiling"
  assert messages[2].startswith("step 50/200")


def test_a_notebook_shows_a_table_that_changes(monkeypatch, capsys):
  drawn = []

  def display(shown, display_id):
    assert display_id is True
    drawn.append((repr(shown), shown._repr_html_()))
    return types.SimpleNamespace(
      update=lambda s: drawn.append((repr(s), s._repr_html_()))
    )

  shell = types.SimpleNamespace(kernel=object())
  ipython = types.SimpleNamespace(get_ipython=lambda: shell)
  monkeypatch.setitem(sys.modules, "IPython", ipython)
  module = types.SimpleNamespace(display=display)
  monkeypatch.setitem(sys.modules, "IPython.display", module)
  shown = console.Console(100)
  shown.status("compiling")
  assert "compiling | 0/100 0%" in drawn[-1][1]
  for step in range(10, 101, 10):
    row = {"step": step, "loss": 1 / step, "a<b": 0.5, "lr": 0.1}
    shown.entry(row | {"examples_per_sec": 1000.0, "eta_secs": 5.0})
  shown.entry({"step": 100, "val/acc": 0.9})
  assert capsys.readouterr().out == "step 100/100 (100.0%) val/acc 0.9\n"
  text, html = drawn[-1]
  assert "<td>a&lt;b</td>" in html and html.count("<tr>") == 9
  assert "<td>0.025</td>" in html and "<td>0.05</td>" not in html
  assert "step 100/100 (100.0%) loss 0.01 a<b 0.5 lr 0.1" in text
  assert '<progress value="100" max="100">' in html and "5s left" in html
  shown.close()
  assert "finished | 100/100 100%" in drawn[-1][1]


def test_numbers_and_durations_are_short():
  numbers = [console.number(x) for x in (0.001, 0.00032, 0.12345, 8123.4, 12)]
  assert numbers == ["1e-3", "3.2e-4", "0.1235", "8,123", "12"]
  durations = [console.duration(secs) for secs in (7.4, 80, 3725, 100000)]
  assert durations == ["7s", "1m20s", "1h02m", "1d03h"]
