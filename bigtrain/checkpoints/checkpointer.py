"""Saves the train state without stopping the training, and restores it.

A save copies the shards of this process to host memory, and a thread writes
them from there: see snapshot.py for the copy, manifest.py for what is written,
storage.py for how it becomes a checkpoint at one instant, integrity.py for how
damage is found, peers.py for how processes agree on it.

Who saves in a job of several processes: each writes its own shards, and
process 0 the manifest, when all others are done.
"""

import collections
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from bigtrain import trees
from bigtrain.checkpoints import folders, integrity, snapshot
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints import restore as restore_lib
from bigtrain.checkpoints.manifest import Array, CheckpointError, Manifest
from bigtrain.cluster import peers as peers_lib
from bigtrain.files import objects, paths
from bigtrain.settings import ConfigError

# The rest of what a program needs of checkpoints, under one name.
check_writable = folders.check_writable
clean = folders.clean
verify = integrity.verify
restore = restore_lib.restore
resume = restore_lib.resume
MismatchError = restore_lib.MismatchError

# Encoded and not yet written, on one host.
_WRITES_IN_FLIGHT_BYTES = 512 * 2**20
_POLL_SECS = 0.25


def _point(name: str) -> None:
  """A named moment of a save. Does nothing; fault tests put faults here."""


@dataclasses.dataclass
class _Job:
  """One save: what its thread needs."""

  step: int
  arrays: dict[str, Array]
  pieces: list[snapshot.Piece]
  host_state: dict[str, Any]
  token: str
  event: peers_lib.Event
  tmp: str
  keep_steps: frozenset[int]


