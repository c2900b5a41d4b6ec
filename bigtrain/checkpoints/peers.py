"""Agreement of a job's processes about saves and restores.

It goes through the key-value store of jax.distributed, not through the
devices: threads may use it while the devices train, and it still works when
one process has failed. A process alone needs no such store.
"""

import itertools
import json
import secrets
import socket
import time
from typing import Any

import jax

from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.cluster import process

_POLL_SECS = 0.2
_instances = itertools.count()


class Peers:
  """All processes of the job; each constructs it at the same point.

  Attributes:
    index: index of this process.
    count: number of processes.
    token: random, the same on all processes.
  """

  def __init__(self, timeout_secs: float = 1800.0):
    """Waits for the other processes."""
    self.index = jax.process_index()
    self.count = jax.process_count()
    self.timeout_secs = timeout_secs
    self._client = None
    self._num_shared = itertools.count()
    if self.count > 1:
      # jax has no public way to its key-value store.
      from jax._src import distributed

      self._client = distributed.global_state.client
      if self._client is None:
        raise CheckpointError(
          "several processes need jax.distributed.initialize()."
        )
    self._prefix = f"bigtrain/peers/{next(_instances)}"
    self.token = self.share(secrets.token_hex(4))[0]

  def share(self, value: Any) -> list[Any]:
    """Returns the JSON values of all processes, by process; a barrier."""
    key = f"{self._prefix}/share/{next(self._num_shared)}"
    return process.share(key, value, self.timeout_secs)

  def event(self, name: str) -> "Event":
    """An event of all processes; each `name` is used only once."""
    return Event(self, f"{self._prefix}/{name}")


class Event:
  """Work that succeeds or fails on all processes together.

  Each process does its part and calls `done`. Process 0 waits for all,
  finishes the work and calls `succeed`; the others `wait`. Any process may
  `fail`, which the others notice within a second.
  """

  def __init__(self, peers: Peers, prefix: str):
    """Use `Peers.event`."""
    self._peers = peers
    self._client = peers._client
    self._prefix = prefix
    self._own_result: Any = None

  def wait_for_first(self) -> None:
    """Waits until process 0 calls this; process 0 does not wait."""
    if self._client is None:
      return
    if self._peers.index == 0:
      self._client.key_value_set(f"{self._prefix}/first", '""')
      return
    deadline = time.monotonic() + self._peers.timeout_secs
    while self._get("first") is None:
      self.check()
      if time.monotonic() > deadline:
        raise CheckpointError(
          f"process 0 did not begin within {self._peers.timeout_secs:.0f} s."
        )
      time.sleep(_POLL_SECS)

  def done(self, result: Any = None) -> None:
    """Reports that this process has done its part, with a JSON result."""
    self._own_result = result
    if self._client is not None:
      key = f"{self._prefix}/done/{self._peers.index}"
      self._client.key_value_set(key, json.dumps(result))

  def succeed(self) -> None:
    """Reports, on process 0, that the whole work is done."""
    self._conclude("")

  def fail(self, reason: str) -> None:
    """Reports that this process failed, unless the event has ended already."""
    self._conclude(
      f"process {self._peers.index} on host {socket.gethostname()}: {reason}"
    )

  def _conclude(self, failure: str) -> None:
    if self._client is None:
      return
    try:
      self._client.key_value_set(f"{self._prefix}/end", json.dumps(failure))
    except jax.errors.JaxRuntimeError as e:
      if "ALREADY_EXISTS" not in str(e):
        raise

  def check(self) -> bool:
    """Whether the event has succeeded.

    Raises:
      CheckpointError: some process has failed.
    """
    end = self._get("end") if self._client is not None else None
    if end:
      raise CheckpointError(end)
    return end is not None

  def _get(self, key: str) -> Any:
    try:
      return json.loads(self._client.key_value_try_get(f"{self._prefix}/{key}"))
    except jax.errors.JaxRuntimeError as e:
      if "NOT_FOUND" not in str(e):
        raise
      return None

  def wait_for_all(self) -> list[Any]:
    """Waits, on process 0, until every process has done its part.

    Returns:
      Their results, in no order.
    """
    if self._client is None:
      return [self._own_result]
    deadline = time.monotonic() + self._peers.timeout_secs
    while True:
      self.check()
      done = self._client.key_value_dir_get(f"{self._prefix}/done/")
      if len(done) == self._peers.count:
        return [json.loads(result) for _, result in done]
      if time.monotonic() > deadline:
        indices = {int(key.rsplit("/", 1)[1]) for key, _ in done}
        absent = sorted(set(range(self._peers.count)) - indices)
        raise CheckpointError(
          f"process(es) {absent} not done after {self._peers.timeout_secs:.0f}"
          " s."
        )
      time.sleep(_POLL_SECS)

  def wait(self) -> None:
    """Waits, on any process but 0, until the event has ended."""
    deadline = time.monotonic() + self._peers.timeout_secs
    while not self.check():
      if time.monotonic() > deadline:
        raise CheckpointError(
          f"process 0 not done after {self._peers.timeout_secs:.0f} s."
        )
      time.sleep(_POLL_SECS)

  def forget(self) -> None:
    """Frees, on process 0, the storage of an event that ended long ago."""
    if self._client is not None:
      self._client.key_value_delete(self._prefix + "/")
