"""Processes join a channel, exchange values, and end together."""

import json
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from support import processes

from bigtrain.cluster import channel, hub


@pytest.fixture
def address():
  """An address with no listener."""
  return "127.0.0.1", processes.free_port()


def in_threads(calls):
  """Results or exceptions of functions that run at the same time."""
  results = {}

  def run(number, call):
    try:
      results[number] = call()
    except Exception as e:
      results[number] = e

  threads = [
    threading.Thread(target=run, args=item) for item in enumerate(calls)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return [results[number] for number in range(len(calls))]


def join(address, places, join_secs=20.0, delay_secs=0.0):
  """For each place (index, count) the channel, or the error's message."""

  def call(number, index, count):
    time.sleep(delay_secs * number)
    joined = channel.Channel()
    joined.join([address], index, count, hub.Times(join_secs, 1e9))
    return joined

  results = in_threads(
    [lambda n=n, place=place: call(n, *place) for n, place in enumerate(places)]
  )
  assert all(
    isinstance(r, channel.Channel | channel.JobError) for r in results
  ), results
  return [r if isinstance(r, channel.Channel) else str(r) for r in results]


def assert_one_job(channels):
  assert len({c.secret for c in channels}) == 1
  values = in_threads([lambda c=c: c.gather(c.index) for c in channels])
  assert values == [sorted(c.index for c in channels)] * len(channels)


def test_all_are_in_one_job(address):
  for _ in range(2):  # The port is free again at once, also for jax.
    assert_one_job(join(address, [(i, 5) for i in range(5)]))


def test_processes_may_join_in_any_order(address):
  assert_one_job(join(address, [(2, 3), (1, 3), (0, 3)], delay_secs=0.3))


def test_missing_processes_are_named(address):
  results = join(address, [(0, 5), (2, 5), (4, 5)], join_secs=1.0)
  for text in results:
    assert text.startswith("2 of 5 processes did not join within 1 s")
    assert text.endswith(": 1, 3")


def test_process_0_is_missing(address):
  (text,) = join(address, [(1, 2)], join_secs=1.0)
  place = "{}:{}".format(*address)
  assert text.startswith(f"process 1: no process 0 at {place} within 1 s")


def test_two_processes_with_the_same_index(address):
  results = join(address, [(0, 3), (1, 3), (1, 3)], delay_secs=0.2)
  assert all("two processes have index 1" in text for text in results)


def test_different_numbers_of_processes(address):
  results = join(address, [(0, 3), (1, 2)])
  for text in results:
    assert "was started with num_processes=2, process 0 with 3" in text


def test_the_port_is_in_use(address):
  with socket.create_server(("", address[1])):
    (text,) = join(address, [(0, 2)], join_secs=1.0)
  assert "cannot listen on port" in text


def test_other_visitors_are_ignored(address):
  def visit():
    with socket.create_connection(address, timeout=5) as visitor:
      visitor.sendall(b"GET / HTTP/1.1\r\n\r\n")

  threading.Timer(0.3, visit).start()
  assert_one_job(join(address, [(0, 2), (1, 2)], delay_secs=1.0))


def test_a_process_may_be_started_again_before_all_have_joined(address):
  hello = json.dumps(dict(index=1, count=3, host="h", pid=1)).encode() + b"\n"

  def visit():
    with socket.create_connection(address, timeout=5) as visitor:
      visitor.sendall(hello)
      time.sleep(0.2)

  threading.Timer(0.3, visit).start()
  assert_one_job(join(address, [(0, 3), (1, 3), (2, 3)], delay_secs=1.0))


def test_check_can_stop_the_wait(address):
  def stop():
    raise KeyboardInterrupt

  for index in (0, 1):
    with pytest.raises(KeyboardInterrupt):
      channel.Channel().join([address], index, 2, hub.Times(), check=stop)


@pytest.fixture
def pair(address):
  return join(address, [(0, 2), (1, 2)])


def test_exchanges_of_several_threads_do_not_mix(pair):
  def exchange(member, name):
    return [member.gather([name, member.index, n], name) for n in range(20)]

  calls = [
    lambda member=member, name=name: exchange(member, name)
    for member in pair
    for name in ("a", "b", "c")
  ]
  for number, got in enumerate(in_threads(calls)):
    name = "abc"[number % 3]
    assert got == [[[name, 0, n], [name, 1, n]] for n in range(20)]


def test_a_long_value(pair):
  long = "x" * (3 * 2**20)
  assert (
    in_threads([lambda c=c: c.gather(long) for c in pair]) == [[long, long]] * 2
  )


def test_broadcast_does_not_wait_for_other_processes(pair):
  first, second = pair
  assert [first.broadcast(n) for n in range(100)] == list(range(100))
  assert [second.broadcast(-1) for _ in range(100)] == list(range(100))
  assert not first._posts and not second._posts, "nothing is kept"


def test_an_event_succeeds_on_all(pair):
  for _ in range(3):
    first, second = [member.event("save") for member in pair]
    second.done("two")
    assert not second.check()
    first.done("one")
    assert first.wait_for_all() == ["one", "two"]
    first.succeed()
    second.wait()
    assert first.check() and second.check()
  time.sleep(0.1)
  assert not pair[0]._posts and not pair[1]._posts, "nothing is kept"


def test_an_event_fails_on_all(pair):
  first, second = [member.event("save") for member in pair]
  first.done()
  second.fail("no room")
  for wait in (first.wait_for_all, second.wait, second.wait_for_first):
    with pytest.raises(channel.JobError, match="process 1 on host .*: no room"):
      wait()
  first, second = [member.event("save") for member in pair]
  second.done()
  first.wait_for_first()
  second.wait_for_first()


def test_an_event_names_who_is_not_done(pair):
  late = pair[0].event("save", timeout_secs=0.2)
  pair[1].event("save")
  late.done()
  with pytest.raises(channel.JobError, match=r"process\(es\) \[1\] not done"):
    late.wait_for_all()
  with pytest.raises(channel.JobError, match=r"process\(es\) \[0\] not done"):
    pair[1].event("save", timeout_secs=0.2).wait()


def test_a_process_alone(pair):
  alone = channel.Channel()
  assert alone.gather((1, 2)) == [(1, 2)]
  assert alone.broadcast("a") == "a"
  event = alone.event("save")
  event.wait_for_first()
  event.done(3)
  assert event.wait_for_all() == [3]
  event.succeed()
  assert event.check()


def test_all_end_at_the_same_call_after_a_signal(pair):
  first, second = pair
  assert not any([first.should_end(), first.should_end(), first.should_end()])
  second.report_signal("SIGTERM")
  calls = {0: 3, 1: 0}

  def go_on(member):
    while not member.should_end():
      calls[member.index] += 1
    calls[member.index] += 1

  in_threads([lambda m=m: go_on(m) for m in pair])
  assert calls[0] == calls[1] and first.ending and second.ending


# The ends of real processes.

_MEMBER = """
import os, sys, time
from bigtrain.cluster import channel, hub
index, port, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
member = channel.Channel()
times = hub.Times(heartbeat_secs=5)
member.join([("127.0.0.1", port)], index, 2, times)
member.report_phase("step", 7)
if index == 0:
  member.require_equal("x", 0)
else:
  time.sleep(1.5)
  exec(action)
try:
  member.gather(index)
except BaseException as e:
  print(e)
time.sleep(60)
"""


@pytest.mark.parametrize(
  ("action", "codes", "message"),
  [
    (
      "os._exit(3)",
      [1, 3],
      r"process 1 \(host .*\) disconnected without an error, perhaps killed; "
      "it was in phase 'step' at step 7",
    ),
    ("member.fail(2, 'wrong')", [2, 2], r"process 1 \(host .*\): wrong"),
    pytest.param(
      "member.fail(1, 'hang: slow', hang=True)",
      [1, 1],
      "hang: slow; all processes are at step 7",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "member._loop.call_soon_threadsafe(time.sleep, 30)",
      [1, -9],
      "no heartbeat for 5 s",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "member.require_equal('x', 1)",
      [2, 2],
      "differ in x: process . .* has .",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_processes_end_together(address, action, codes, message):
  job = [
    subprocess.Popen(
      [sys.executable, "-c", _MEMBER, str(index), str(address[1]), action],
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in (0, 1)
  ]
  try:
    _, err = job[0].communicate(timeout=60)
    assert re.search(message, err.splitlines()[-1]), err
    if codes[1] == -9:
      job[1].kill()
    job[1].communicate(timeout=60)
    assert [p.returncode for p in job] == codes
  finally:
    for process in job:
      process.kill()


def test_a_process_that_ends_later_than_process_0_is_not_lost(address):
  close = "member.close(); os._exit(0)"
  slow = "member._forget = lambda topic: time.sleep(2); " + close
  code = _MEMBER[: _MEMBER.index("member.report_phase")] + "exec(action)"
  job = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(index), str(address[1]), action]
    )
    for index, action in enumerate((close, slow))
  ]
  assert [member.wait(60) for member in job] == [0, 0]
