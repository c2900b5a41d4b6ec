"""Saves the train state in the background while training goes on.

1. `save` copies this process's shards to host memory (snapshot.py) and starts a
   thread. The training loop waits only for the copy.
2. The thread writes the shards with tensorstore (integrity.py); before that to
   its own host, with config.local_ckpt_* (local_checkpoints.py).
3. When all processes are done, process 0 checks the files, writes the manifest
   and commits the checkpoint at one instant (folders.py).
4. Process 0 removes old checkpoints.
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
  keep = settings.whole_number(config, "keep_ckpts", 2, least=0)
  needs = {
    "keep_ckpt_*": lengths.keep_ckpt,
    "local_ckpt_*": lengths.local_ckpt,
    "save_at_start": config.get("save_at_start"),
    'nonfinite="rollback"': config.get("nonfinite") == "rollback",
  }
  for key, value in needs.items():
    if value and not keep:
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
  """The arrays with those in float32 of some trees in another dtype."""
  result = []
  for name, x in named:
    dtype = dtypes.get(name.split("/")[0])
    if dtype and x.ndim and x.dtype == np.float32:
      x = sharding.on_device(x).astype(dtype)
    result.append((name, x))
  return result


def _point(name: str) -> None:
  """A named moment of a save. Does nothing; tests replace it by faults."""


@dataclasses.dataclass
class _Job:
  step: int
  arrays: dict[str, Array]
  pieces: list[snapshot.Piece]
  sums: snapshot.PartialSums
  shared: bool
  host_state: HostState
  token: str
  event: process.Event
  tmp: str
  keep_steps: frozenset[int]


class Checkpointer:
  """Saves checkpoints of a workdir in the background, one at a time.

  All processes call its methods in the same order. All calls after a failed
  save raise its error: a run must not go on in the belief that it is saved.
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
    """`keep` is the number of newest checkpoints; with 0, nothing is saved.

    `dtypes` is config.ckpt_dtype.
    `guard` is called before a commit, and raises if this job may no longer
    write here (lease.Lease.check).
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
    self._is_shared = False  # Whether the newest save is.
    self._error: CheckpointError | None = None
    # Time for which the newest `save` blocked its caller.
    self.last_stall_secs = 0.0
    self.last_write_secs = 0.0  # Of the newest committed save,
    self.last_saved_step: int | None = None  # and its step.

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
    """Starts to save; returns `step` when the state may be donated.

    None if this run saves nothing. The save does not remove the checkpoints of
    `keep_steps`; unless `shared`, it is not in the workdir but on the hosts;
    with `block`, it is committed at the return.
    """
    if not self._keep:
      return None
    # A copy, because the program changes it while the save is being written.
    host_json = json.dumps((host_state or HostState()).to_json())
    named = _rounded(trees.flatten_with_names(state), self._dtypes)
    jax.block_until_ready(named)
    started = time.monotonic()
    self.wait()
    # At most one earlier save may still be removing old checkpoints. If
    # removing is slower than saving, more would fill the disk.
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
    """Whether the hosts keep a checkpoint of `step`; the same on all of them.

    Not while process 0 writes to the workdir, for which the loop would wait.
    """
    if not self._keep or self._local is None or not self._local.due(step):
      return False
    return process.broadcast(not (self.in_flight and self._is_shared))

  def check(self) -> None:
    if self._error is not None:
      raise self._error

  def wait(self) -> float | None:
    """Waits until every save is committed; old ones may still be in removal.

    Returns the seconds of the last write; None before the first save.
    """
    self._settled.wait()
    self.check()
    return None if self.last_saved_step is None else self.last_write_secs

  @property
  def in_flight(self) -> bool:
    return not self._settled.is_set()

  def remove_local(self) -> None:
    if self._local is not None:
      self._local.remove()

  def close(self) -> None:
    for thread in self._threads:
      thread.join()
    self.check()

  def _run(self, job: _Job) -> None:
    started = time.monotonic()
    try:
      _point("begin")
      sums = job.sums()  # Before the pieces are gone.
      if self._local is not None:
        self._local.write(self._manifest(job, job.arrays), job.pieces, sums)
      if not job.shared:
        job.event.forget()
        return
      self._write_arrays(job)
      job.event.done(snapshot.sums_by_name(job.pieces, sums))
      job.pieces.clear()  # Frees pinned memory.
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
    if self._index == 0:
      folders.begin(job.tmp)
    if paths.is_remote(job.tmp):
      job.event.wait_for_first()
    if self._index == 0:  # It writes the metadata of all arrays.
      integrity.write_metadata(job.tmp, job.arrays, job.event.check)
    _point("metadata written")
    own = [piece for piece in job.pieces if not piece.is_copy]
    parts = snapshot.blocks(own, job.arrays)
    integrity.write(job.tmp, job.arrays, parts, job.event.check)
    _point("data written")

  def _commit(
    self, job: _Job, partial_sums: list[dict[str, checksums.Sums]]
  ) -> None:
    if problems := integrity.inspect(job.tmp, self._manifest(job, job.arrays)):
      hint = " Do all hosts see the same workdir?" * (jax.process_count() > 1)
      raise CheckpointError(
        f"{problems[0]} ({len(problems)} such problem(s) after writing).{hint}"
      )
    arrays = {
      name: dataclasses.replace(
        array,
        metadata_sha256=array.metadata_digest,
        checksum=checksums.as_text(
          checksums.add(sums[name] for sums in partial_sums if name in sums)
        ),
      )
      for name, array in job.arrays.items()
    }
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
    try:
      # Newer steps belong to a run that was rolled back, not to this one.
      saved = [s for s in folders.steps(self._workdir) if s <= job.step]
      for step in sorted(saved)[: -self._keep]:
        every = self._keep_every_steps
        if step in job.keep_steps or (every and step % every == 0):
          continue
        retired = folders.retire(self._workdir, step, job.token)
        _point("renamed for removal")
        folders.discard(retired)
    except (OSError, CheckpointError) as e:
      logging.warning("old checkpoints could not be removed: %s", e)

  def _fail(self, job: _Job, error: BaseException) -> None:
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
    # The disk may be full, and other files need the room.
    if jax.process_count() == 1:
      if not paths.is_remote(job.tmp) and os.path.lexists(job.tmp):
        folders.discard(job.tmp)
