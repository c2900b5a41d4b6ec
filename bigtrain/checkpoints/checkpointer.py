"""Saves the train state in the background while training goes on.

One save has these steps, on all processes together:

1. `save` copies this process's shards to host memory (snapshot.py) and starts a
   thread. The training loop waits only for the copy.
2. With config.local_ckpt_*, the thread writes the shards to its own host
   (local_checkpoints.py).
3. The thread writes the shards to the workdir with tensorstore (integrity.py).
4. When all processes are done, process 0 checks the files, writes the manifest,
   and commits the checkpoint in one operation (folders.py).
5. Process 0 removes old checkpoints.
"""

import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import (
  checksums,
  folders,
  integrity,
  local_checkpoints,
  snapshot,
)
from bigtrain.checkpoints.manifest import (
  Array,
  CheckpointError,
  HostState,
  Manifest,
)
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_keys,
  check_number,
)
from bigtrain.config.lengths import Lengths
from bigtrain.files import disk, objects, paths


def read_options(
  config: settings.Config, lengths: Lengths, workdir: str
) -> dict[str, Any]:
  """Reads the keyword arguments of Checkpointer from the config."""
  keep = settings.whole_number(config, "keep_ckpts", 2, least=0)
  need_checkpoints = {
    "keep_ckpt_*": lengths.keep_ckpt,
    "local_ckpt_*": lengths.local_ckpt,
    "save_at_start": config.get("save_at_start"),
    'nonfinite="rollback"': config.get("nonfinite") == "rollback",
  }
  for key, is_set in need_checkpoints.items():
    if is_set and not keep:
      raise ConfigError(
        f"config.{key}: needs checkpoints, and this run keeps none: without "
        "--workdir, and with config.keep_ckpts=0, nothing is saved."
      )
  return {
    "keep": keep,
    "dtypes": _read_dtypes(config),
    "keep_every_steps": lengths.keep_ckpt,
    "local": local_checkpoints.from_config(config, lengths.local_ckpt, workdir),
    "config_digest": settings.digest(config.to_dict()),
  }


def _read_dtypes(config: settings.Config) -> dict[str, str]:
  dtypes = config.kwargs("ckpt_dtype")
  check_keys("config.ckpt_dtype", dtypes, ("params", "ema", "opt"))
  for tree, dtype in dtypes.items():
    check_choice(f"config.ckpt_dtype.{tree}", dtype, ("bfloat16",))
  return dtypes


def _rounded(
  named: list[tuple[str, Any]], dtypes: Mapping[str, str]
) -> list[tuple[str, Any]]:
  """Converts the float32 arrays of some trees to another dtype.

  Args:
    named: (name, array) pairs.
    dtypes: {tree: dtype}, config.ckpt_dtype.
  """
  result = []
  for name, x in named:
    dtype = dtypes.get(name.split("/")[0])
    if dtype and x.ndim and x.dtype == np.float32:
      x = sharding.on_device(x).astype(dtype)
    result.append((name, x))
  return result


def _point(name: str) -> None:
  """Names a moment of a save. It does nothing; tests make it raise or kill."""


@dataclasses.dataclass
class _Job:
  """One save, as its thread sees it."""

  step: int
  arrays: dict[str, Array]  # Layout of all arrays, by name.
  pieces: list[snapshot.Piece]  # The shards that this process writes.
  sums: snapshot.PartialSums  # Waits for the checksum of each piece.
  shared: bool  # Whether it goes to the workdir, too, and not only to the host.
  host_state: HostState
  token: str  # Makes the names of temporary folders unique.
  event: process.Event  # Through which the processes agree on the outcome.
  tmp: str  # Folder to write to.
  keep_steps: frozenset[int]  # Checkpoints that this save does not remove.


