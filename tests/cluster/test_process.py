"""Signals, threads in the background, and how a process ends."""

import subprocess
import sys
import threading
import time

import pytest

from bigtrain.cluster import process


def test_a_result_comes_out_of_the_background():
  ran_in = []

  @process.Background
  def work():
    ran_in.append(threading.current_thread())
    return 42

  assert work.result() == 42
  assert work.result() == 42, "as often as one asks"
  assert ran_in[0] is not threading.main_thread()


def test_nothing_is_a_result_too():
  assert process.Background(lambda: None).result() is None


def test_an_exception_comes_out_of_the_background():
  def work():
    raise KeyError("gone")

  background = process.Background(work)
  for _ in range(2):
    with pytest.raises(KeyError, match="gone"):
      background.result()


def test_a_signal_ends_the_waiting_but_not_a_result_that_is_there(monkeypatch):
  go = threading.Event()
  slow = process.Background(go.wait)
  done = process.Background(lambda: 1)
  done._thread.join()
  monkeypatch.setattr(process, "_signals", [15])
  began = time.monotonic()
  with pytest.raises(process.Preempted, match="SIGTERM received"):
    slow.result()
  assert time.monotonic() - began < 5
  assert done.result() == 1
  go.set()


def test_no_signal_no_preemption(monkeypatch):
  monkeypatch.setattr(process, "_signals", [])
  assert not process.preempted()
  process.check_preempted()


# Real processes from here on; they load neither jax nor anything slow.


def run(code):
  """(exit code, standard output, standard error)."""
  head = "import os, signal, sys, threading, time\n"
  head += "from bigtrain import cluster\n"
  done = subprocess.run(
    [sys.executable, "-c", head + code],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


KILL = "os.kill(os.getpid(), signal.{})\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_the_first_signal_is_noted(name):
  code, out, err = run(
    "cluster.catch_signals()\n"
    + KILL.format(name)
    + "print(cluster.preempted())\ncluster.leave(cluster.EXIT_PREEMPTED)"
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
def test_the_second_signal_ends_the_process_at_once(names, code):
  kills = "".join(map(KILL.format, names))
  found, out, err = run(f"cluster.catch_signals()\n{kills}print('still here')")
  assert (found, out) == (code, "")
  assert f"bigtrain: {names[1]} again: ending at once" in err


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_leaving_waits_for_no_thread_and_loses_no_output(code):
  found, out, err = run(
    "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
    "sys.stdout.write('out'); sys.stderr.write('err')\n"
    f"cluster.leave({code})"
  )
  assert (found, out, err) == (code, "out", "err")


def test_importing_is_quick():
  code, out, _ = run(
    "print([m for m in ('jax', 'numpy', 'absl') if m in sys.modules])"
  )
  assert (code, out) == (0, "[]\n")
