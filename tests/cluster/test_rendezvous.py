"""Processes meet before jax starts, and report missing ones."""

import socket
import threading
import time

import pytest
from support import processes

from bigtrain.cluster import rendezvous


@pytest.fixture
def address():
  """An address with no listener."""
  return f"127.0.0.1:{processes.free_port()}"


def meet(address, places, timeout_secs=20.0, delay_secs=0.0):
  """For each place (index, count) the token, or the error's message."""
  results = {}

  def join(number, index, count):
    time.sleep(delay_secs * number)
    try:
      results[number] = rendezvous.meet(
        address, index, count, timeout_secs=timeout_secs, token={"of": index}
      )
    except rendezvous.RendezvousError as e:
      results[number] = str(e)

  threads = [
    threading.Thread(target=join, args=(n, *place))
    for n, place in enumerate(places)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return [results[n] for n in range(len(places))]


def test_all_get_the_token_of_process_0(address):
  for _ in range(2):  # The port is free again at once.
    results = meet(address, [(i, 5) for i in range(5)])
    assert results == [{"of": 0}] * 5


def test_processes_may_join_in_any_order(address):
  results = meet(address, [(2, 3), (1, 3), (0, 3)], delay_secs=0.3)
  assert results == [{"of": 0}] * 3


def test_missing_processes_are_named(address):
  results = meet(address, [(0, 5), (2, 5), (4, 5)], timeout_secs=1.0)
  for text in results:
    assert text.startswith("2 of 5 processes did not join within 1 s")
    assert text.endswith(": 1, 3")


def test_process_0_is_missing(address):
  (text,) = meet(address, [(1, 2)], timeout_secs=1.0)
  assert text.startswith(f"process 1: no process 0 at {address} within 1 s")


def test_two_processes_with_the_same_index(address):
  results = meet(address, [(0, 3), (1, 3), (1, 3)], delay_secs=0.2)
  assert all("two processes have index 1" in text for text in results)


def test_different_numbers_of_processes(address):
  results = meet(address, [(0, 3), (1, 2)])
  assert "was started with num_processes=2, process 0 with 3" in results[0]


def test_the_port_is_in_use(address):
  with socket.create_server(("", int(address.rpartition(":")[2]))):
    (text,) = meet(address, [(0, 2)], timeout_secs=1.0)
  assert "cannot listen on port" in text


def test_other_visitors_are_ignored(address):
  threading.Timer(
    0.3, lambda: _send(address, b"GET / HTTP/1.1\r\n\r\n")
  ).start()
  results = meet(address, [(0, 2), (1, 2)], delay_secs=1.0)
  assert results == [{"of": 0}] * 2


def _send(address, content):
  host, _, port = address.rpartition(":")
  with socket.create_connection((host, int(port)), timeout=5) as visitor:
    visitor.sendall(content)


def test_check_can_stop_the_wait(address):
  def stop():
    raise KeyboardInterrupt

  for index in (0, 1):
    with pytest.raises(KeyboardInterrupt):
      rendezvous.meet(
        address, index, 2, timeout_secs=30.0, token={}, check=stop
      )
