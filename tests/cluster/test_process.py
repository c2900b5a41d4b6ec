"""Signals, background threads and exit codes of a process."""

import importlib.util
import subprocess
import sys
import threading
import time

import pytest
from support import processes

from bigtrain.cluster import process


def test_background_returns_the_result():
  ran_in = []

  @process.Background
  def work():
    ran_in.append(threading.current_thread())
    return 42

  assert work.result() == 42
  assert work.result() == 42, "again at the second call"
  assert ran_in[0] is not threading.main_thread()


def test_background_returns_none():
  assert process.Background(lambda: None).result() is None


def test_background_raises_the_exception():
  def work():
    raise KeyError("gone")

  background = process.Background(work)
  for _ in range(2):
    with pytest.raises(KeyError, match="gone"):
      background.result()


def test_a_signal_ends_the_wait_but_keeps_a_finished_result(monkeypatch):
  go = threading.Event()
  slow = process.Background(go.wait)
  done = process.Background(lambda: 1)
  done._thread.join()
  monkeypatch.setattr(process, "_signals", [15])
  began = time.monotonic()
  with pytest.raises(process.Preempted, match="SIGTERM received"):
    slow.result()
  assert time.monotonic() - began < 30
  assert done.result() == 1
  go.set()


def test_without_a_signal_nothing_is_preempted(monkeypatch):
  monkeypatch.setattr(process, "_signals", [])
  assert not process.preempted()
  process.check_preempted()


# Real processes; they do not load jax.


HEAD = """
import os, signal, sys, threading, time
from bigtrain.cluster import process
"""


def run(code):
  """(exit code, standard output, standard error)."""
  done = subprocess.run(
    [sys.executable, "-c", HEAD + code],
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


KILL = "os.kill(os.getpid(), signal.{})\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_the_first_signal_is_recorded(name):
  code, out, err = run(
    "process.catch_signals()\n"
    + KILL.format(name)
    + "print(process.preempted())\nprocess.exit_now(process.EXIT_PREEMPTED)"
  )
  assert (code, out) == (75, "True\n")
  assert err.startswith(f"bigtrain: {name}: will finish the step, save and")


@pytest.mark.parametrize(
  ("names", "code"),
  [
    (["SIGTERM", "SIGTERM"], 75),
    (["SIGTERM", "SIGINT"], 130),
    (["SIGINT", "SIGINT"], 130),
  ],
)
def test_the_second_signal_exits_at_once(names, code):
  kills = "".join(map(KILL.format, names))
  exit_code, out, err = run(
    f"process.catch_signals()\n{kills}print('still here')"
  )
  assert (exit_code, out) == (code, "")
  assert f"bigtrain: second signal, {names[1]}: exiting now" in err


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_exit_now_does_not_wait_for_threads_and_keeps_output(code):
  exit_code, out, err = run(
    "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
    "sys.stdout.write('out'); sys.stderr.write('err')\n"
    f"process.exit_now({code})"
  )
  assert (exit_code, out, err) == (code, "out", "err")


def test_importing_is_quick():
  code, out, _ = run(
    "print([m for m in ('jax', 'numpy', 'absl') if m in sys.modules])"
  )
  assert (code, out) == (0, "[]\n")


_AFTER_JAX = """
import jax
index = int(sys.argv[1])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, index)
from bigtrain.config import settings
for _ in range(2):
  process.join_job(settings.Config({}))
print(process.gather(index), process.broadcast(index + 5))
process.exit_now(process.EXIT_OK)
"""


@pytest.mark.slow
def test_processes_that_jax_has_joined_join_through_the_devices():
  port = str(processes.free_port())
  job = [
    subprocess.Popen(
      [sys.executable, "-c", HEAD + _AFTER_JAX, index, port],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in ("0", "1")
  ]
  try:
    for member in job:
      out, err = member.communicate(timeout=120)
      assert member.returncode == 0, err
      assert out.splitlines()[-1] == "[0, 1] 5"
  finally:
    for member in job:
      member.kill()


@pytest.mark.skipif(
  importlib.util.find_spec("jax_plugins") is not None,
  reason="jax has the plugin of an accelerator",
)
def test_devices_that_are_not_there_have_their_line():
  program = (
    "from bigtrain.cluster import process\n"
    "from bigtrain.config import settings\n"
    "process.join_job(settings.Config({}))\n"
  )
  result = processes.run(
    [sys.executable, "-c", program], env={"JAX_PLATFORMS": "cuda"}
  )
  last_line = result.stderr.splitlines()[-1]
  assert "ConfigError: JAX_PLATFORMS=cuda: jax finds no such dev" in last_line
