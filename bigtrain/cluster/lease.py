"""One job at a time in a workdir: workdir/lease.json.

Two jobs that write the same checkpoints and rows would mix them. The lease
says who holds the workdir: host, process, since when, and until when unless it
is renewed, which a thread does. A job that finds another's lease

  on the same machine, looks whether that process still lives: boot, process
      number and start time together are never used twice;
  on another machine, watches whether the lease is renewed.

and takes a dead one's lease over, with a notice. A lease is lost, rather than
shared, if two machines ever disagree: `check` raises in the job that lost it,
and a checkpoint is committed only after a `check`.

In a file system the lease is created by a hard link, which only one of several
jobs can make; in an object store by a write on the condition that the version
which was looked at is still there.
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
from typing import Any

from bigtrain.cluster import process
from bigtrain.files import objects, paths
from bigtrain.settings import ConfigError

FILE = "lease.json"

# A live job on another machine is seen to renew within a quarter of this, and
# a dead one's lease is taken over after at most this.
TERM_SECS = 60.0

_POLL_SECS = 1.0


class LeaseLostError(Exception):
  """Another job has taken the workdir over; this one must not write there."""


@dataclasses.dataclass(frozen=True)
class Holder:
  """Who holds a workdir; the content of lease.json.

  Attributes:
    token: random, of this one lease.
    host: its name.
    pid: of the process.
    machine: boot and process namespace in which the pid means something.
    process_start: of the process, in the kernel's clock ticks since boot.
    since: when the lease was taken, for people.
    expires: seconds since the epoch until which it holds unless renewed.
  """

  token: str
  host: str
  pid: int
  machine: str
  process_start: int
  since: str
  expires: float

  def is_alive(self) -> bool | None:
    """Whether its process lives; None if it is out of sight."""
    if not self.machine or self.machine != _machine():
      return None
    return _process_start(self.pid) == self.process_start

  def __str__(self) -> str:
    return f"process {self.pid} on host {self.host}, since {self.since}"


def _machine() -> str:
  """The boot of this machine and the namespace of its process numbers."""
  try:
    with open("/proc/sys/kernel/random/boot_id") as file:
      return file.read().strip() + " " + os.readlink("/proc/self/ns/pid")
  except OSError:
    return ""  # Not Linux: leases are judged by whether they are renewed.


def _process_start(pid: int) -> int:
  """Start time of a process; 0 if there is none."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      # The second field is the command's name and may contain anything.
      fields = file.read().rpartition(")")[2].split()
  except OSError:
    return 0
  # A zombie is dead, and its start time still stands there.
  return 0 if fields[0] in "ZX" else int(fields[19])


class Lease:
  """A workdir held by this process, until `release`."""

  def __init__(self, path: str, holder: Holder, term_secs: float):
    """Use `acquire`."""
    self._path = path
    self._holder = holder
    self._term_secs = term_secs
    self._lost: str | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._renew, name="lease", daemon=True
    )
    self._thread.start()

  def _renew(self) -> None:
    while not self._stop.wait(self._term_secs / 4):
      try:
        self.check()
        _write(self._path, self._renewed(), replace=True)
      except LeaseLostError as e:
        logging.error("%s", e)
        return
      except OSError as e:  # A full disk, say: the next time may be better.
        logging.warning("%s: cannot be renewed: %s", self._path, e)

  def _renewed(self) -> Holder:
    return dataclasses.replace(
      self._holder, expires=time.time() + self._term_secs
    )

  def check(self) -> None:
    """Raises LeaseLostError if another job holds the workdir now."""
    if self._lost is None:
      found = _read(self._path)
      if found is None or found.token == self._holder.token:
        return  # Not there: the folder was cleared, the next renewal returns.
      self._lost = f"{self._path}: this job's lease was taken over by {found}."
    raise LeaseLostError(self._lost)

  def release(self) -> None:
    """Gives the workdir back."""
    if self._stop.is_set():
      return
    self._stop.set()
    self._thread.join()
    try:
      self.check()
      _remove(self._path)
    except LeaseLostError:
      pass  # Another job has the workdir now: its file is not ours to remove.
    except OSError as e:  # It runs out by itself.
      logging.warning("%s: cannot be removed: %s", self._path, e)

  def __enter__(self) -> "Lease":
    return self

  def __exit__(self, *exception: Any) -> None:
    self.release()


def acquire(workdir: str, term_secs: float = TERM_SECS) -> Lease:
  """Takes the lease of a workdir; of the processes of a job, one does.

  Args:
    workdir: is created if it is not there.
    term_secs: how long the lease holds unless renewed.

  Raises:
    ConfigError: another job holds it, or the folder cannot be written to.
  """
  path = os.path.join(workdir, FILE)
  try:
    paths.make_folder(workdir)
    while True:
      mine = Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        process_start=_process_start(os.getpid()),
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        expires=time.time() + term_secs,
      )
      try:
        _write(path, mine, replace=False)
      except FileExistsError:
        if not _take_over(path, mine, term_secs):
          continue  # It is gone or has changed: look again.
      return Lease(path, mine, term_secs)
  except OSError as e:
    raise ConfigError(
      f"--workdir={workdir}: cannot write there: {e.strerror} ({e.filename})."
    ) from e


