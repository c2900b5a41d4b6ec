"""The background iterator: order, errors, and that it always ends."""

import gc
import itertools
import subprocess
import sys
import threading
import time

import pytest

from bigtrain.inputs.prefetch import Prefetch


def running(name):
  return [t for t in threading.enumerate() if t.name == name]


def gone(name, secs=5.0):
  end = time.monotonic() + secs
  while running(name) and time.monotonic() < end:
    time.sleep(0.01)
  return not running(name)


def test_yields_all_in_order():
  assert list(Prefetch(lambda: iter(range(100)), 3)) == list(range(100))


def test_an_error_comes_after_what_was_made_before_it():
  def make():
    yield 1
    yield 2
    raise ValueError("broken")

  iterator = Prefetch(make, 5)
  assert [next(iterator), next(iterator)] == [1, 2]
  with pytest.raises(ValueError, match="broken"):
    next(iterator)
  with pytest.raises(StopIteration):
    next(iterator)


def test_an_error_before_the_first_item():
  def make():
    raise KeyError("at once")

  with pytest.raises(KeyError):
    next(Prefetch(make, 1))


def test_runs_ahead_only_so_far():
  made = []

  def make():
    for i in range(100):
      made.append(i)
      yield i

  iterator = Prefetch(make, 2)
  assert next(iterator) == 0
  time.sleep(0.2)
  # One is taken, two wait, one is in the thread's hands.
  assert len(made) <= 4
  iterator.close()


def test_close_midway_ends_thread_and_generator():
  closed = threading.Event()

  def make():
    try:
      yield from itertools.count()
    finally:
      closed.set()

  iterator = Prefetch(make, 2, "midway")
  next(iterator)
  began = time.monotonic()
  iterator.close()
  assert time.monotonic() - began < 2
  assert closed.is_set()
  assert not running("midway")
  iterator.close()
  with pytest.raises(StopIteration):
    next(iterator)


def test_forgotten_iterators_end():
  Prefetch(itertools.count, 2, "forgotten")
  gc.collect()
  assert gone("forgotten")


def test_a_program_ends_with_an_open_iterator():
  code = """
import itertools, sys
from bigtrain.prefetch import Prefetch
def make():
  try:
    yield from itertools.count()
  finally:
    print("closed", flush=True)
iterator = Prefetch(make, 2)
next(iterator)
if sys.argv[1] == "raise":
  raise SystemExit(3)
"""
  for how, rc in (("end", 0), ("raise", 3)):
    done = subprocess.run(
      [sys.executable, "-c", code, how],
      capture_output=True,
      text=True,
      timeout=60,
    )
    assert done.returncode == rc
    assert done.stdout == "closed\n"
    assert done.stderr == ""
