"""The supervisor, with small commands; faults/ runs the program under it."""

import signal
import sys
import time

import pytest
from support import processes

from bigtrain.tools import supervise

# Ends its n-th start with the n-th of the codes; "kill" is a SIGKILL, and "+"
# a new row before code 1.
CODES = """
echo start >>starts
n=$(wc -l <starts)
code=${!n}
case "$code" in
  +) echo "{\\"step\\": $n}" >>metrics.jsonl; exit 1;;
  kill) kill -9 $$;;
esac
exit "$code"
"""
# Saves on SIGTERM, like the program.
SAVES = """
trap 'echo saved >>notes; exit 75' TERM
trap 'echo profile >>notes' USR2
echo $$ >started
while true; do sleep 0.02; done
"""


@pytest.fixture
def start(tmp_path):
  """start(script, *arguments, options): a supervisor of a bash script."""
  with processes.Processes(tmp_path) as started:

    def call(script, *arguments, options=()):
      command = [sys.executable, "-m", "bigtrain.tools.supervise"]
      command += ["--wait_secs=0.01", *options, "--"]
      command += ["bash", "-c", f"cd {tmp_path}; {script}", "bash", *arguments]
      return started.start([*command, f"--workdir={tmp_path}"])

    yield call


@pytest.mark.parametrize(
  "codes, code",
  [
    (["75", "1", "kill", "0"], 0),
    (["1", "2"], 2),
    (["75", "127"], 127),
    (["+", "1", "+", "1", "+", "1", "1"], 1),  # Two in a row are too many.
    (["kill"] * 4, 128 + signal.SIGKILL),
  ],
)
def test_starts_again_until_an_end_or_a_limit(start, tmp_path, codes, code):
  limit = 4 if "kill" in codes else 2
  process = start(CODES, *codes, "0", options=[f"--failures={limit}"])
  assert process.wait() == code, process.text()
  assert (tmp_path / "starts").read_text() == "start\n" * len(codes)
  lines = process.lines("supervise: ")
  if "+" in codes:
    assert lines.pop() == (
      "giving up: 2 start(s) in a row made no progress beyond step 5; start 7 "
      "ended with code 1 after 0 s. Its last lines give the reason."
    )
    assert "(0 of 2 starts without progress)" in lines[0]
    assert "newest step 1; starting again in 0.01 s (1 of 2" in lines[1]
  if codes[-1] == "kill":
    assert lines.pop().startswith("giving up: 4 start(s) in a row made no")
    for line, secs in zip(lines, (0.01, 0.02, 0.04), strict=True):
      assert f"starting again in {secs} s" in line
  assert len(lines) == len(codes) - 1  # One for each restart.


def test_a_scheduler_may_requeue_instead(start, tmp_path):
  process = start(CODES, "1", "75", options=["--when_preempted=end"])
  assert process.wait() == 75, process.text()
  assert (tmp_path / "starts").read_text() == "start\n" * 2


def test_signals_are_passed_on_and_end_it(start, tmp_path):
  process = start(SAVES)
  process.until_file(tmp_path / "started")
  process.send(signal.SIGUSR2)
  process.until_file(tmp_path / "notes")
  process.send(signal.SIGTERM)
  assert process.wait(30) == 75, process.text()
  assert (tmp_path / "notes").read_text() == "profile\nsaved\n"


def test_a_signal_during_the_wait_ends_it(start):
  process = start(CODES, "1", options=["--wait_secs=60"])
  process.until_log_has("starting again in 60 s")
  process.send(signal.SIGTERM)
  assert process.wait(10) == 1


def is_alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def test_a_killed_supervisor_leaves_no_process(start, tmp_path):
  process = start(SAVES)
  process.until_file(tmp_path / "started")
  pid = int((tmp_path / "started").read_text())
  process.kill()
  deadline = time.monotonic() + 30
  while is_alive(pid) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not is_alive(pid)
  assert (tmp_path / "notes").read_text() == "saved\n"


def test_what_a_command_leaves_behind_is_killed(start, tmp_path):
  process = start("sleep 300 & echo $! >left; exit 2")
  assert process.wait() == 2
  assert not is_alive(int((tmp_path / "left").read_text()))


@pytest.mark.parametrize(
  "words, message",
  [
    ([], "no command: expected -- python -m bigtrain.main"),
    (["--", "python", "x.py"], "expected a command with --workdir=DIR"),
    (["--failures=0", "--", "x", "--workdir=r"], "at least 1, got 0"),
    (["--", "/no/such", "--workdir=r"], "/no/such: no such program"),
  ],
)
def test_mistakes_are_reported_in_one_line(words, message, capfd):
  unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
  try:
    assert supervise.main(words) == 2
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
  text = capfd.readouterr().err
  assert text.count("\n") == 1 and message in text
