"""The lease of a workdir, lease.json, so that one job at a time writes to it.

The lease names the job that holds the workdir, and a thread of that job renews
it. Another job takes it over if the holder is dead. On the same machine, the
holder is dead if its process is gone (boot, process number and start time
together identify a process for ever). On another machine, it is dead if the
lease is not renewed. Should a job take over by mistake, `check` raises in the
job that lost the lease, and `check` is called before every commit of a
checkpoint.

In a file system the lease is created by a hard link, which only one of several
jobs can make. In an object store it is created by a write that succeeds only if
the object still has the version that was read.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError
from bigtrain.files import disk, objects, paths

FILE = "lease.json"

# A lease is renewed four times in a term. If it is not renewed for a whole
# term, its job counts as dead.
TERM_SECS = 60.0
_POLL_SECS = 1.0


class LeaseLostError(Exception):
  """Another job has taken over the workdir. This one must not write to it."""


@dataclasses.dataclass(frozen=True)
class Holder:
  """The job that holds a workdir: the contents of lease.json."""

  token: str  # Random; identifies this lease.
  host: str
  pid: int
  machine: str  # Boot id and process namespace that `pid` belongs to.
  process_start: int  # Start of the process, in clock ticks since boot.
  since: str  # When the lease was taken, for people to read.
  expires: float  # Unix time in seconds, unless renewed.

  def is_alive(self) -> bool | None:
    """Whether its process exists; None if it is on another machine."""
    if not self.machine or self.machine != _machine():
      return None
    return _process_start(self.pid) == self.process_start

  def __str__(self) -> str:
    return f"process {self.pid} on host {self.host}, since {self.since}"


def _machine() -> str:
  """Identifies this machine, until it reboots, and this container."""
  try:
    with open("/proc/sys/kernel/random/boot_id") as file:
      return file.read().strip() + " " + os.readlink("/proc/self/ns/pid")
  except OSError:
    return ""  # Not Linux: only renewal shows that a job is alive.


def _process_start(pid: int) -> int:
  """Start time of a process in clock ticks since boot; 0 if there is none."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      # The second field is the command's name and may contain spaces.
      fields = file.read().rpartition(")")[2].split()
  except OSError:
    return 0
  # A zombie is dead but still has an entry.
  return 0 if fields[0] in "ZX" else int(fields[19])


class Lease:
  """A workdir held by this process, until `release`; see `acquire`."""

  def __init__(self, path: str, holder: Holder, term_secs: float):
    self._path = path
    self._holder = holder
    self._term_secs = term_secs
    self._lost: str | None = None  # Message about who has taken it over.
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._renew, daemon=True)
    self._thread.start()

  def _renew(self) -> None:
    while not self._stop.wait(self._term_secs / 4):
      try:
        self.check()
        expires = time.time() + self._term_secs
        _replace(self._path, dataclasses.replace(self._holder, expires=expires))
      except LeaseLostError as e:
        logging.error("%s", e)
        return
      except OSError as e:  # The disk may be full. The next try may succeed.
        logging.warning("%s: cannot be renewed: %s", self._path, e)

  def check(self) -> None:
    """Raises LeaseLostError if another job holds the workdir now."""
    if self._lost is None:
      holder = _read(self._path)
      if holder is None or holder.token == self._holder.token:
        return  # If the file was deleted, the next renewal restores it.
      self._lost = f"{self._path}: this job's lease was taken over by {holder}."
    raise LeaseLostError(self._lost)

  def release(self) -> None:
    """Ends the renewal, and removes the lease."""
    if self._stop.is_set():
      return
    self._stop.set()
    self._thread.join()
    try:
      self.check()
      paths.remove(self._path)
    except LeaseLostError:
      pass  # The file belongs to another job now.
    except OSError as e:  # The lease will expire.
      logging.warning("%s: cannot be removed: %s", self._path, e)

  def __enter__(self) -> "Lease":
    return self

  def __exit__(self, *exception: Any) -> None:
    self.release()


@contextlib.contextmanager
def hold(workdir: str) -> Iterator[Callable[[], None] | None]:
  """Holds a workdir's lease inside a `with` block.

  Only process 0 holds it, and yields `Lease.check`; the others yield None.
  """
  import jax

  if jax.process_index() != 0:
    yield None
    return
  with acquire(workdir) as lease:
    process.on_abrupt_end(lease.release)
    yield lease.check


def acquire(workdir: str, term_secs: float = TERM_SECS) -> Lease:
  """Takes the lease of a workdir.

  Raises:
    ConfigError: if another job holds it.
  """
  path = os.path.join(workdir, FILE)
  try:
    paths.make_folder(workdir)
    while True:
      own = Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        process_start=_process_start(os.getpid()),
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        expires=time.time() + term_secs,
      )
      # If the lease has changed meanwhile, another turn looks at it again.
      if _create(path, own) or _take_over(path, own, term_secs):
        return Lease(path, own, term_secs)
  except OSError as e:
    raise ConfigError(
      f"--workdir={workdir}: cannot write there: "
      f"{disk.short_reason(e, workdir)}."
    ) from e