class Checkpointer:
  """Saves checkpoints of a workdir in the background, one at a time.

  All processes call its methods in the same order. After a failed save, all
  calls raise its error: a run must not continue as if it had been saved.

  Attributes:
    last_stall_secs: how long the newest `save` blocked its caller.
    last_write_secs: how long the newest committed save took.
    last_saved_step: its step.
  """

  def __init__(
    self,
    workdir: str,
    guard: Callable[[], None] | None = None,
    *,
    keep: int = 2,
    dtypes: Mapping[str, str] | None = None,
    keep_every_steps: int | None = None,
    local: local_checkpoints.LocalCheckpoints | None = None,
    config_digest: str = "",
    timeout_secs: float = 1800.0,
  ):
    """Prepares to save.

    Args:
      workdir: the run's folder.
      guard: called before a commit; it raises if this job may no longer write
        to the workdir (lease.Lease.check).
      keep: number of newest checkpoints to keep; with 0, nothing is saved.
      dtypes: config.ckpt_dtype.
      keep_every_steps: checkpoints at multiples of this step are kept forever.
      local: checkpoints on the hosts.
      config_digest: digest of the config, for the manifest.
      timeout_secs: how long processes wait for each other in a save.
    """
    self._workdir = workdir
    self._keep = check_number("config.keep_ckpts", keep, least=0, whole=True)
    self._dtypes = dtypes or {}
    self._keep_every_steps = keep_every_steps
    self._local = local
    self._config_digest = config_digest
    self._guard = guard
    self._index = jax.process_index()
    self._token = process.broadcast(secrets.token_hex(4))
    self._timeout_secs = timeout_secs
    self._snapshots = snapshot.Snapshots(all_shards=local is not None)
    self._num_saves = 0
    self._threads: list[threading.Thread] = []
    self._pruning = threading.Lock()
    self._settled = threading.Event()  # Every save is committed or has failed.
    self._settled.set()
    self._is_shared = False  # Whether the newest save goes to the workdir.
    self._error: CheckpointError | None = None
    self.last_stall_secs = 0.0
    self.last_write_secs = 0.0
    self.last_saved_step: int | None = None

  def save(
    self,
    step: int,
    state: Any,
    host_state: HostState | None = None,
    keep_steps: Iterable[int] = (),
    shared: bool = True,
    *,
    block: bool = False,
  ) -> int | None:
    """Starts a save. When it returns, the state may be donated.

    Args:
      step: number of finished steps.
      state: the train state.
      host_state: the rest of the run's state.
      keep_steps: steps of checkpoints that this save does not remove.
      shared: whether to save to the workdir too, and not only on the hosts.
      block: whether to wait until the save is committed.

    Returns: `step`, or None if this run saves nothing.
    """
    if not self._keep:
      return None
    # Copied as JSON, because the program changes it while the thread runs.
    host_json = json.dumps((host_state or HostState()).to_json())
    named = _rounded(trees.flatten_with_names(state), self._dtypes)
    jax.block_until_ready(named)
    started = time.monotonic()
    self.wait()
    # At most one earlier save may still be removing old checkpoints: if it
    # takes longer to remove one than to save one, they would fill the disk.
    while len(self._threads) > 1:
      self._threads.pop(0).join()
    pieces, arrays, sums = self._snapshots.take(named)
    token = f"{self._token}-{self._num_saves}"
    self._num_saves += 1
    job = _Job(
      step=int(step),
      arrays=arrays,
      pieces=pieces,
      sums=sums,
      shared=shared,
      host_state=HostState.from_json(json.loads(host_json)),
      token=token,
      event=process.event("save", self._timeout_secs),
      tmp=folders.attempt(self._workdir, int(step), token),
      keep_steps=frozenset(keep_steps),
    )
    self._settled.clear()
    self._is_shared = shared
    thread = threading.Thread(
      target=self._run, args=(job,), name=f"save-{step}", daemon=True
    )
    self._threads.append(thread)
    thread.start()
    self.last_stall_secs = time.monotonic() - started
    if block:
      self.wait()
    return int(step)

  def due_locally(self, step: int) -> bool:
    """Whether to save `step` on the hosts; the same on all processes.

    False while a save to the workdir is in flight, because the loop would have
    to wait for it.
    """
    if not self._keep or self._local is None or not self._local.due(step):
      return False
    return process.broadcast(not (self.in_flight and self._is_shared))

  def check(self) -> None:
    """Raises the error of a failed save."""
    if self._error is not None:
      raise self._error

  def wait(self) -> float | None:
    """Waits until every save is committed, but not until old ones are removed.

    Returns: the seconds that the last save took; None before the first.
    """
    self._settled.wait()
    self.check()
    return None if self.last_saved_step is None else self.last_write_secs

  @property
  def in_flight(self) -> bool:
    """Whether a save is neither committed nor has failed."""
    return not self._settled.is_set()

  def remove_local(self) -> None:
    """Removes the checkpoints on the hosts, at the end of a run."""
    if self._local is not None:
      self._local.remove()

  def close(self) -> None:
    """Waits for all saves and removals."""
    for thread in self._threads:
      thread.join()
    self.check()

  def _run(self, job: _Job) -> None:
    """Writes and commits a save, in its thread."""
    started = time.monotonic()
    try:
      _point("begin")
      sums = job.sums()
      if self._local is not None:
        self._local.write(self._manifest(job, job.arrays), job.pieces, sums)
      if not job.shared:
        job.event.forget()
        return
      self._write_arrays(job)
      job.event.done(snapshot.sums_by_name(job.pieces, sums))
      job.pieces.clear()  # Frees the copies in host memory.
      if self._index == 0:
        self._commit(job, job.event.wait_for_all())
        job.event.succeed()
      else:
        job.event.wait()
      self.last_write_secs = time.monotonic() - started
      self.last_saved_step = job.step
      if self._local is not None:
        self._local.note_stored(job.step)
    except BaseException as e:
      self._fail(job, e)
      return
    finally:
      self._settled.set()
    if self._index == 0:
      with self._pruning:
        self._prune(job)

  def _write_arrays(self, job: _Job) -> None:
    """Writes this process's pieces; process 0 also writes the metadata."""
    if self._index == 0:
      folders.begin(job.tmp)
    # In an object store, `begin` removes an earlier attempt of the same name.
    if paths.is_remote(job.tmp):
      job.event.wait_for_first()
    if self._index == 0:
      integrity.write_metadata(job.tmp, job.arrays, job.event.check)
    _point("metadata written")
    own = [piece for piece in job.pieces if not piece.is_copy]
    parts = snapshot.blocks(own, job.arrays)
    integrity.write(job.tmp, job.arrays, parts, job.event.check)
    _point("data written")

  def _commit(
    self, job: _Job, partial_sums: list[dict[str, checksums.Sums]]
  ) -> None:
    """Checks all files and commits the checkpoint; process 0 calls it.

    Args:
      job: the save.
      partial_sums: each process's {name: sums of the parts that it wrote}.
    """
    problems = integrity.inspect(job.tmp, self._manifest(job, job.arrays))
    if problems:
      hint = ""
      if jax.process_count() > 1:
        hint = " Do all hosts see the same workdir?"
      raise CheckpointError(
        f"{problems[0]} ({len(problems)} such problem(s) after writing).{hint}"
      )
    arrays = {}
    for name, array in job.arrays.items():
      sums = checksums.add(one[name] for one in partial_sums if name in one)
      arrays[name] = dataclasses.replace(
        array,
        metadata_sha256=array.metadata_digest,
        checksum=checksums.as_text(sums),
      )
    text = self._manifest(job, arrays).to_json()
    folders.stage(job.tmp, text)
    _point("manifest written")
    if self._guard is not None:
      self._guard()
    folders.commit(job.tmp, text, self._workdir, job.step, job.token)
    _point("committed")

  def _manifest(self, job: _Job, arrays: Mapping[str, Array]) -> Manifest:
    return Manifest(
      step=job.step,
      arrays=arrays,
      host_state=job.host_state,
      config_digest=self._config_digest,
      writer={
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "jax": jax.__version__,
      },
    )

  def _prune(self, job: _Job) -> None:
    """Removes old checkpoints; process 0 calls it."""
    every = self._keep_every_steps
    try:
      # Newer steps are of a past that a rollback has left behind.
      saved = [s for s in folders.steps(self._workdir) if s <= job.step]
      for step in sorted(saved)[: -self._keep]:
        if step in job.keep_steps or (every and step % every == 0):
          continue
        retired = folders.retire(self._workdir, step, job.token)
        _point("renamed for removal")
        folders.discard(retired)
    except (OSError, CheckpointError) as e:
      logging.warning("old checkpoints could not be removed: %s", e)

  def _fail(self, job: _Job, error: BaseException) -> None:
    """Ends a failed save on all processes, and keeps its error."""
    if isinstance(error, ValueError) and paths.is_remote(job.tmp):
      error = objects.as_os_error(error, job.tmp)
    reason = disk.reason(error, job.tmp)
    expected = CheckpointError | ConfigError | OSError | process.JobError
    if not isinstance(error, expected):
      reason = f"{type(error).__name__}: {reason}"
    self._error = CheckpointError(
      f"the checkpoint of step {job.step} was not saved: {reason}"
    )
    self._error.__cause__ = error
    logging.error("%s", self._error)
    job.event.fail(reason)
    # The disk may be full, and other files need the space. With several
    # processes, others may still be writing there; the next start removes it.
    if jax.process_count() == 1:
      if not paths.is_remote(job.tmp) and os.path.lexists(job.tmp):
        folders.discard(job.tmp)