def _text(holder: Holder) -> str:
  return json.dumps(dataclasses.asdict(holder), indent=1) + "\n"


def _write(path: str, holder: Holder, *, replace: bool) -> None:
  """Writes the lease whole; raises FileExistsError unless it may replace."""
  if paths.is_remote(path):
    _write_object(path, holder, replace)
    return
  tmp = f"{path}.{holder.token}"
  try:
    with open(tmp, "w") as file:
      file.write(_text(holder))
    if replace:
      os.replace(tmp, path)
    else:
      _link(tmp, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.remove(tmp)


def _write_object(path: str, holder: Holder, replace: bool) -> None:
  """As `_write`; what another job has taken over is not replaced."""
  found = objects.read(path)
  there = _parse(found.content)
  if replace and there is not None and there.token != holder.token:
    return  # The next check finds it.
  free = replace or found.content is None
  if free and objects.write(path, _text(holder).encode(), instead_of=found):
    return
  if not replace:
    raise FileExistsError(errno.EEXIST, "File exists", path)


def _remove(path: str) -> None:
  if paths.is_remote(path):
    objects.write(path, None)
    return
  with contextlib.suppress(FileNotFoundError):
    os.remove(path)


def _link(tmp: str, path: str) -> None:
  """Gives a file its name, which only one of several can, NFS included."""
  try:
    os.link(tmp, path)
  except OSError as e:
    if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
      raise
    # No links on this file system.
    with open(tmp) as source, open(path, "x") as file:
      file.write(source.read())


def _read(path: str) -> Holder | None:
  """Who holds the lease; None if nobody does or it cannot be understood."""
  try:
    return _parse(paths.read_bytes(path))
  except FileNotFoundError:
    return None


def _parse(content: bytes | None) -> Holder | None:
  """The holder that a lease's content tells of."""
  try:
    holder = Holder(**json.loads(content or b""))
  except (ValueError, TypeError):
    return None
  kinds = [type(value) for value in dataclasses.astuple(holder)]
  if kinds != [str, str, int, str, int, str, float]:
    return None
  return holder if re.fullmatch("[0-9a-f]+", holder.token) else None


def _take_over(path: str, mine: Holder, term_secs: float) -> bool:
  """Replaces the lease of a dead job by `mine`; False to look again.

  Raises:
    ConfigError: its holder is alive.
  """
  version = objects.read(path) if paths.is_remote(path) else None
  found = _parse(version.content) if version else _read(path)
  if found and found.token == mine.token:
    return True  # Its write had an answer that was lost on the way.
  alive = found.is_alive() if found else None
  if alive:
    _refuse(path, found)
  why = "that process is gone"
  if alive is None:
    if not _watch(path, found, term_secs):
      return False
    why = "it was not renewed" if found else "it cannot be read"
  taken = (
    _replace_file(path, found, mine, term_secs)
    if version is None
    else objects.write(path, _text(mine).encode(), instead_of=version)
  )
  if taken:
    logging.warning("%s: taken over from %s: %s", path, found, why)
  return taken


def _replace_file(
  path: str, found: Holder | None, mine: Holder, term_secs: float
) -> bool:
  """Replaces the lease `found`, if it is still that; whether it did."""
  # Of several that see the same dead lease, one creates the claim to it; and
  # whoever comes late finds that what it claimed is not that lease any more.
  claim = f"{path}.{found.token if found else 'unreadable'}.claim"
  try:
    _link(path, claim)
  except FileNotFoundError:
    return False
  except FileExistsError:
    time.sleep(term_secs / 20)
    with contextlib.suppress(FileNotFoundError):
      if time.time() - os.lstat(claim).st_ctime > term_secs:
        os.remove(claim)  # Its owner died in the line below.
    return False
  try:
    if _read(claim) != found:
      return False
    _write(path, mine, replace=True)
  finally:
    os.remove(claim)
  return True


def _watch(path: str, found: Holder | None, term_secs: float) -> bool:
  """Waits until a lease counts as not renewed; False if it vanishes.

  The clocks of two machines may differ, so one that has just expired is
  watched for a whole term.
  """
  began = time.monotonic()
  logging.warning("%s: held by %s; waiting whether it is renewed", path, found)
  while True:
    process.check_preempted()  # It may take longer than the grace time.
    overdue = time.time() - found.expires if found else 0.0
    if max(overdue, time.monotonic() - began) > term_secs:
      return True
    now = _read(path)
    if now != found:
      if now is None and not paths.exists(path):
        return False
      if now is not None:
        _refuse(path, now)
    elif found is None and not paths.exists(path):
      return False
    time.sleep(min(_POLL_SECS, term_secs / 20))


def _refuse(path: str, holder: Holder) -> None:
  raise ConfigError(
    f"{path}: another job runs in this workdir: {holder}. Use another "
    "--workdir, or end that job first."
  )