def _text(holder: Holder) -> str:
  return json.dumps(dataclasses.asdict(holder), indent=1) + "\n"


def _create(path: str, holder: Holder) -> bool:
  """Writes a new lease; False if there is one already."""
  if paths.is_remote(path):
    version = objects.read(path)
    return version.content is None and objects.write(
      path, _text(holder).encode(), instead_of=version
    )
  tmp = f"{path}.{holder.token}"
  try:
    with open(tmp, "w") as file:
      file.write(_text(holder))
    _link(tmp, path)
  except FileExistsError:
    return False
  finally:
    paths.remove(tmp)
  return True


def _replace(path: str, holder: Holder) -> None:
  """Overwrites the lease, which this job holds or has claimed."""
  if not paths.is_remote(path):
    with paths.replacing(path) as file:
      file.write(_text(holder))
    return
  version = objects.read(path)
  current = _parse(version.content)
  # If another job has taken it over, the next `check` raises.
  if current is None or current.token == holder.token:
    objects.write(path, _text(holder).encode(), instead_of=version)


def _link(tmp: str, path: str) -> None:
  """Gives a file another name. Only one of several jobs can, even on NFS."""
  try:
    os.link(tmp, path)
  except OSError as e:
    if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
      raise
    # This file system has no hard links.
    with open(tmp) as source, open(path, "x") as file:
      file.write(source.read())


def read(workdir: str) -> Holder | None:
  """The job that holds a workdir, if there is one."""
  return _read(os.path.join(workdir, FILE))


def _read(path: str) -> Holder | None:
  try:
    return _parse(paths.read_bytes(path))
  except FileNotFoundError:
    return None


def _parse(content: bytes | None) -> Holder | None:
  try:
    holder = Holder(**json.loads(content or b""))
  except (ValueError, TypeError):
    return None
  kinds = [type(value) for value in dataclasses.astuple(holder)]
  valid = kinds == [str, str, int, str, int, str, float]
  return holder if valid and re.fullmatch("[0-9a-f]+", holder.token) else None


def _take_over(path: str, own: Holder, term_secs: float) -> bool:
  """Replaces the lease of a dead job by `own`.

  Returns: False if the lease has changed in the meantime.

  Raises:
    ConfigError: if the other job is alive.
  """
  version = objects.read(path) if paths.is_remote(path) else None
  other = _parse(version.content) if version else _read(path)
  if other and other.token == own.token:
    return True  # Our write had succeeded, but its answer was lost.
  alive = other.is_alive() if other else None
  if other and alive:
    _refuse(path, other)
  why = "that process is gone"
  if alive is None:
    if not _watch(path, other, term_secs):
      return False
    why = "it was not renewed" if other else "it cannot be read"
  taken = (
    _replace_file(path, other, own, term_secs)
    if version is None
    else objects.write(path, _text(own).encode(), instead_of=version)
  )
  if taken:
    logging.warning("%s: taken over from %s: %s", path, other, why)
  return taken


def _replace_file(
  path: str, dead: Holder | None, own: Holder, term_secs: float
) -> bool:
  """Replaces a dead job's lease, if no other job does so at the same time."""
  # The claim is a hard link to the lease. Of several jobs that see the same
  # dead lease, only one can create it. A late job may create one again, but by
  # then the content is no longer the dead lease.
  claim = f"{path}.{dead.token if dead else 'unreadable'}.claim"
  try:
    _link(path, claim)
  except FileNotFoundError:
    return False
  except FileExistsError:
    time.sleep(term_secs / 20)
    with contextlib.suppress(FileNotFoundError):
      if time.time() - os.lstat(claim).st_ctime > term_secs:
        os.remove(claim)  # Its owner died before it could remove it.
    return False
  try:
    if _read(claim) != dead:
      return False
    _replace(path, own)
  finally:
    os.remove(claim)
  return True


def _watch(path: str, holder: Holder | None, term_secs: float) -> bool:
  """Waits until a lease has gone without renewal for a whole term.

  Returns: False if it was removed in the meantime.

  Raises:
    ConfigError: if it was renewed, so that the other job is alive.
  """
  # The clocks of two machines may differ, so it is watched for a whole term.
  began = time.monotonic()
  logging.warning(f"{path}: held by {holder}; waiting to see if it is renewed")
  while True:
    process.check_preempted()  # A term may exceed a scheduler's grace period.
    overdue = time.time() - holder.expires if holder else 0.0
    if max(overdue, time.monotonic() - began) > term_secs:
      return True
    current = _read(path)
    if current is None and not paths.exists(path):
      return False
    if current is not None and current != holder:
      _refuse(path, current)
    time.sleep(min(_POLL_SECS, term_secs / 20))


def _refuse(path: str, holder: Holder) -> NoReturn:
  raise ConfigError(
    f"{path}: another job runs in this workdir: {holder}. Use another "
    "--workdir, or end that job first."
  )