class Checkpointer:
  """Saves checkpoints of a workdir in the background, one at a time.

  All processes of a job call its methods in the same order. A failed save is
  raised by whichever method is called next, and by all later ones: the run
  cannot go on and believe that it is saved.

  Attributes:
    last_stall_secs: how long the newest `save` kept its caller, from when the
      state was computed: the copy to the host, and the wait for the save
      before it.
    last_write_secs: how long the newest committed save took to write.
    last_saved_step: step of the newest committed save; None before one.
  """

  def __init__(
    self,
    workdir: str,
    *,
    keep: int = 2,
    keep_every_steps: int | None = None,
    config_digest: str = "",
    guard: Callable[[], None] | None = None,
    timeout_secs: float = 1800.0,
  ):
    """Constructed on all processes.

    Args:
      workdir: checkpoints are in its folder "checkpoints".
      keep: how many of the newest checkpoints stay.
      keep_every_steps: those of multiples of it stay for good.
      config_digest: goes into the manifests.
      guard: called before a checkpoint is committed; raises if this job must
        not write here any more (see lease.Lease.check).
      timeout_secs: how long a process waits for the others' part of a save.
    """
    if not isinstance(keep, int) or keep < 1:
      raise ConfigError(
        f"config.keep_ckpts: expected at least 1, got {keep!r}."
      )
    self._workdir = workdir
    self._keep = keep
    self._keep_every_steps = keep_every_steps
    self._config_digest = config_digest
    self._guard = guard
    self._peers = peers_lib.Peers(timeout_secs)
    self._snapshots = snapshot.Snapshots()
    self._num_saves = 0
    self._threads: list[threading.Thread] = []
    self._pruning = threading.Lock()
    self._settled = threading.Event()  # No save is uncommitted.
    self._settled.set()
    self._error: CheckpointError | None = None
    self._events: list[peers_lib.Event] = []
    self.last_stall_secs = 0.0
    self.last_write_secs = 0.0
    self.last_saved_step: int | None = None

  def save(
    self,
    step: int,
    state: Any,
    host_state: Mapping[str, Any] | None = None,
    *,
    keep_steps: Iterable[int] = (),
    block: bool = False,
  ) -> None:
    """Starts to save; returns when the state may be donated.

    Waits for the save before it first, if that is still being written.

    Args:
      step: training steps done.
      state: tree of arrays.
      host_state: JSON; what else the program wants back.
      keep_steps: checkpoints that stay, whatever else is removed now.
      block: waits until the checkpoint is committed.

    Raises:
      CheckpointError: an earlier save failed, or this one cannot begin.
    """
    # At once: the program goes on changing it while the save is written.
    host_json = json.dumps(dict(host_state or {}))
    named = trees.flatten_with_names(state)
    jax.block_until_ready(state)
    began = time.monotonic()
    self.wait()
    # The save before may still be removing old checkpoints, but no other: where
    # removal is slower than saving, they would fill the disk.
    while len(self._threads) > 1:
      self._threads.pop(0).join()
    pieces, arrays = self._snapshots.take(named)
    number = self._num_saves
    self._num_saves += 1
    token = f"{self._peers.token}-{number}"
    job = _Job(
      step=int(step),
      arrays=arrays,
      pieces=pieces,
      host_state=json.loads(host_json),
      token=token,
      event=self._peers.event(f"save/{number}"),
      tmp=folders.attempt(self._workdir, int(step), token),
      keep_steps=frozenset(keep_steps),
    )
    self._settled.clear()
    self._threads.append(
      threading.Thread(
        target=self._run, args=(job,), name=f"save-{step}", daemon=True
      )
    )
    self._threads[-1].start()
    self.last_stall_secs = time.monotonic() - began
    if block:
      self.wait()

  def check(self) -> None:
    """Raises CheckpointError if a save has failed, on whatever process."""
    if self._error is not None:
      raise self._error

  def wait(self) -> None:
    """Waits until no save is uncommitted; raises CheckpointError if it failed.

    Old checkpoints may still be on their way out then.
    """
    self._settled.wait()
    self.check()

  @property
  def in_flight(self) -> bool:
    """Whether a save is not committed yet."""
    return not self._settled.is_set()

  def close(self) -> None:
    """Waits for the last save and raises if it failed; ends the use of this."""
    for thread in self._threads:
      thread.join()
    self._snapshots.close()
    self.check()

  def _run(self, job: _Job) -> None:
    """Writes and commits, in the thread of the save."""
    began = time.monotonic()
    try:
      _point("begin")
      self._write_arrays(job)
      job.pieces.clear()  # Frees pinned memory.
      job.event.done()
      if self._peers.index == 0:
        job.event.wait_for_all()
        self._commit(job)
        job.event.succeed()
      else:
        job.event.wait()
      self.last_write_secs = time.monotonic() - began
      self.last_saved_step = job.step
    except BaseException as e:
      self._fail(job, e)
      return
    finally:
      self._settled.set()
    if self._peers.index == 0:
      with self._pruning:
        self._prune(job)

  def _fail(self, job: _Job, error: BaseException) -> None:
    if isinstance(error, ValueError) and paths.is_remote(job.tmp):
      error = objects.as_os_error(error, job.tmp)
    reason = str(error) or type(error).__name__
    if not isinstance(error, CheckpointError | ConfigError | OSError):
      reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, OSError) and error.filename:
      reason = f"{error.filename}: {error.strerror}"
    message = f"the checkpoint of step {job.step} was not saved: {reason}"
    self._error = CheckpointError(message)
    self._error.__cause__ = error
    logging.error("%s", message)
    try:
      job.event.fail(reason)
    except jax.errors.JaxRuntimeError as e:
      logging.error("the other processes could not be told: %s", e)
    if self._peers.count == 1:
      # The disk may be full: what else has to be written needs the room.
      folders.abandon(job.tmp)

  def _write_arrays(self, job: _Job) -> None:
    import tensorstore as ts

    # Process 0 writes the metadata of all arrays.
    first = self._peers.index == 0
    context = integrity.tensorstore_context()
    if first:
      folders.begin(job.tmp)
    if paths.is_remote(job.tmp):
      job.event.wait_for_first()
    opening = {
      name: ts.open(
        manifest_lib.spec(job.tmp, name, array),
        open=True,
        create=first,
        assume_metadata=not first,
        context=context,
      )
      for name, array in job.arrays.items()
    }
    stores = {name: _result(f, job) for name, f in opening.items()}
    _point("metadata written")
    pending: collections.deque[tuple[Any, int]] = collections.deque()
    in_flight = 0
    try:
      for piece in snapshot.blocks(job.pieces, job.arrays):
        data = piece.data
        while pending and in_flight + data.nbytes > _WRITES_IN_FLIGHT_BYTES:
          future, num_bytes = pending.popleft()
          _result(future, job)
          in_flight -= num_bytes
        write = stores[piece.name][piece.place].write(
          data, can_reference_source_data_indefinitely=True
        )
        pending.append((write.commit, data.nbytes))
        in_flight += data.nbytes
      for future, _ in pending:
        _result(future, job)
    except BaseException:
      # None may write on, below a directory that is about to be removed.
      for future, _ in pending:
        future.exception()
      raise
    _point("data written")

  def _commit(self, job: _Job) -> None:
    manifest = Manifest(
      step=job.step,
      arrays=job.arrays,
      host_state=job.host_state,
      config_digest=self._config_digest,
      writer={
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "processes": self._peers.count,
        "devices": jax.device_count(),
        "jax": jax.__version__,
      },
    )
    problems = integrity.inspect(job.tmp, manifest)
    if problems:
      hint = " Do all hosts see the same workdir?" * (self._peers.count > 1)
      raise CheckpointError(
        f"{problems[0]} ({len(problems)} such problem(s) after writing).{hint}"
      )
    digests = integrity.metadata_digests(job.tmp, job.arrays)
    arrays = {
      name: dataclasses.replace(array, metadata_sha256=digests[name])
      for name, array in job.arrays.items()
    }
    manifest = dataclasses.replace(manifest, arrays=arrays)
    text = manifest_lib.to_json(manifest)
    folders.stage(job.tmp, text)
    _point("manifest written")
    if self._guard is not None:
      self._guard()
    folders.commit(job.tmp, text, self._workdir, job.step, job.token)
    _point("committed")

  def _prune(self, job: _Job) -> None:
    """Removes what need not be kept; failing at it does not fail the save."""
    try:
      for old in self._events:
        old.forget()
      self._events = [job.event]
      # Newer steps are of a future that was rolled back: not this run's.
      there = sorted(folders.listing(self._workdir).checkpoints)
      there = [step for step in there if step <= job.step]
      for step in there[: -self._keep]:
        if step in job.keep_steps:
          continue
        if self._keep_every_steps and step % self._keep_every_steps == 0:
          continue
        doomed = folders.retire(self._workdir, step, job.token)
        _point("renamed for removal")
        folders.discard(doomed)
    except (OSError, CheckpointError, jax.errors.JaxRuntimeError) as e:
      logging.warning("old checkpoints could not be removed: %s", e)


def _result(future: Any, job: _Job) -> Any:
  """The future's result, unless another process fails in the meantime."""
  while True:
    try:
      return future.result(timeout=_POLL_SECS)
    except TimeoutError:
      job.event.check()


def steps(workdir: str) -> list[int]:
  """Steps of a workdir's checkpoints, ascending.

  Raises:
    CheckpointError: something could not be looked at.
  """
  return list(folders.listing(workdir).checkpoints)


def newest(workdir: str) -> int | None:
  """The newest step that has a checkpoint; None only if there is none.

  Raises:
    CheckpointError: something could not be looked at.
  """
  return max(steps(workdir), default=None)
