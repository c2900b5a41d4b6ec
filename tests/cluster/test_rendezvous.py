"""Processes meet before jax starts, and hear who is missing."""

import socket
import threading
import time

import pytest

from bigtrain.cluster import rendezvous


@pytest.fixture
def address():
  """Where nobody listens."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def meet(address, processes, timeout_secs=20.0, delay_secs=0.0):
  """What each of (index, count) gets: a token, or an error's text."""
  found = {}

  def one(number, index, count):
    time.sleep(delay_secs * number)
    try:
      found[number] = rendezvous.meet(
        address, index, count, timeout_secs=timeout_secs, token={"of": index}
      )
    except rendezvous.MissingError as e:
      found[number] = str(e)

  threads = [
    threading.Thread(target=one, args=(n, *who))
    for n, who in enumerate(processes)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return [found[n] for n in range(len(processes))]


def test_all_get_the_token_of_process_0(address):
  for _ in range(2):  # The port is free again at once.
    found = meet(address, [(i, 5) for i in range(5)])
    assert found == [{"of": 0}] * 5


def test_they_may_come_in_any_order(address):
  found = meet(address, [(2, 3), (1, 3), (0, 3)], delay_secs=0.3)
  assert found == [{"of": 0}] * 3


def test_who_is_missing(address):
  found = meet(address, [(0, 5), (2, 5), (4, 5)], timeout_secs=1.0)
  for text in found:
    assert text.startswith("2 of 5 processes did not come within 1 s")
    assert text.endswith(": 1, 3")


def test_process_0_is_missing(address):
  (text,) = meet(address, [(1, 2)], timeout_secs=1.0)
  assert text.startswith(f"process 1: no process 0 at {address} within 1 s")


def test_two_claim_to_be_the_same(address):
  found = meet(address, [(0, 3), (1, 3), (1, 3)], delay_secs=0.2)
  assert all("two processes are number 1" in text for text in found)


def test_they_were_told_different_numbers(address):
  found = meet(address, [(0, 3), (1, 2)])
  assert "was told of 2 processes, process 0 of 3" in found[0]


def test_the_port_is_taken(address):
  with socket.create_server(("", int(address.rpartition(":")[2]))):
    (text,) = meet(address, [(0, 2)], timeout_secs=1.0)
  assert "cannot listen on port" in text


def test_a_stranger_is_not_counted(address):
  threading.Timer(0.3, lambda: _say(address, b"GET / HTTP/1.1\r\n\r\n")).start()
  found = meet(address, [(0, 2), (1, 2)], delay_secs=1.0)
  assert found == [{"of": 0}] * 2


def _say(address, words):
  host, _, port = address.rpartition(":")
  with socket.create_connection((host, int(port)), timeout=5) as stranger:
    stranger.sendall(words)


def test_waiting_can_be_stopped(address):
  def stop():
    raise KeyboardInterrupt

  for index in (0, 1):
    with pytest.raises(KeyboardInterrupt):
      rendezvous.meet(
        address, index, 2, timeout_secs=30.0, token={}, check=stop
      )
