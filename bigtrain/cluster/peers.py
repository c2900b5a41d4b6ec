"""What the processes of a job tell each other about saves and restores.

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

_POLL_SECS = 0.2
_instances = itertools.count()


class Peers:
  """All processes of the job; every one constructs it at the same point.

  Attributes:
    index: of this process.
    count: of processes.
    token: random, the same on all processes.
  """

  def __init__(self, timeout_secs: float = 1800.0):
    """Waits for the others.

    Args:
      timeout_secs: how long any wait for another process may take.
    """
    self.index = jax.process_index()
    self.count = jax.process_count()
    self.timeout_secs = timeout_secs
    self._client = None
    self._shared = itertools.count()
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
    """The JSON values that all processes pass, by process; it is a barrier."""
    if self._client is None:
      return [value]
    prefix = f"{self._prefix}/share/{next(self._shared)}"
    self._client.key_value_set(f"{prefix}/{self.index}", json.dumps(value))
    timeout = int(self.timeout_secs * 1000)
    return [
      json.loads(self._client.blocking_key_value_get(f"{prefix}/{i}", timeout))
      for i in range(self.count)
    ]

  def event(self, name: str) -> "Event":
    """An event that all processes take part in; `name` is used only once."""
    return Event(self, f"{self._prefix}/{name}")


class Event:
  """Work that is done by all processes, or has failed for all of them.

  Each does its part and says `done`; process 0 waits for all, finishes the
  work and says `succeed`; the others `wait`. Any of them may `fail`, of which
  all others hear within a second.
  """

  def __init__(self, peers: Peers, prefix: str):
    self._peers = peers
    self._client = peers._client
    self._prefix = prefix

  def wait_for_first(self) -> None:
    """Waits until process 0 has come here; it goes on at once."""
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

  def done(self) -> None:
    """Says that this process has done its part."""
    if self._client is not None:
      self._client.key_value_set(f"{self._prefix}/done/{self._peers.index}", "")

  def succeed(self) -> None:
    """Says, as process 0, that the whole is done."""
    self._conclude("")

  def fail(self, reason: str) -> None:
    """Says that this process failed, unless the event has ended already."""
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

  def wait_for_all(self) -> None:
    """Waits, as process 0, until every process has done its part."""
    if self._client is None:
      return
    deadline = time.monotonic() + self._peers.timeout_secs
    while True:
      self.check()
      done = self._client.key_value_dir_get(f"{self._prefix}/done/")
      if len(done) == self._peers.count:
        return
      if time.monotonic() > deadline:
        there = {int(key.rsplit("/", 1)[1]) for key, _ in done}
        absent = sorted(set(range(self._peers.count)) - there)
        raise CheckpointError(
          f"process(es) {absent} not done after {self._peers.timeout_secs:.0f}"
          " s."
        )
      time.sleep(_POLL_SECS)

  def wait(self) -> None:
    """Waits, as any process but 0, until the event has ended."""
    deadline = time.monotonic() + self._peers.timeout_secs
    while not self.check():
      if time.monotonic() > deadline:
        raise CheckpointError(
          f"process 0 not done after {self._peers.timeout_secs:.0f} s."
        )
      time.sleep(_POLL_SECS)

  def forget(self) -> None:
    """Frees, as process 0, what the store keeps of an event long ended."""
    if self._client is not None:
      self._client.key_value_delete(self._prefix + "/")
