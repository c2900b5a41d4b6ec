"""Prefetch: order of items, errors, and the end of its thread."""

import gc
import itertools
import sys
import threading
import time

import pytest
from support import processes

from bigtrain.inputs.transfer import Prefetch


def running(name):
  return [t for t in threading.enumerate() if t.name == name]


def gone(name, secs=5.0):
  end = time.monotonic() + secs
  while running(name) and time.monotonic() < end:
    time.sleep(0.01)
  return not running(name)


def test_items_come_in_order():
  assert list(Prefetch(lambda: iter(range(100)), 3)) == list(range(100))


def test_an_error_comes_after_the_items_before_it():
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


def test_the_thread_runs_ahead_by_at_most_the_depth():
  made = []

  def make():
    for i in range(100):
      made.append(i)
      yield i

  iterator = Prefetch(make, 2)
  assert next(iterator) == 0
  time.sleep(0.2)
  # One was taken, two wait, the thread holds one.
  assert len(made) <= 4
  iterator.close()


def test_close_ends_thread_and_generator():
  closed = threading.Event()

  def make():
    try:
      yield from itertools.count()
    finally:
      closed.set()

  iterator = Prefetch(make, 2, "midway")
  next(iterator)
  start = time.monotonic()
  iterator.close()
  assert time.monotonic() - start < 20
  assert closed.is_set()
  assert not running("midway")
  iterator.close()
  with pytest.raises(StopIteration):
    next(iterator)


def test_the_thread_ends_with_the_last_reference():
  Prefetch(itertools.count, 2, "forgotten")
  gc.collect()
  assert gone("forgotten")


def test_a_program_can_exit_with_an_open_iterator():
  code = """
import itertools, sys
from bigtrain.inputs.transfer import Prefetch
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
    result = processes.run([sys.executable, "-c", code, how])
    assert result.returncode == rc
    assert result.stdout == "closed\n"
    assert result.stderr == ""
